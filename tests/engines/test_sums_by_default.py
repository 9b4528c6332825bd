"""Workers on this machine add up the sites of a call, unless the configuration says otherwise: nothing else changes."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from flwr.serverapp import Grid

from fedloom.clients.protocol.messages import TRAIN
from fedloom.clients.protocol.partial_sums import FEWEST
from fedloom.clients.storage.states import read_state
from fedloom.fusion.state import digest
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.listener import LogListener
from fedloom.server.rounds.partial_sums import Partials
from fedloom.server.rounds.record_spec import RecordSpec
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
    """Make methods expect records that a worker does not check as the server does."""
    gather = RoundContext.gather

    def changed(self: RoundContext, kind: str, content: Any, expected: Any, sites: Any = None) -> Any:
        specs = {name: RecordSpec(spec.like, spec.slot, spec.mean, **changes) for name, spec in expected.items()}
        return gather(self, kind, content, specs if kind == TRAIN else expected, sites)

    monkeypatch.setattr(RoundContext, "gather", changed)


@pytest.mark.slow
def test_a_methods_own_check_sees_each_reply(
    tmp_path: Path, added: list[int], workers: Grid, monkeypatch: pytest.MonkeyPatch
):
    seen: list[int] = []
    gathered(monkeypatch, check=lambda record: seen.append(len(record)))
    finished(tmp_path, workers, "strategy.name=fedavg")
    assert len(seen) == 16 and not added
