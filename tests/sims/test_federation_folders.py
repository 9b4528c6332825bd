"""`fedloom federation` without a machine at work: what is wrong in plans, sheets and folders, each reported in one line."""

import contextlib
import datetime
import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedloom.conf.errors import UserError
from fedloom.sims.engines.flower import _server
from fedloom.sims.federation import keys
from fedloom.sims.federation.machines import refuse_port
from fedloom.sims.federation.plan import Plan, write_plan
from fedloom.sims.federation.programs import LOCK, PID, free_port, running
from fedloom.sims.federation.sheets import NODE_CONFIG, SERVER, SITE, ServerSheet, SiteSheet, node_config, read, write
from fedloom.sims.operations.ledger import events_table
from tests.sims.commands import Command, refused

BAD = {
    "publish: [everything]": "publish: got 'everything', takes a list of: extractor, head, none",
    "strategies: [sum_agregation]": "strategies[0]: got 'sum_agregation'; did you mean 'sum_aggregation'? (takes: ",
    "networks: [conv6, conv5]": "networks[1]: got 'conv5'; did you mean 'conv6'? (takes: ",
    "objectives: [fedprotoo]": "objectives[0]: got 'fedprotoo'; did you mean 'fedproto'?",
    "optimizers: [AdamW]": "optimizers[0]: got 'AdamW'; did you mean 'adamw'?",
    'domain: "imges:/x"': "domain: got 'imges:/x'; did you mean 'images:PATH'? (takes: ",
    "apps: all": "apps: got 'all', takes one of: \"\", any",
    "max_memory: 0.5": "max_memory: got 0.5, takes at least 1 (GB); 0: the default",
    "compile: often": "compile: got 'often', takes",
    "publish: [none, head]": "publish: got [none, head]; take [none], or only the parts",
    "environment: {A: [1]}": "environment.A: got ['1'], takes a text",
    "environment: {A: {b: c}}": "environment.A: got {'b': 'c'}, takes a text",
    "store: /": "store: got '/', takes a folder of its own",
    "store: ../..": "store: got '../..', takes a folder of its own",
    'store: ""': "store: got '', takes a folder of its own",
    "masks: always": "masks: got 'always', takes one of: \"\", required",
}
GOOD = (
    'publish: [none], strategies: [sum_aggregation, "mine:Own"], networks: ["a.b:Net"], objectives: [rp], domain: "npz:/x"'
)


@pytest.mark.parametrize("given", BAD)
def test_what_a_sheet_does_not_take_is_refused_by_plan_and_by_node(fedloom: Command, tmp_path: Path, given: str):
    nodes, sheet = tmp_path / "nodes.yaml", tmp_path / SITE
    nodes.write_text(f"sites: [{{name: a}}, {{name: b, {given}}}]")
    refused(fedloom("federation", "plan", nodes, "--folder", tmp_path / "new"), f"sites[1].{BAD[given]}")
    assert not (tmp_path / "new").exists()
    sheet.write_text(f"name: b\nsuperlink: 127.0.0.1:1\n{given}\n")
    refused(fedloom("federation", "node", sheet), f"{sheet}: {BAD[given]}")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("min_known: 3", "sites[1].min_known: got 3, but `peers` has the keys of 2 sites"),
        ("min_members: 3", "sites[1].min_members: got 3, but `peers` has the keys of 2 sites"),
        ("port: 8000", "sites[1].port: 8000 is another machine's of this plan"),
        ("port: 7000", "sites[1].port: 7000 is another machine's of this plan"),
    ],
)
def test_a_plan_whose_machines_could_never_work_is_refused(fedloom: Command, tmp_path: Path, given: str, message: str):
    (tmp_path / "nodes.yaml").write_text(f"sites: [{{name: a, port: 7000}}, {{name: b, {given}}}]")
    refused(fedloom("federation", "plan", tmp_path / "nodes.yaml", "--folder", tmp_path / "new"), message)


