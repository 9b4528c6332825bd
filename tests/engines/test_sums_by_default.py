"""Workers on this machine add up the sites of a call, unless the configuration says otherwise: nothing else changes."""

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from flwr.serverapp import Grid

from fedloom.clients.protocol.partial_sums import FEWEST, ONCE
from fedloom.clients.protocol.reply_checks import Bounds
from fedloom.clients.storage.states import read_state
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State, digest
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.listener import LogListener
from fedloom.server.rounds.partial_sums import Partials
from fedloom.server.rounds.transport import RoundTransport
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines import open_engine
from fedloom.sims.operations.ledger import check
from tests.server.averages import configured

RAY = ("engine.name=ray", "engine.workers=1")
EIGHT = "count: 8, samples: 20"
UNTIMED = ("seconds", "finished")


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Grid]:
    """One worker of a Ray that the run has started: another Ray may be a cluster."""
    ray.shutdown()
    with open_engine(configured(tmp_path_factory.mktemp("ray"), *RAY, sites=EIGHT)) as grid:
        yield grid


def finished(root: Path, grid: Grid | None, *words: str, sites: str = EIGHT) -> tuple[str, list[dict[str, Any]]]:
    """Run two rounds, inline without `grid`; return the digest of the aggregate and the records without times."""
    name = "inline" if grid is None else "ray"
    config = configured(root, f"run.name={name}", *words, *(() if grid is None else RAY), sites=sites)
    with contextlib.nullcontext(grid) if grid is not None else open_engine(config) as grid:
        run_experiment(grid, config, LogListener())
    assert check(root / name) == []
    records = [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]
    timeless = [{key: value for key, value in each.items() if key not in UNTIMED} for each in records]
    return digest(read_state(root / name / "states" / "aggregate.safetensors")), timeless


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of sites in each sum that the server takes in."""
    sizes: list[int] = []
    merge = Partials._merge

    def merged(self: Partials, partial: Any, node: bool = False) -> None:
        sizes.append(len(partial.samples))
        merge(self, partial, node)

    monkeypatch.setattr(Partials, "_merge", merged)
    return sizes


@pytest.mark.slow
@pytest.mark.parametrize("words", [["strategy.name=fedavg"], ["strategy.name=sum_aggregation"]], ids=["fedavg", "sum"])
def test_results_and_traffic_are_those_of_single_replies(tmp_path: Path, added: list[int], workers: Grid, words: list[str]):
    assert finished(tmp_path, workers, *words) == finished(tmp_path, None, *words)
    assert added and min(added) >= FEWEST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sites"),
    [
        (["federation.partial_sums=false"], EIGHT),
        (["federation.clip_change=1.0"], EIGHT),
        ([], "count: 2, samples: 20"),  # a sum of two is larger than two replies
    ],
    ids=["off", "clipped", "few"],
)
def test_otherwise_the_server_reads_each_reply(
    tmp_path: Path, added: list[int], workers: Grid, words: list[str], sites: str
):
    words = ["strategy.name=fedavg", *words]
    assert finished(tmp_path, workers, *words, sites=sites) == finished(tmp_path, None, *words, sites=sites)
    assert not added


def gathered(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Change the records that methods expect of sites."""
    gather = RoundContext.gather

    def changed(self: RoundContext, kind: str, content: Any, expected: Any, sites: Any = None) -> Any:
        return gather(self, kind, content, {name: replace(spec, **changes) for name, spec in expected.items()}, sites)

    monkeypatch.setattr(RoundContext, "gather", changed)


def nothing(record: State) -> None:
    """A method's own check."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"check": nothing}, {"mean": ONCE}, {"bounded": False}], ids=["own check", "slot and mean", "no start"]
)
def test_what_a_worker_cannot_check_or_sum_the_server_reads(
    tmp_path: Path, added: list[int], workers: Grid, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
):
    gathered(monkeypatch, **changes)
    words = ["strategy.name=fedavg", "strategy.weighting=equal", "federation.largest_change=1.0"]
    assert finished(tmp_path, workers, *words) == finished(tmp_path, None, *words)
    assert not added
    with pytest.raises(UserError, match=r"federation\.partial_sums: workers add up at most 16 records"):
        finished(tmp_path / "on", workers, *words, "federation.partial_sums=true")


@pytest.mark.slow
def test_limits_that_are_measured_from_elsewhere_are_the_servers(
    tmp_path: Path, added: list[int], workers: Grid, monkeypatch: pytest.MonkeyPatch
):
    gather, words = RoundContext.gather, ["strategy.name=fedavg", "federation.largest_change=3.0"]

    def from_zero(self: RoundContext, kind: str, content: Any, expected: Any, sites: Any = None) -> Any:
        zeros = {
            n: replace(spec, like={k: torch.zeros_like(v) for k, v in spec.like.items()}) for n, spec in expected.items()
        }
        return gather(self, kind, content, zeros, sites)

    monkeypatch.setattr(RoundContext, "gather", from_zero)
    assert finished(tmp_path, workers, *words) == finished(tmp_path, None, *words)
    assert not added


@pytest.mark.slow
def test_refused_replies_have_the_same_reasons_and_traffic(tmp_path: Path, added: list[int], workers: Grid):
    words = ["strategy.name=fedavg", "federation.largest_change=0.15"]
    ray_, inline = finished(tmp_path, workers, *words), finished(tmp_path, None, *words)
    assert 0 < len(inline[1][0]["dropped"]) < 8
    assert ray_ == inline


@pytest.mark.slow
def test_a_site_that_is_dropped_is_not_in_the_sum(
    tmp_path: Path, added: list[int], workers: Grid, monkeypatch: pytest.MonkeyPatch
):
    """The server knows fewer images of a site than the worker that has checked its reply."""
    bounds = Bounds(most_samples=1)
    monkeypatch.setattr(RoundTransport, "bounds", lambda self, site: bounds)
    _, records = finished(tmp_path, workers, "strategy.name=fedavg", "rounds=1")
    with Ledger.open(tmp_path / "ray", server=False) as ledger:
        there = set(ledger.all_latest())
    assert added and there and not there & records[0]["dropped"].keys()
    assert len(there) == records[0]["replies"]
