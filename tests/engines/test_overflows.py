"""A sum that overflows: every engine refuses the site whose numbers are too large, by name, and no other; same bits."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import ray
import torch

from fedloom.clients.objectives.averaging import FedAvgSession
from fedloom.clients.objectives.base import Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.storage.states import read_state
from fedloom.fusion.state import State, digest
from fedloom.server.run_folder.metrics_file import read_metrics
from fedloom.sims.engines.chunks import ChunkPolicy
from fedloom.sims.operations.ledger import check
from fedloom.sims.operations.simulate import simulate
from tests.server.averages import configured
from tests.server.parts import Recorder

HERE = "tests.engines.test_overflows"
BITS = 48  # a sum of 2**15 and more overflows; each site counts 20 times
USUAL, LARGE = 5.0, 1625.0  # what sites send: 20 x 1625 fits, and no longer with what three others send


class Session(FedAvgSession):
    def contribution(self) -> dict[str, State]:
        value = LARGE if self.task.site.index == 3 else USUAL + self.task.site.index / 8
        return {record: {name: torch.full_like(tensor, value) for name, tensor in state.items()}
                for record, state in super().contribution().items()}  # fmt: skip


@dataclass(frozen=True)
class Objective(FedAvg):
    def session(self, task: Task) -> FedAvgSession:
        return Session(self, task)


def finished(root: Path, name: str, *words: str) -> tuple[str, list[tuple[dict[str, str], int]], list[str]]:
    """Return the aggregate's digest, each round's dropped sites and replies, and the messages."""
    fixed = [f"objective={HERE}:Objective", "strategy=fedavg", f"federation.scale_bits={BITS}", f"run.name={name}",
             "federation.largest_weight=0", "federation.largest_change=0", "rounds=1"]  # fmt: skip
    listener = Recorder()
    simulate(configured(root, *fixed, *words, sites="count: 8, samples: 20"), listeners=[listener])
    assert check(root / name) == []
    records = [(record["dropped"], record["replies"]) for record in read_metrics(root / name).values()]
    return digest(read_state(root / name / "states" / "aggregate.safetensors")), records, listener.messages


@pytest.mark.slow
@pytest.mark.parametrize(("words", "calls"), [
    ((), (3, 3, 2)),  # the large one fits into its call's sum, and then not into the server's
    ((), (3, 5)),  # it fits into its call's sum, and then others do not
    (("federation.partial_sums=true",), (3, 3, 2)),
    (("federation.partial_sums=false", "engine.workers=2"), ()),
])  # fmt: skip
def test_only_the_site_whose_numbers_are_too_large_is_refused_on_every_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], calls: tuple[int, ...]
):
    ray.shutdown()
    inline = finished(tmp_path, "inline", "engine.name=inline")
    assert list(inline[1][0][0]) == ["site-0003"] and inline[1][0][1] == 7
    assert "would overflow the exact sum" in inline[1][0][0]["site-0003"]
    if calls:
        sizes = iter(calls)
        monkeypatch.setattr(ChunkPolicy, "size", lambda self, waiting, size: next(sizes, 1))
    other = finished(tmp_path, "ray", "engine.name=ray", "engine.workers=1", *words)
    assert other[:2] == inline[:2]
    assert not calls or any("the round begins again" in line for line in other[2])