def test_what_a_sheet_takes_is_planned_and_kept_out_of_git(fedloom: Command, tmp_path: Path):
    (tmp_path / "nodes.yaml").write_text(f"sites: [{{name: a, {GOOD}}}]")
    assert fedloom("federation", "plan", tmp_path / "nodes.yaml", "--folder", tmp_path / "new").code == 0
    assert read(SiteSheet, tmp_path / "new" / "a" / SITE).domain == "npz:/x"
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    output = subprocess.run(["git", "status", "--porcelain"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert output.stdout == "?? nodes.yaml\n"


@pytest.mark.parametrize("host", ["http://127.0.0.1:8000", "a b", "127.0.0.1:8000", ""])
def test_a_server_is_named_by_its_name_or_address_alone(fedloom: Command, tmp_path: Path, host: str):
    (tmp_path / "nodes.yaml").write_text(f"host: '{host}'\nsites: [{{name: a}}]")
    refused(fedloom("federation", "plan", tmp_path / "nodes.yaml"), f"host: got '{host}', takes a machine's name or address")
    (tmp_path / SITE).write_text(f"name: b\nsuperlink: 'http://{host}:8000'\n")
    refused(fedloom("federation", "node", tmp_path / SITE), "superlink: got 'http://", "takes HOST:PORT")


@contextlib.contextmanager
def left(home: Path) -> Iterator[subprocess.Popen]:
    """The program of a machine, whose keeper was killed."""
    with (home / LOCK).open("w") as lock:
        code = "import fcntl, sys, time; fcntl.flock(int(sys.argv[1]), fcntl.LOCK_EX); print(flush=True); time.sleep(600)"
        words = [sys.executable, "-c", code, str(lock.fileno())]
        program = subprocess.Popen(words, pass_fds=[lock.fileno()], stdout=subprocess.PIPE, start_new_session=True)
    with program:
        assert program.stdout is not None and program.stdout.readline()
        (home / PID).write_text(f"1 {program.pid}")
        yield program


def test_what_is_left_of_a_site_is_seen_and_stopped_from_its_own_folder(fedloom: Command, tmp_path: Path):
    """The command that kept its program running was killed."""
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}]), tmp_path / "new")
    home = tmp_path / "new" / "a"
    with left(home) as program:
        said = fedloom("federation", "status", home)
        assert said.code == 1 and f"process {program.pid}, which nothing restarts" in " ".join(said.out.split()), said
        assert fedloom("federation", "down", home).out == "stopped: a\n"
    assert not running(home) and fedloom("federation", "down", home).out == "stopped: nothing was running\n"


def test_a_server_that_does_not_answer_is_a_row_of_status(fedloom: Command, tmp_path: Path):
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}]), tmp_path / "new")
    with left(tmp_path / "new" / "server"):
        said = fedloom("federation", "status", tmp_path / "new", "--json")
        fedloom("federation", "down", tmp_path / "new")
    server, site = json.loads(said.out)["machines"]
    assert said.code == 1 and "the SuperLink cannot be asked" in server["at the server"] and not server["ok"]
    assert site == {"machine": "a", "here": "down", "at the server": "not authenticated", "ok": False}


@pytest.mark.parametrize("words", [["status"], ["down"], ["logs", "--folder"]], ids=lambda words: words[0])
def test_a_folder_that_is_none_is_refused(fedloom: Command, tmp_path: Path, words: list[str]):
    refused(fedloom("federation", *words, tmp_path / "nowhere"), "nowhere: is not the folder of a federation or a machine")


def test_logs_takes_the_folder_as_the_others_do(fedloom: Command, tmp_path: Path):
    write_plan(Plan(sites=[{"name": "a"}, {"name": "b"}]), tmp_path / "m")
    for name in ("a", "b"):
        (tmp_path / "m" / name / "log.txt").write_text(f"of {name}\n")
    assert fedloom("federation", "logs", tmp_path / "m", "b").out == "== b\nof b\n"
    assert fedloom("federation", "logs", "b", "--folder", tmp_path / "m").out == "== b\nof b\n"
    assert fedloom("federation", "logs", tmp_path / "m").out == "== a\nof a\n== b\nof b\n"
    refused(fedloom("federation", "logs", tmp_path / "m", "c"), "unknown machine 'c'")
    (tmp_path / "m" / "a" / "log.txt").write_text("one\x1b]0;owned\x07\x9b2J two\nthree\n")
    assert fedloom("federation", "logs", tmp_path / "m", "a").out == "== a\none 2J two\nthree\n"


