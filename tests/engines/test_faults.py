"""The ray engine under faults: each ends as an error of its own site, by name, and never reaches a neighbour."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from fedloom.conf import load
from fedloom.sims.engines.ray import RayGrid, start
from tests.engines.messages import SITES, ask, assert_good, pids

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayGrid]:
    """A grid of 12 sites and two workers whose ClientApp does what its messages say; 4 seconds a message at most."""
    entry = f"sites=[{{domain: digits, count: {SITES}}}]"
    words = [entry, f"run.root={tmp_path_factory.mktemp('faults')}", "engine.workers=2", "engine.task_timeout=4"]
    grid = start(load("digits", words), app="tests.engines.faulty:app")
    yield grid
    grid.close()


@pytest.mark.parametrize("size", [10, 100_000])
def test_without_faults_everything_comes_back_whole(grid: RayGrid, size: int):
    assert_good(ask(grid, {}, size), set(), size)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("raise", "ValueError: this site has no data"),
        ("nothing", "returned NoneType, not a Message"),
        ("memory", "memory"),
        ("hang", "took longer than engine.task_timeout=4 s"),
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
    assert all("killed its worker 2 times" in str(replies[site].error.reason) for site in (1, 6))
    assert_good(ask(grid, {}), set())


def test_a_worker_that_dies_once_costs_no_one_anything(grid: RayGrid, tmp_path: Path):
    assert_good(ask(grid, {3: {"kind": "kill_once", "once": str(tmp_path / "died")}}), set())
    assert (tmp_path / "died").exists()


def test_workers_killed_from_outside_are_replaced(grid: RayGrid):
    for worker in pids(ask(grid, {})):
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
    assert not shared._references
