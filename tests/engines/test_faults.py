"""The ray engine under faults: each ends as an error of its own site, by name, and never reaches a neighbour."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import ray
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from conf import load
from sims.engines.adapter import FIRST_NODE
from sims.engines.ray import RayGrid, start

pytestmark = pytest.mark.slow
SITES = 12


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayGrid]:
    """A grid of 12 sites and two workers whose ClientApp does what its messages say; 6 seconds a message at most."""
    entry = f"sites=[{{domain: digits, count: {SITES}}}]"
    words = [entry, f"run.root={tmp_path_factory.mktemp('faults')}", "engine.workers=2", "engine.task_timeout=6"]
    grid = start(load("digits", words), app="sims.benchmarks.faults:app")
    yield grid
    grid.close()


def ask(grid: RayGrid, faults: dict[int, dict[str, str]], size: int = 10) -> dict[int, Message]:
    """Send every site a message, some with a fault; the replies by site."""
    shared = ArrayRecord([np.arange(size, dtype=np.float32)])
    messages = []
    for site in range(SITES):
        content = RecordDict({"weights": shared, "own": ArrayRecord([np.full(3, site, np.float32)])})
        if site in faults:
            content["fault"] = ConfigRecord({**faults[site]})
        messages.append(Message(content, FIRST_NODE + site, "train", group_id="1"))
    replies = grid.send_and_receive(messages, timeout=120)
    found = {reply.metadata.src_node_id - FIRST_NODE: reply for reply in replies}
    assert found.keys() == set(range(SITES)), "every site answers exactly once"
    return found


def assert_good(replies: dict[int, Message], but: set[int], size: int = 10) -> None:
    for site, reply in replies.items():
        assert reply.has_error() == (site in but), (site, reply)
        if site not in but:
            np.testing.assert_array_equal(reply.content.array_records["own"].to_numpy_ndarrays()[0], np.full(3, site))
            np.testing.assert_array_equal(reply.content.array_records["echo"].to_numpy_ndarrays()[0], np.arange(size))


@pytest.mark.parametrize("size", [10, 100_000])
def test_without_faults_everything_comes_back_whole(grid: RayGrid, size: int):
    assert_good(ask(grid, {}, size), set(), size)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raise", "ValueError: this site has no data"),
        ("nothing", "returned NoneType, not a Message"),
        ("memory", "memory"),
        ("kill", "killed its worker 2 times"),
        ("hang", "took longer than engine.task_timeout=6 s"),
    ],
)
def test_a_fault_ends_as_an_error_of_that_site_alone(grid: RayGrid, kind: str, reason: str):
    replies = ask(grid, {5: {"kind": kind}})
    assert_good(replies, {5})
    assert reason in str(replies[5].error.reason)
    assert_good(ask(grid, {}), set())


def test_several_faults_at_once(grid: RayGrid):
    replies = ask(grid, {1: {"kind": "kill"}, 2: {"kind": "raise"}, 6: {"kind": "kill"}, 7: {"kind": "nothing"}})
    assert_good(replies, {1, 2, 6, 7})


def test_a_worker_that_dies_once_costs_nobody_anything(grid: RayGrid, tmp_path: Path):
    assert_good(ask(grid, {3: {"kind": "kill_once", "once": str(tmp_path / "died")}}), set())
    assert (tmp_path / "died").exists()


def test_workers_killed_from_outside_are_replaced(grid: RayGrid):
    for worker in {int(reply.content.metric_records["worker"]["pid"]) for reply in ask(grid, {}).values()}:  # type: ignore[arg-type]
        os.kill(worker, signal.SIGKILL)
    time.sleep(0.5)
    assert_good(ask(grid, {}), set())


def test_a_shared_record_is_put_once_and_goes_when_its_owner_does(grid: RayGrid):
    put = []
    shared = grid._shared
    original, shared._put = shared._put, lambda value: put.append(1) or ray.put(value)
    try:
        ask(grid, {}, size=100_000)
    finally:
        shared._put = original
    assert len(put) == 1
    assert not shared._places
