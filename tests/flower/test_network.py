"""A federation of machines with addresses of their own: a server, a site of a plan, a site that joined, and an outsider who
reaches the same network, and may do nothing there."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from fedloom.sims.federation import local
from fedloom.sims.federation.machines import registered
from fedloom.sims.federation.plan import KEYS, SERVER
from fedloom.sims.federation.programs import LOG, running
from tests.flower.hosts import address, at, listening, network, why_not
from tests.flower.machines import ENVIRONMENT, ROOT, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why := why_not()), reason=why),
]

PORT = 8000
SITES = "sites=[{domain: digits, samples: 60, name: north}, {domain: digits, samples: 60, name: south}]"
SMALL = [SITES, "data.size=8", "data.test_limit=50", "baselines=[]", "seed=3", "training.epochs=1", "rounds=1"]


@dataclass(frozen=True)
class Place:
    """The machines' namespaces, and their folders."""

    spaces: dict[str, str]
    root: Path

    def words(self, machine: str, *words: str) -> list[str]:
        return at(self.spaces[machine], sys.executable, "-m", *words)

    def fedloom(self, machine: str, *words: object, code: int = 0) -> str:
        """What a command says on a machine, in its folder there."""
        (self.root / machine).mkdir(exist_ok=True)
        command = self.words(machine, "fedloom.sims.cli", *map(str, words))
        environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
        done = subprocess.run(command, cwd=self.root / machine, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def keep(self, machine: str, *words: str) -> subprocess.Popen[bytes]:
        """A command that stays in the foreground."""
        (self.root / machine).mkdir(exist_ok=True)
        with (self.root / machine / "terminal").open("ab") as out:
            command = self.words(machine, "fedloom.sims.cli", *words)
            environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT)}
            return subprocess.Popen(command, cwd=self.root / machine, env=environment, stdin=subprocess.DEVNULL,
                                    stdout=out, stderr=out)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """All three are up, each started as the README says; north is the operator's own, south made its key itself."""
    root = tmp_path_factory.mktemp("hosts")
    with network(["server", "north", "south", "outsider"]) as spaces, contextlib.ExitStack() as stack:
        place = Place(spaces, root)
        (root / "server").mkdir()
        (root / "server" / "nodes.yaml").write_text(f"host: {address(0)}\nport: {PORT}\nsites: [{{name: north}}]")
        output = place.fedloom("server", "federation", "plan", "nodes.yaml", "--folder", "m")
        assert "fedloom federation join" in output
        shutil.copytree(root / "server" / "m" / "north", root / "north")
        shutil.rmtree(root / "server" / "m" / "north")
        stack.callback(_down, root)
        _keep(stack, place, "server", "federation", "server", "m/server")
        _keep(stack, place, "north", "federation", "node", "site.yaml")
        place.fedloom("south", "federation", "join", "south", "--superlink", f"{address(0)}:{PORT}", "--folder", ".")
        shutil.copy(root / "south" / "join.request", root / "server")
        until(lambda: running(root / "server" / "m" / "server"), "the server did not start")
        fingerprint = subprocess.run(["ssh-keygen", "-lf", "key.pub"], cwd=root / "south", capture_output=True, text=True)
        read_out = ["--fingerprint", fingerprint.stdout.split()[1]]
        assert "has admitted them" in place.fedloom(
            "server", "federation", "admit", "join.request", "--folder", "m", *read_out
        )
        shutil.copy(root / "server" / "m" / "server" / "members.yaml", root / "south")
        shutil.copy(root / "server" / "m" / "server" / "members.yaml", root / "north")
        for site in ("south", "north"):
            assert "unchanged" in place.fedloom(site, "federation", "accept", "members.yaml", "--yes") or site == "south"
        assert (root / "north" / "peers").read_text() == (root / "south" / "peers").read_text()
        _keep(stack, place, "south", "federation", "node", "site.yaml")
        until(lambda: "2 nodes online" in _status(place), "the nodes did not come")
        yield place


