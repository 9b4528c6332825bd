"""What the ledger costs: as much as a change changes, however long the run is and however many sites there are.

Counted are the steps of SQLite's virtual machine, of which every row that is looked at takes some.
"""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from fedloom.fusion.state import State
from fedloom.server.ledger import Contribution, Ledger
from fedloom.server.strategies.coefficients import note, noted
from tests.server.arithmetics import arithmetic_of, configured, strategy
from tests.server.ledgers import CONFIG

MORE = 1.1  # an index grows deeper, by the logarithm of its rows


class Steps:
    """How many steps SQLite has taken."""

    taken = 0


@contextmanager
def counted(ledger: Ledger) -> Iterator[Steps]:
    steps = Steps()

    def one() -> None:
        steps.taken += 1

    ledger._database._db.set_progress_handler(one, 1)
    yield steps
    ledger._database._db.set_progress_handler(None, 1)


def steps_of(ledger: Ledger, act: Callable[[], object]) -> int:
    with counted(ledger) as steps:
        act()
    return steps.taken


def created(folder: Path, sites: int) -> Ledger:
    return Ledger.create(folder, "run", CONFIG, 32, [f"s{place}" for place in range(sites)])


def state(number: int) -> State:
    return {"w": torch.tensor([number])}


def commit(ledger: Ledger, round: int, sites: range, keep: str) -> None:
    gave = {f"s{i}": Contribution(ledger.blobs.put(state(1000 * round + i)), 1, round, 32) for i in sites}
    ledger.commit_round(round, gave, {"sum": ledger.blobs.put(state(-1 - round))}, {"sum": "0"}, {}, keep)


@pytest.mark.parametrize("keep", ["latest", "all"])
def test_a_commit_costs_the_same_in_a_long_run(tmp_path: Path, keep: str):
    with created(tmp_path, 3) as ledger:
        costs = [steps_of(ledger, lambda round=round: commit(ledger, round, range(3), keep)) for round in range(201)]
    assert costs[200] <= MORE * costs[10]


@pytest.mark.parametrize("keep", ["latest", "all"])
def test_a_commit_costs_the_same_among_many_sites(tmp_path: Path, keep: str):
    costs = []
    for sites in (10, 1000):
        with created(tmp_path / str(sites), sites) as ledger:
            commit(ledger, 0, range(sites), keep)
            costs.append(steps_of(ledger, lambda ledger=ledger: commit(ledger, 1, range(2, 5), keep)))
    assert costs[1] <= MORE * costs[0]


def test_a_site_is_forgotten_at_the_cost_of_what_it_gave(tmp_path: Path):
    costs = []
    for sites in (10, 1000):
        with created(tmp_path / str(sites), sites) as ledger:
            commit(ledger, 0, range(sites), "latest")
            states = {"sum": ledger.blobs.put(state(-9))}
            costs.append(steps_of(ledger, lambda ledger=ledger, states=states: ledger.forget(["s3"], states, {}, {})))
            assert len(ledger.blobs.names()) == sites
    assert costs[1] <= MORE * costs[0]


@pytest.mark.parametrize("kind", ["rare", "never", "often"])
def test_the_newest_event_of_a_kind_is_found_without_the_others(tmp_path: Path, kind: str):
    costs = []
    with created(tmp_path, 1) as ledger:
        ledger.note("rare", {"n": 0})
        for number in range(1, 1001):
            ledger.note("often", {"n": number})
            if number in (10, 1000):
                costs.append(steps_of(ledger, lambda: ledger.newest(kind)))
        newest = ledger.newest(kind)
        found = newest and newest.body
        assert found == {"rare": {"n": 0}, "never": None, "often": {"n": 1000}}[kind]
        assert [event.body["n"] for event in ledger.events("rare")] == [0]
        assert [event.body["n"] for event in ledger.events("often", after=1000)] == [999, 1000]
        assert ledger.newest() == list(ledger.events())[-1]
    assert costs[1] <= MORE * costs[0]


def test_searched_coefficients_are_looked_up_at_the_same_cost_in_a_long_run(tmp_path: Path):
    """Each round asks for them before they are searched, and after."""
    costs = []
    with arithmetic_of(configured(tmp_path, "strategy.search.by=grid")) as aggregate:
        ledger, options = aggregate.ledger, strategy(aggregate).search
        found = partial(noted, aggregate.view(), options, "gradients")
        for round in range(1, 61):
            total = aggregate.slots.total("sum")
            total.add({name: torch.ones_like(one) for name, one in total.totals.items()})
            before = steps_of(ledger, found)
            assert found() == {}
            note(aggregate.view(), options, "gradients", {"a": float(round)})
            costs.append((before, steps_of(ledger, found)))
            assert found() == {"a": float(round)}
    assert max(costs[59]) <= MORE * min(costs[9])


def test_closing_a_ledger_takes_no_memory_for_its_file(tmp_path: Path):
    with created(tmp_path, 1) as ledger:
        for _ in range(32):
            ledger.note("long", {"text": "x" * 2**20})
        tracemalloc.start()
        ledger.close()
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert (tmp_path / "ledger.sqlite").stat().st_size > 32 * 2**20
    assert most < 4 * 2**20