def test_what_cannot_be_written_is_reported_in_a_line(fedloom: Command, tmp_path: Path):
    (tmp_path / "file").touch()
    for folder in ("/proc/fed", tmp_path / "file"):
        refused(fedloom("federation", "up", folder, "--nodes", "1"), "cannot be written", "or name another folder")


def test_a_port_in_use_is_reported_with_the_key_to_change(fedloom: Command, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        write_plan(Plan(port=port, sites=[{"name": "a"}]), tmp_path / "m")
        message = f"server.yaml: port {port} is in use by another program; stop that program, or change it there"
        refused(fedloom("federation", "server", tmp_path / "m" / "server"), message)
        refused(fedloom("federation", "up", tmp_path / "m"), message)
    refuse_port(tmp_path / "m" / "server", ServerSheet(port=port))


def test_a_certificate_that_has_expired_is_named_before_the_server_starts(
    fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Once the server was awaited for a minute, and the message did not name the certificate."""
    monkeypatch.setattr(keys, "LASTS", datetime.timedelta(minutes=-5))
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}]), tmp_path / "m")
    server, message = tmp_path / "m" / "server", "server.crt is valid from"
    refused(fedloom("federation", "up", tmp_path / "m"), f"{server}: {message}", "make a new plan, or set the clock")
    assert not running(server)


def test_a_plan_with_further_sites_adds_them_alone(fedloom: Command, tmp_path: Path):
    """Those that are there keep their keys, moved to another machine or not, and learn the new ones'."""
    plan, folder = tmp_path / "nodes.yaml", tmp_path / "m"
    plan.write_text("sites: [{name: north}, {name: south}]")
    assert fedloom("federation", "plan", plan, "--folder", folder).code == 0
    shutil.rmtree(folder / "south")  # it is on its machine
    before = {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("peers", "members.yaml")
    }
    refused(
        fedloom("federation", "plan", plan, "--folder", folder), "already has all sites of the plan; add a site to the plan"
    )
    plan.write_text("port: 8001\nsites: [{name: north}, {name: east}]")
    message = "is a federation with the server 127.0.0.1:8000, not 127.0.0.1:8001; use the same"
    refused(fedloom("federation", "plan", plan, "--folder", folder), message)
    assert not (folder / "east").exists()
    plan.write_text("sites: [{name: north}, {name: south}, {name: east, publish: [none]}]")
    said = fedloom("federation", "plan", plan, "--folder", folder)
    assert said.code == 0 and f"{folder}/east: copy it" in said.out and "admits them when it starts" in said.out, said
    assert not (folder / "south").exists() and read(SiteSheet, folder / "east" / SITE).publish == ["none"]
    assert {path: path.read_bytes() for path in before} == before
    peers = (folder / "north" / "peers").read_text()
    assert peers == (folder / "east" / "peers").read_text()
    assert [line.split()[0] for line in peers.splitlines()] == ["east", "north", "south"]


def test_a_plan_that_differs_from_existing_folders_says_so(fedloom: Command, tmp_path: Path):
    plan, folder = tmp_path / "nodes.yaml", tmp_path / "m"
    plan.write_text("sites: [{name: north}, {name: south, masks: required}]")
    assert fedloom("federation", "plan", plan, "--folder", folder).code == 0
    plan.write_text("sites: [{name: north, epsilon: 4, masks: required}]")
    keys_of = folder / "server" / "keys"
    lines = (f"{folder}/north/site.yaml differs from the plan in masks, epsilon; change it there, and restart the node",
             f"south is not in the plan, but stays a member; to exclude it, delete {keys_of}/south.pub")  # fmt: skip
    refused(fedloom("federation", "plan", plan, "--folder", folder), "already has all sites of the plan", *lines)
    plan.write_text("sites: [{name: north, epsilon: 4, masks: required}, {name: east}]")
    said = fedloom("federation", "plan", plan, "--folder", folder)
    assert said.code == 0 and [line for line in said.out.splitlines() if line in lines] == list(lines), said
    plan.write_text("sites: [{name: North}]")
    refused(fedloom("federation", "plan", plan, "--folder", folder), "'North' is taken by 'north', which differs in upper")
    plan.write_text("sites: [{name: a}, {name: A}]")
    refused(fedloom("federation", "plan", plan, "--folder", tmp_path / "n"), "sites[1].name: 'A' is taken by 'a', which")
    assert not (tmp_path / "n").exists()


def test_up_names_the_nodes_that_end_at_once_and_those_with_old_settings(fedloom: Command, tmp_path: Path):
    plan, folder = tmp_path / "nodes.yaml", tmp_path / "m"
    plan.write_text(f"port: {free_port()}\nsites: [{{name: north, domain: 'images:none'}}, {{name: south}}]")
    assert fedloom("federation", "plan", plan, "--folder", folder).code == 0
    try:
        said = fedloom("federation", "up", folder)
        assert said.code == 2 and "north: site.yaml: domain:" in said.err and "south" not in said.err, said
        for name in ("north", "south"):
            path = folder / name / SITE
            path.write_text(re.sub("(?m)^domain: .*", "", path.read_text()) + "\nmax_steps: 7\n")
        said = fedloom("federation", "up", folder)
        assert said.code == 0 and f"south: is up with settings from before {SITE} was changed; restart it" in said.out, said
        assert "north: is up" not in said.out and "fedloom run EXPERIMENT.yaml engine.name=flower" in said.out
    finally:
        fedloom("federation", "down", folder)


def test_a_server_that_does_not_run_takes_no_run(tmp_path: Path):
    """Its folder may have been moved to another machine than the plan's."""
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}]), tmp_path / "m")
    with pytest.raises(UserError, match=rf"or all of it with `fedloom federation up {tmp_path}/m`$"):
        _server(str(tmp_path / "m"))
    home = (tmp_path / "m" / "server").rename(tmp_path / "elsewhere")
    for address in (home, tmp_path / "elsewhere"):
        with pytest.raises(UserError, match=r"engine\.address: the server of .* does not run on this machine"):
            _server(str(address))


