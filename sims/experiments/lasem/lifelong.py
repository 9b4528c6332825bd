"""A learner meets a sequence of tasks, one after the other; what it reaches, what it keeps, and how long it takes."""

import math
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from clients.data import Images, to_float
from clients.learner import descend
from clients.randomness import torch_generator
from conf.schema import TrainingConfig
from sims.experiments.lasem.tasks import Task

TEST_BATCH = 250


@dataclass(frozen=True)
class Plan:
    """How each task is trained: SGD with momentum 0.9 whose rate falls to 0 along a cosine. `every`: epochs from one look at
    the validation images to the next."""

    epochs: int
    rate: float
    batch: int = 10
    clip: float = 1.0
    every: int = 5


class Training(ABC):
    """A learner at work on one task."""

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """What moves."""

    @abstractmethod
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Of a mini-batch."""

    @abstractmethod
    def network(self) -> nn.Module:
        """As it is now, for measuring."""


class Learner(ABC):
    """A method. It meets tasks in turn, and may change what it knows of earlier ones."""

    @abstractmethod
    def start(self, task: int, validation: Images) -> Training:
        """Begin a task."""

    @abstractmethod
    def finish(self, task: int, training: Training) -> None:
        """Keep what a task taught."""

    @abstractmethod
    def network(self, task: int) -> nn.Module:
        """The network of a task that was met, as it is now."""

    def facts(self, task: int) -> dict[str, Any]:
        """What else is to be told of a task, as JSON."""
        return {}


@dataclass
class Outcome:
    """Of every task: the best accuracy on validation images, test accuracy then (`peak`) and after all tasks (`final`).

    `seconds` of training alone, of all tasks together.
    """

    validation: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)
    seconds: float = 0.0
    facts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """Mean peak accuracy over the tasks."""
        return statistics.fmean(self.peak)

    @property
    def kept(self) -> float:
        """The forgetting ratio: final / peak, the mean over tasks; 1: nothing is forgotten."""
        return statistics.fmean(final / peak if peak else 1.0 for final, peak in zip(self.final, self.peak, strict=True))


def met(learner: Learner, tasks: Sequence[Task], plan: Plan, seed: int) -> Outcome:
    """Train on the tasks in turn. The network of the best validation accuracy is measured, that of the last step is kept, as
    in the authors' code."""
    found, training = Outcome(), TrainingConfig(batch=plan.batch, rate=plan.rate, clip=plan.clip)
    for number, task in enumerate(tasks):
        site = learner.start(number, task.validation)
        best, peak, draw = -1.0, 0.0, torch_generator(seed, "batches", str(number))
        for epoch in range(0, plan.epochs, plan.every):
            steps = _steps(task.train, plan, range(epoch, min(epoch + plan.every, plan.epochs)), draw)
            begin = time.perf_counter()
            descend(site.parameters(), site.loss, steps, training)
            found.seconds += time.perf_counter() - begin
            if (now := accuracy(site.network(), task.validation)) > best:
                best, peak = now, accuracy(site.network(), task.test)
        learner.finish(number, site)
        found.validation.append(best)
        found.peak.append(peak)
        found.facts.append(learner.facts(number))
    found.final = [accuracy(learner.network(number), task.test) for number, task in enumerate(tasks)]
    return found


def accuracy(network: nn.Module, images: Images) -> float:
    """Fraction of right answers."""
    network.eval()
    with torch.inference_mode():
        pairs = zip(images.x.split(TEST_BATCH), images.y.split(TEST_BATCH), strict=True)
        right = sum(int((network(to_float(x)).argmax(1) == y).sum()) for x, y in pairs)
    network.train()
    return right / len(images)


def _steps(images: Images, plan: Plan, epochs: range, draw: torch.Generator) -> Iterator[tuple[float, Tensor, Tensor]]:
    for epoch in epochs:
        rate = plan.rate * 0.5 * (1.0 + math.cos(math.pi * epoch / plan.epochs))
        for places in torch.randperm(len(images), generator=draw).split(plan.batch):
            yield rate, to_float(images.x[places]), images.y[places]