def _keep(stack: contextlib.ExitStack, place: Place, machine: str, *words: str) -> None:
    child = place.keep(machine, *words)
    stack.callback(child.wait)
    stack.callback(child.terminate)


def _down(root: Path) -> None:
    for home in (root / "north", root / "south", root / "server" / "m" / "server"):
        local.stop(home)


def _status(place: Place) -> str:
    command = place.words("server", "fedloom.sims.cli", "federation", "status", "m")
    environment = {**ENVIRONMENT, "PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return subprocess.run(command, cwd=place.root / "server", env=environment, capture_output=True, text=True).stdout


def test_a_run_goes_through(place: Place):
    words = ["engine.name=flower", "engine.address=m", "run.name=real", "objective.subset_probability=0"]
    place.fedloom("server", "run", "digits", *SMALL, *words, "federation.secure_aggregation=true", "--quiet")
    summary = json.loads((place.root / "server" / "runs" / "real" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert (place.root / "north" / LOG).read_text().count("Receiving") >= 1  # a node in the foreground


def test_only_the_nodes_port_is_open_to_others(place: Place):
    ports = {name: listening(space) for name, space in place.spaces.items()}
    assert {port for port in ports["server"] if port[0] != "127.0.0.1"} == {("0.0.0.0", PORT)}
    for site in ("north", "south"):
        assert ports[site] and {host for host, _ in ports[site]} == {"127.0.0.1"}
    assert ports["outsider"] == []
    probe = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=3)"
    for site, (name, space) in enumerate(place.spaces.items()):
        for _, port in ports[name]:
            done = subprocess.run(at(place.spaces["outsider"], sys.executable, "-c", probe, address(site), str(port)),
                                  capture_output=True)  # fmt: skip
            assert (done.returncode == 0) == ((name, port) == ("server", PORT)), (name, port, space)


def test_an_outsider_may_do_nothing(place: Place):
    """A foreign app, a foreign key, a list of runs or nodes, throwing a site out: with Flower's own commands, and TLS."""
    before = _status(place)
    out = place.root / "outsider"
    command = place.words("outsider", "tests.flower.outsider", address(0), str(PORT), str(out))
    done = subprocess.run(
        command, cwd=place.root, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.stdout, done.stderr
    tried = json.loads(done.stdout)
    for name in ("run", "ls", "nodes", "register", "unregister"):
        assert '"success": true' not in tried[name] and '"success": false' in tried[name], tried[name]
    assert {*tried["control"].values(), *tried["runtime"].values()} == {404}
    assert (out / "ca.crt").read_text() and not tried["stolen"]
    assert _status(place) == before and "2 nodes online" in before
    assert list((place.root / "server" / "m" / "server" / "flwr").glob("apps/*nobody*")) == []


def test_a_site_reports_that_the_servers_port_is_closed_to_others(place: Place):
    for machine, folder in (("server", "m"), ("north", "."), ("south", ".")):
        assert "cannot be reached" not in place.fedloom(machine, "doctor", "--federation", folder)


def test_a_key_that_no_one_admitted_does_not_get_in(place: Place):
    """With everything else that a member has."""
    home = place.root / "outsider" / "spy"
    place.fedloom("outsider", "federation", "join", "spy", "--superlink", f"{address(0)}:{PORT}", "--folder", home)
    for name in ("ca.crt", "peers"):
        shutil.copy(place.root / "north" / name, home / name)
    with contextlib.ExitStack() as stack:
        stack.callback(local.stop, home)
        _keep(stack, place, "outsider", "federation", "node", str(home / "site.yaml"))
        until(lambda: "again in" in (home / LOG).read_text() if (home / LOG).is_file() else False, "it was let in")
    assert "2 nodes online" in _status(place)
    assert not registered(place.root / "server" / "m" / SERVER / KEYS / "spy.pub")
