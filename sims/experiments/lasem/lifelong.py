"""A learner on a sequence of tasks: its accuracies, its forgetting, and its time."""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data import Examples, to_float
from fedloom.clients.training.learner import descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf.randomness import drawing, torch_generator
from fedloom.conf.schema import TrainingConfig
from fedloom.sims.experiments.lasem.tasks import Task
from fedloom.sims.experiments.pairs import cosine

TEST_BATCH = 250


@dataclass(frozen=True)
class Plan:
    """How each task is trained. `optimizer` is as training.optimizer; SGD has a momentum of 0.9.

    In epoch e the rate is rate / (1 + decay * e); with `decay` None, it falls to 0 along a cosine. The validation accuracy
    is measured after `every` epochs.
    """

    epochs: int
    rate: float
    batch: int = 10
    clip: float = 1.0
    every: int = 5
    optimizer: Any = "sgd"
    decay: float | None = None

    def rate_in(self, epoch: int) -> float:
        """Return the learning rate in an epoch."""
        if self.decay is not None:
            return self.rate / (1.0 + self.decay * epoch)
        return cosine(self.rate, epoch, self.epochs)


@dataclass(frozen=True)
class Training:
    """A learner's training on one task: its parameters, the loss of a mini-batch, and the current network."""

    parameters: Callable[[], list[nn.Parameter]]
    loss: Callable[[Tensor, Tensor], Tensor]
    network: Callable[[], nn.Module]


class Learner(ABC):
    """Base class of methods. A learner meets tasks in turn, and may change the networks of earlier ones."""

    def __init__(self) -> None:
        self.met: list[Any] = []  # the networks of earlier tasks

    @abstractmethod
    def start(self, task: int, validation: Examples) -> Training:
        """Begin task number `task`, and return its training."""

    def finish(self, task: int, training: Training) -> None:
        """End a task: save its network."""
        self.met.append(training.network())

    def network(self, task: int) -> nn.Module:
        """Return the current network of an earlier task."""
        return self.met[task]

    def facts(self, task: int) -> dict[str, Any]:
        """Return method-specific values to save with a task's result, as JSON values; none by default."""
        return {}


@dataclass
class Outcome:
    """Accuracies of every task. `validation` is the best one on validation examples, `peak` the test accuracy at that time.

    `end` is the test accuracy at the end of the task, `final` after all tasks. `seconds` is the training time of all tasks.
    """

    validation: list[float] = field(default_factory=list)
    peak: list[float] = field(default_factory=list)
    end: list[float] = field(default_factory=list)
    final: list[float] = field(default_factory=list)
    seconds: float = 0.0
    facts: list[dict[str, Any]] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """The mean peak accuracy over the tasks."""
        return statistics.fmean(self.peak)

    @property
    def kept(self) -> float:
        """The forgetting ratio, final / peak, mean over tasks; 1 means that nothing is forgotten.

        With few validation examples, the peak is partly luck, and the ratio can be above 1.
        """
        return _ratio(self.final, self.peak)

    @property
    def kept_of_end(self) -> float:
        """The ratio of test accuracies final / end, mean over tasks."""
        return _ratio(self.final, self.end)


def _ratio(final: Sequence[float], before: Sequence[float]) -> float:
    return statistics.fmean(end / start if start else 1.0 for end, start in zip(final, before, strict=True))


def met(learner: Learner, tasks: Sequence[Task], plan: Plan, seed: int) -> Outcome:
    """Train a learner on the tasks in turn, and return its accuracies and time.

    As in the authors' code, the network with the best validation accuracy is measured, and that of the last step is saved.
    """
    outcome = Outcome()
    training = TrainingConfig(batch=plan.batch, rate=plan.rate, clip=plan.clip, optimizer=plan.optimizer)
    for number, task in enumerate(tasks):
        site = learner.start(number, task.validation)
        best, peak, draw = -1.0, 0.0, torch_generator(seed, "batches", str(number))
        for epoch in range(0, plan.epochs, plan.every):
            steps = _steps(task.train, plan, range(epoch, min(epoch + plan.every, plan.epochs)), draw)
            begin = time.perf_counter()
            with drawing(torch_generator(seed, "forward", str(number), str(epoch)).initial_seed(), torch.device("cpu")):
                descend(site.parameters(), site.loss, steps, recipe_of(training))
            outcome.seconds += time.perf_counter() - begin
            if (now := accuracy(site.network(), task.validation)) > best:
                best, peak = now, accuracy(site.network(), task.test)
        outcome.end.append(accuracy(site.network(), task.test))
        learner.finish(number, site)
        outcome.validation.append(best)
        outcome.peak.append(peak)
        outcome.facts.append(learner.facts(number))
    outcome.final = [accuracy(learner.network(number), task.test) for number, task in enumerate(tasks)]
    return outcome


def accuracy(network: nn.Module, images: Examples) -> float:
    """Return the fraction of images that a network classifies correctly."""
    network.eval()
    with torch.inference_mode():
        pairs = zip(images.x.split(TEST_BATCH), images.y.split(TEST_BATCH), strict=True)
        right = sum(int((network(to_float(x)).argmax(1) == y).sum()) for x, y in pairs)
    network.train()
    return right / len(images)


def _steps(images: Examples, plan: Plan, epochs: range, draw: torch.Generator) -> Iterator[tuple[float, Tensor, Tensor]]:
    for epoch in epochs:
        rate = plan.rate_in(epoch)
        for indices in torch.randperm(len(images), generator=draw).split(plan.batch):
            yield rate, to_float(images.x[indices]), images.y[indices]