def test_a_server_of_an_earlier_version_is_refused_by_every_command(fedloom: Command, tmp_path: Path):
    """Its keys may be known to whoever reached its port."""
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}]), tmp_path / "m")
    home, message = tmp_path / "m" / "server", "is from an earlier version"
    old = "host: 127.0.0.1\nport: 8000\ncertificate: server.crt\nkey: server.key\nauthority: ca.crt\nauthenticate: true\n"
    for text in (old, "port: 8000\n"):
        (home / SERVER).write_text(text)
        refused(fedloom("federation", "server", home), message, "Plan again")
        refused(fedloom("federation", "up", tmp_path / "m"), message)
        (tmp_path / "nodes.yaml").write_text("sites: [{name: a}, {name: b}]")
        refused(fedloom("federation", "plan", tmp_path / "nodes.yaml", "--folder", tmp_path / "m"), message)
        with pytest.raises(UserError, match=message):
            _server(str(tmp_path / "m"))
        said = fedloom("doctor", "--federation", home)
        assert said.code == 1 and "earlier version" in " ".join(said.out.split())


def test_a_federation_without_tls_is_refused(fedloom: Command, tmp_path: Path):
    (tmp_path / "nodes.yaml").write_text("tls: false\nhost: fed.example.org\nsites: [{name: a}]")
    refused(fedloom("federation", "plan", tmp_path / "nodes.yaml", "--folder", tmp_path / "m"), "tls: false is not possible")
    refused(fedloom("federation", "up", tmp_path / "m", "--no-tls"), "tls: false is not possible")
    (tmp_path / SITE).write_text("name: b\nsuperlink: 127.0.0.1:1\n")
    refused(fedloom("federation", "node", tmp_path / SITE), "certificate: is empty, so anyone")
    assert not (tmp_path / "m").exists()


def test_a_machine_that_is_down_is_reported_by_the_exit_code(fedloom: Command, tmp_path: Path):
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}]), tmp_path / "m")
    for words in (["federation", "status", tmp_path / "m"], ["doctor", "--federation", tmp_path / "m"]):
        said = fedloom(*words)
        assert said.code == 1 and said.out and not said.err, said
        said = fedloom(*words, "--json")
        found = json.loads(said.out)
        assert said.code == 1 and not said.err and found["ok"] is False, said
        bad = [row["machine"] for row in found.get("machines", found.get("checks")) if not row["ok"]]
        assert {"server", "a"} == set(bad), found
    refused(fedloom("federation", "logs", tmp_path / "m"), "has no log of any machine")


