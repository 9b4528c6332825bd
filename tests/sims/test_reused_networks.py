"""A network object that one site after another uses: what a user's module remembers outside its state stays with no one."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedloom import Result, resume, run
from fedloom.clients.networks import Network, Reused
from fedloom.conf.errors import UserError
from tests.sims.commands import Command, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")


class Remembering(nn.Module, ABC):
    """Base class of modules that subtract a mean of the training inputs that they have seen."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(size * size, classes)
        self.begin(size * size)

    @abstractmethod
    def begin(self, inputs: int) -> None:
        """Make what remembers."""

    @abstractmethod
    def seen(self, mean: Tensor) -> None:
        """Remember the mean [inputs] of a batch."""

    @abstractmethod
    def remembered(self) -> Any:
        """Return what is remembered."""

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        if self.training:
            self.seen(pixels.detach().mean(0))
        return self.head(pixels - self.remembered())


class InANumber(Remembering):
    def begin(self, inputs: int) -> None:
        self.mean = 0.0

    def seen(self, mean: Tensor) -> None:
        self.mean = 0.5 * self.mean + 0.5 * float(mean.mean())

    def remembered(self) -> float:
        return self.mean


class InATensor(InANumber):
    def begin(self, inputs: int) -> None:
        self.mean: Any = torch.zeros(inputs)

    def seen(self, mean: Tensor) -> None:
        self.mean = 0.5 * self.mean + 0.5 * mean


class InABuffer(InANumber):
    def begin(self, inputs: int) -> None:
        self.mean: Any
        self.register_buffer("mean", torch.zeros(inputs), persistent=False)

    def seen(self, mean: Tensor) -> None:
        self.mean.mul_(0.5).add_(0.5 * mean)


class InAnArray(InANumber):
    def begin(self, inputs: int) -> None:
        self.means = np.zeros(inputs, np.float32)

    def seen(self, mean: Tensor) -> None:
        self.means += mean.numpy()

    def remembered(self) -> Any:
        return torch.from_numpy(self.means.copy())


class Memory:
    def __init__(self) -> None:
        self.means: list[float] = []


class InAnObject(InANumber):
    def begin(self, inputs: int) -> None:
        self.memory = {"all": Memory()}

    def seen(self, mean: Tensor) -> None:
        self.memory["all"].means.append(float(mean.mean()))

    def remembered(self) -> float:
        return sum(self.memory["all"].means)


class InAGenerator(InANumber):
    def begin(self, inputs: int) -> None:
        self.generators = torch.Generator().manual_seed(1), np.random.default_rng(1)

    def seen(self, mean: Tensor) -> None:
        for _ in range(1 + int(1000 * float(mean.mean())) % 7):
            self.remembered()

    def remembered(self) -> float:
        return float(torch.rand((), generator=self.generators[0])) + self.generators[1].random() if self.training else 0.0


class Growing(nn.Module):
    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(size * size, classes)
        self.register_buffer("history", torch.zeros(0))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.history = torch.cat([self.history, images.mean().reshape(1)])
        return self.head(images.flatten(1))


class OwnNorm(nn.BatchNorm1d):
    """Counts as a user's module."""


KINDS = [InANumber, InATensor, InABuffer, InAnArray, InAnObject, InAGenerator]


def tree(kind: type, root: Path, seed: int = 0, **more: Any) -> dict[str, Any]:
    """An experiment of three sites. `seed` 1 changes the second site's data, and nothing else."""
    sites = [{"domain": "digits", "samples": 40, "name": name} for name in ("first", "second", "third")]
    sites[1] |= {"invert": bool(seed)}
    return {
        "sites": sites,
        "strategy": "fedavg",
        "objective": "fedavg",
        "network": {"name": f"{__name__}:{kind.__name__}"},
        "rounds": 1,
        "training": {"epochs": 1, "batch": 20, "schedule": "constant"},
        "data": {"size": 8, "test_limit": 60, "heads": "shared"},
        "engine": {"name": "inline"},
        "evaluation": {"every": 10},
        "run": {"root": str(root), "name": f"run-{seed}"},
    } | more


def contributions(result: Result) -> dict[str, str]:
    """The digests of what the sites gave in the last round."""
    with result.open_ledger() as ledger:
        rounds = [event.body["contributions"] for event in ledger.events("round")]
    return {name: each["blob"] for name, each in rounds[-1].items()}


@pytest.fixture
def pairs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[dict[str, str]]]:
    """Contributions to two runs in which only the second site's data differ."""
    yield [contributions(run(tree(request.param, tmp_path, seed))) for seed in (0, 1)]


@pytest.mark.parametrize("pairs", KINDS, indirect=True)
def test_a_sites_data_change_its_own_contribution_alone(pairs: list[dict[str, str]]):
    one, other = pairs
    assert {name for name in one if one[name] == other[name]} == {"first", "third"}


@pytest.mark.parametrize("kind", [InATensor, InAnObject])
def test_a_resumed_run_has_the_same_bits(tmp_path: Path, kind: type):
    whole = contributions(run(tree(kind, tmp_path / "whole", rounds=2)))
    run(tree(kind, tmp_path / "halves", rounds=1))
    assert contributions(resume(tmp_path / "halves" / "run-0", "rounds=2")) == whole


def test_what_belongs_to_the_state_stays():
    norm, head = OwnNorm(4), nn.Linear(4, 2)
    network = Network(nn.Sequential(nn.Flatten(), norm), head)
    reused = Reused(network)
    with torch.no_grad():
        head.weight.fill_(3.0)
        norm.load_state_dict({**norm.state_dict(), "running_mean": torch.full((4,), 5.0)})
    state = reused.as_new().state_dict()
    assert float(state["head.weight"].mean()) == 3.0 and float(state["extractor.1.running_mean"].mean()) == 5.0


def test_a_state_that_changes_its_shape_is_refused_before_the_run(fedloom: Command, tmp_path: Path):
    with pytest.raises(UserError, match=r"'history' in training.*must keep its shape"):
        run(tree(Growing, tmp_path))
    words = ["run", "digits", f"network={{name: {__name__}:Growing}}", "engine.name=inline", f"run.root={tmp_path}"]
    refused(fedloom(*words), "changes the shape of", "'history'")
