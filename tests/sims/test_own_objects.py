"""Users' objectives, losses, optimisers and schedules that store something: no other site and no other run reads it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom import run
from fedloom.clients.objectives import Session, Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.training.loss import Loss
from fedloom.clients.training.schedules import Schedule
from fedloom.fusion.state import State
from tests.sims.test_reused_networks import contributions, tree

pytestmark = pytest.mark.usefixtures("blank_pictures")


class Memory:
    """Stores the mean score of the last batch, and returns the one before."""

    def __init__(self) -> None:
        self.last = 0.0

    def swap(self, scores: Tensor) -> float:
        before, self.last = self.last, float(scores.detach().mean())
        return 1.0 + abs(before)


@dataclass(frozen=True, eq=False)
class ALoss(Loss):
    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", Memory())

    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return F.cross_entropy(scores, targets) * vars(self)["memory"].swap(scores)


class Called(Memory):
    def __call__(self, scores: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(scores, targets) * self.swap(scores)


class AModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(()))

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        loss = F.cross_entropy(scores, targets) * float(self.scale)
        self.scale.fill_(1.0 + abs(float(scores.detach().mean())))
        return loss


def noted(scores: Tensor, targets: Tensor) -> Tensor:
    """A function that stores something in an attribute of its own."""
    memory = vars(noted).setdefault("memory", Memory())
    return F.cross_entropy(scores, targets) * memory.swap(scores)


def _filled(memory: Memory, scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores, targets) * memory.swap(scores)


called, a_module, bound, filled = Called(), AModule(), Called().__call__, partial(_filled, Memory())


@dataclass(frozen=True)
class AnObjective(FedAvg):
    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", Memory())

    def session(self, task: Task) -> Session:
        session, memory = super().session(task), vars(self)["memory"]
        contribution = session.contribution

        def remembered() -> dict[str, State]:
            made = contribution()
            memory.swap(torch.cat([tensor.flatten() for state in made.values() for tensor in state.values()]))
            return made

        with torch.no_grad():
            for weight in task.network.parameters():
                weight.mul_(1.0 + abs(memory.last))
        session.contribution = remembered  # type: ignore[method-assign]
        return session


class Making:
    """Makes optimisers, each with a smaller rate."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, parameters: Sequence[Tensor], lr: float) -> torch.optim.Optimizer:
        self.calls += 1
        return torch.optim.SGD(parameters, lr=lr / self.calls)


making = Making()


@dataclass(frozen=True)
class ASchedule(Schedule):
    def __post_init__(self) -> None:
        object.__setattr__(self, "seen", {"calls": 0})

    def after(self, rate: float, progress: float, rounds: float) -> float:
        seen: dict[str, int] = vars(self)["seen"]
        seen["calls"] += 1
        return rate / seen["calls"]


PARTS: dict[str, Mapping[str, Any]] = {
    "a loss": {"loss": "ALoss"},
    "a callable object": {"loss": "called"},
    "a module": {"loss": "a_module"},
    "a function's attribute": {"loss": "noted"},
    "a bound method": {"loss": "bound"},
    "a partial function": {"loss": "filled"},
    "a schedule": {"schedule": "ASchedule"},
    "an optimiser's factory": {"optimizer": "making"},
}


def experiment(root: Path, seed: int, **training: str) -> dict[str, Any]:
    base = tree(nn.Module, root, seed)
    parts = {key: {"name": f"{__name__}:{name}"} for key, name in training.items()}
    base["sites"][1] |= {"samples": 40 - 20 * seed}  # fewer steps, which a schedule can count
    return base | {"network": "mlp", "training": base["training"] | parts}


@pytest.mark.parametrize("part", PARTS)
def test_what_a_part_of_the_training_stores_stays_with_its_site(tmp_path: Path, part: str):
    one, other, again = (
        contributions(run(experiment(tmp_path / where, seed, **PARTS[part])))
        for where, seed in (("a", 0), ("a", 1), ("b", 0))
    )
    assert {name for name in one if one[name] == other[name]} == {"first", "third"}
    assert again == one, "a second run of this process"


def test_what_an_objective_stores_stays_with_its_site(tmp_path: Path):
    one, other = (
        contributions(run(tree(nn.Module, tmp_path, seed, network="mlp", objective=f"{__name__}:AnObjective")))
        for seed in (0, 1)
    )
    assert {name for name in one if one[name] == other[name]} == {"first", "third"}