def test_a_site_with_invalid_settings_does_not_end_the_checks_of_the_others(fedloom: Command, tmp_path: Path):
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}, {"name": "b"}]), tmp_path / "m")
    (tmp_path / "m" / "a" / SITE).write_text("max_memory: [broken\n")
    found = json.loads(fedloom("doctor", "--federation", tmp_path / "m", "--json").out)
    rows = {(row["machine"], row["check"]): row["result"] for row in found["checks"]}
    assert "cannot be read" in rows["a", SITE] and "is not running" in rows["b", "program"], rows


def test_a_node_that_runs_with_earlier_settings_is_reported(fedloom: Command, tmp_path: Path):
    """Also where the settings are not in the node's configuration, and where the new ones are invalid."""
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}]), tmp_path / "m")
    home = tmp_path / "m" / "a"
    sheet = read(SiteSheet, home / SITE)
    (home / NODE_CONFIG).write_text(node_config(sheet, home))
    as_planned = (home / SITE).read_text()
    for text, outdated in {as_planned: False, f"{as_planned}# a comment\n": False, f"{as_planned}max_memory: 2\n": True,
                           f"{as_planned}masks: required\n": True, "max_memory: [broken": True}.items():  # fmt: skip
        (home / SITE).write_text(text)
        with left(home) as program:
            status = " ".join(fedloom("federation", "status", tmp_path / "m", "--json").out.split())
            rows = {row["check"]: row for row in json.loads(fedloom("doctor", "--federation", home, "--json").out)["checks"]}
            program.kill()
        assert (f"before {SITE} was changed" in status) == outdated, (text, status)
        assert rows[SITE]["ok"] != outdated, (text, rows)
    assert f"before {SITE} was changed" not in fedloom("federation", "status", tmp_path / "m", "--json").out


def test_what_a_program_says_in_the_foreground_is_in_its_log_too(tmp_path: Path):
    """As of `fedloom federation node` in a terminal."""
    code = "from fedloom.sims.federation.programs import *; keep_running(Path('.'), lambda: ['echo', 'hello'])"
    with subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as keeper:
        assert keeper.stdout is not None
        assert [keeper.stdout.readline() for _ in range(2)] == ["hello\n", "the program ended (0); it starts again in 1 s\n"]
        keeper.terminate()
    assert (tmp_path / "log.txt").read_text().startswith("hello\nthe program ended (0)")


def test_an_address_of_no_federation_is_refused_before_anything_is_started(
    fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.chdir(tmp_path)
    words = ["run", "digits", "engine.name=flower", "engine.address=nowhere", "data.test_limit=50"]
    refused(fedloom(*words), "engine.address: 'nowhere' is not a federation's folder", "(it has none)")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "flwr").mkdir()
    (tmp_path / "flwr" / "config.toml").write_text('[superlink]\ndefault="lab"\n[superlink.lab]\naddress="127.0.0.1:1"\n')
    refused(fedloom(*words), "(it has lab)")
    assert _server("lab") is None


def test_a_sheet_that_is_written_is_read_again(tmp_path: Path):
    sheet = ServerSheet(superlink="fed.example.org:1234", port=1234)
    write(tmp_path / SERVER, sheet)
    assert read(ServerSheet, tmp_path / SERVER) == sheet


def test_the_ledgers_table_says_what_a_round_cost_and_who_joined():
    given = [
        {
            "id": 1,
            "time": "now",
            "kind": "bound",
            "digest": "",
            "body": {"nodes": {"a": 7}, "by": "joined", "keys": {"a": "ab" * 32}},
        },
        {
            "id": 2,
            "time": "now",
            "kind": "round",
            "digest": "",
            "body": {"round": 1, "record": {"epsilon": {"a": 12.345, "b": 1}}},
        },
    ]
    text = events_table(Path("run"), given).markdown()
    assert "nodes a 7 (key abababababababab); by joined" in text and "round 1; epsilon a 12.3, b 1" in text
