"""Runs that are killed at any moment and resumed end with the bits of a run that was not."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedloom.clients.storage.states import read_state
from fedloom.conf import Config, load
from fedloom.fusion.state import digest
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.unlearning.certificate import CERTIFICATES, read
from fedloom.server.unlearning.requests import KIND
from fedloom.sims.operations.simulate import simulate
from tests.server.kills import ROUNDS, begun, configured, last_round, results
from tests.server.ledgers import problems
from tests.server.parts import folder

WITHIN = [
    *(("blob", number) for number in (1, 6)),
    *(("before commit", number) for number in (1, 2, 5)),
    *(("after commit", number) for number in (1, 3)),
    ("metrics", 3),
    ("states", 1),
    ("files", 2),
]
KILLS, RUNS = 20, 5
FEDLOOM = str(Path(sys.executable).parent / "fedloom")


@pytest.fixture(scope="module")
def smooth(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], float]:
    """What a run leaves that nothing interrupts, and its seconds."""
    ended(begun(configured(tmp_path_factory.mktemp("warm"))))
    config = configured(tmp_path_factory.mktemp("smooth"))
    begin = time.monotonic()
    ended(begun(config))
    return results(folder(config)), time.monotonic() - begin


def ended(process) -> None:
    process.join(60)
    assert process.exitcode == 0


def wait(config: Config, process, round: int, delay: float) -> None:
    """Until the run has come to a round, and some seconds more."""
    while process.exitcode is None and ((last := last_round(config)) is None or last < round):
        process.join(0.002)
    process.join(delay)


def sound(config: Config) -> None:
    """Whatever a kill has left has no fault, and is not less than what was committed."""
    if last_round(config) is not None:
        assert problems(folder(config)) == []


def test_killed_at_any_moment_and_resumed_it_ends_with_the_same_bits(tmp_path: Path, smooth):
    whole, seconds = smooth
    moments, reached = random.Random(0), []
    for number in range(RUNS):
        config = configured(tmp_path / str(number))
        for round in sorted(moments.choices(range(-1, ROUNDS), k=KILLS // RUNS)):
            process = begun(config)
            wait(config, process, round, moments.uniform(0, seconds / 10))
            process.kill()
            process.join()
            reached.append(last_round(config))
            sound(config)
        ended(begun(config))
        assert results(folder(config)) == whole
        assert check(folder(config)) == []
    assert len(set(reached)) >= 3, reached  # they were spread over the run


@pytest.mark.parametrize("trap", WITHIN, ids=lambda trap: f"{trap[0]} {trap[1]}")
def test_killed_at_the_worst_moments_and_resumed_it_ends_with_the_same_bits(tmp_path: Path, smooth, trap):
    config = configured(tmp_path)
    process = begun(config, trap)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    sound(config)
    ended(begun(config))
    assert results(folder(config)) == smooth[0]
    assert check(folder(config)) == []


DIFFERENT = "[{name: mlp, widths: [6, 4]}, {name: mlp, widths: [6, 6, 4]}]"


@pytest.mark.parametrize(("words", "trap"), [
    (["strategy={name: cla_ot, start: own, server: {steps: 2}}", "objective={name: heterogeneous}"], ("blob", 12)),
    (["strategy={name: heterofl}", "objective={name: heterofl}"], ("before commit", 5)),
    (["strategy={name: fedproto}", "objective={name: fedproto}"], ("blob", 8)),
], ids=["cla_ot", "heterofl", "fedproto"])  # fmt: skip
def test_sites_with_networks_of_their_own_killed_and_resumed_end_with_the_same_bits(tmp_path: Path, words, trap):
    sites = f"sites=[{{domain: digits, count: 3, samples: 40, networks: {DIFFERENT}}}]"
    options = [sites, "network={name: mlp, widths: [6, 6, 4]}", "rounds=3", *words]
    whole, killed = (configured(tmp_path / name, *options) for name in ("whole", "killed"))
    ended(begun(whole))
    process = begun(killed, trap)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL and last_round(killed) in (1, 2)
    sound(killed)
    ended(begun(killed))
    assert results(folder(killed)) == results(folder(whole))


def test_a_request_whose_server_is_killed_again_and_again_ends_as_if_it_had_not(tmp_path: Path):
    """Killed within going back, subtracting, training, repairing and retraining, one commit later each time."""
    folders = []
    for name, first in (("whole", 0), ("killed", 3)):
        config = configured(tmp_path / name, "federation.history=all")
        ended(begun(config))
        with Ledger.open(folder(config), server=False) as ledger:
            ledger.receive("r1", KIND, ["site-0001"], "", {"rollback": True, "repair": 1, "retrain": True})
        deaths = 0
        while True:
            process = begun(config, ("after commit", first + deaths) if first else None)
            process.join(60)
            if process.exitcode == 0:
                break
            assert process.exitcode == -signal.SIGKILL
            sound(config)
            deaths += 1
        assert deaths >= 6 if first else deaths == 0
        assert check(folder(config)) == []
        folders.append(folder(config))
    one, other = (read(path / CERTIFICATES / "r1.json") for path in folders)
    for part in ("sites", "exact", "not_exact", "evidence"):
        assert one[part] == other[part], part
    assert [Path(path).name for path in one["erased"]] == [Path(path).name for path in other["erased"]]
    assert set(one["evidence"]["retrained"]["distance"].values()) == {0.0}  # going back is training without the site
    assert states(folders[0]) == states(folders[1])


RAY = ["sites=[{domain: digits, count: 3, samples: 300}]", "data.size=8", "network.width=0.25", "data.test_limit=60",
       "rounds=6", "baselines=[]", "evaluation.every=3"]  # fmt: skip


def states(path: Path) -> dict[str, str]:
    return {file.name: digest(read_state(file)) for file in (path / "states").iterdir()}


def until_round(path: Path, round: int, server: subprocess.Popen) -> None:
    """Wait until the round is committed."""
    deadline = time.monotonic() + 120
    while True:
        assert server.poll() is None and time.monotonic() < deadline
        with contextlib.suppress(Exception), Ledger.open(path, server=False) as ledger:
            if (last := ledger.last_round()) is not None and last.round >= round:
                return
        time.sleep(0.01)


def workers(session: int) -> list[int]:
    """The Ray workers that a server started."""
    listed = subprocess.run(["ps", "-e", "-o", "sid=,pid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()]
    return [int(row[1]) for row in rows if row[0] == str(session) and row[2].startswith("ray::Worker")]


@pytest.mark.slow
def test_with_ray_a_killed_server_and_a_killed_worker_change_no_bit(tmp_path: Path):
    simulate(load("digits", [*RAY, "engine.name=inline", f"run.root={tmp_path}", "run.name=inline"]))
    path = tmp_path / "ray"
    begin = [FEDLOOM, "run", *RAY, "engine.name=ray", "engine.workers=1", f"run.root={tmp_path}", "run.name=ray", "--quiet"]
    with subprocess.Popen(begin, start_new_session=True) as server:
        until_round(path, 2, server)
        server.kill()
    assert problems(path) == []
    with subprocess.Popen([FEDLOOM, "resume", str(path), "--quiet"], start_new_session=True) as server:
        until_round(path, 4, server)
        while not (found := workers(server.pid)):  # a process that is just changing its title has none
            assert server.poll() is None
            time.sleep(0.01)
        (worker,) = found
        os.kill(worker, signal.SIGKILL)
        assert server.wait(200) == 0
    assert states(path) == states(tmp_path / "inline")
    rows = [[row.digest for row in ledger.rounds()] for ledger in map(opened, (path, tmp_path / "inline"))]
    assert rows[0] == rows[1]
    assert check(path) == []


def opened(path: Path) -> Ledger:
    return Ledger.open(path, server=False)
