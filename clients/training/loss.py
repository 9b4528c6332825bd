"""The loss of a site's task by name: cross-entropy and its variants, losses of several labels and of numbers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.clients.data.schema import CLASS, IGNORED, MULTILABEL, NEXT, REGRESSION, TASKS
from fedloom.conf.errors import UserError, plain
from fedloom.conf.metrics import AS_NUMBERS, TARGETS
from fedloom.conf.registry import Registry, section_of
from fedloom.conf.schema import TrainingConfig
from fedloom.conf.typed import option

WHERE = "training.loss"
BALANCED = "balanced"  # class_weights by the site's targets
USUAL = {CLASS: "cross_entropy", NEXT: "cross_entropy", MULTILABEL: "binary_cross_entropy", REGRESSION: "mse"}  # by task


def full(scores: Tensor) -> Tensor:
    """Convert scores to at least float32, since a sum over classes in bfloat16 has two digits."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def task_loss(scores: Tensor, labels: Tensor, smoothing: float, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of scores [n, classes] with labels [n], in at least float32.

    The target is smoothing / classes for every class, plus 1 - smoothing for the label (Szegedy et al. 2016, Sec. 7).
    """
    return F.cross_entropy(full(scores), labels, label_smoothing=smoothing, reduction=reduction)


@dataclass(frozen=True, eq=False)
class Loss(ABC):
    """Base class of losses. `tasks`: the tasks whose targets it takes.

    One object serves all sites of a process. What it stores of one site in attributes is undone before the next site.
    """

    tasks: ClassVar[tuple[str, ...]] = TASKS

    @property
    def by_site(self) -> bool:
        """Whether `of_site` returns another loss for each site."""
        return False

    def of_site(self, targets: Tensor, outputs: int) -> "Loss":
        """Return the loss for a site with these training targets, and this number of outputs."""
        return self

    def check(self, outputs: int) -> None:  # noqa: B027  # most losses take any number
        """Raise UserError if an option does not fit the number of outputs."""

    @abstractmethod
    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Return the mean loss of a batch, a scalar.

        Args:
            scores: The network's outputs, [n, outputs]; next tokens: [n, steps, outputs].
            targets: As schema.Schema says.
            smoothing: training.label_smoothing.
        """


@dataclass(frozen=True, eq=False)
class OwnLoss(Loss):
    """A user's function of (outputs, targets). It returns one number for a batch."""

    function: Callable[..., Any]
    name: str
    options: tuple[tuple[str, Any], ...] = ()

    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        made = self.function(full(scores), targets, **dict(self.options))
        check_number(made, self.name)
        return made


def check_number(made: object, name: str) -> None:
    """Raise UserError unless a user's loss `name` has returned one number for a batch, as a tensor."""
    if not isinstance(made, Tensor) or made.ndim:
        got = f"shape {list(made.shape)}" if isinstance(made, Tensor) else f"type {type(made).__name__}"
        raise UserError(f"{WHERE}: '{name}' returned a value of {got}; it must return one number for the batch")


LOSSES: Registry[Loss] = Registry("loss", Loss)


@LOSSES.adapter
def own_loss(name: str, made: Any, options: Mapping[str, Any], where: str) -> Loss:
    """Wrap a user's function. Raises UserError for anything else."""
    if not callable(made) or isinstance(made, type):
        got = "is a class" if isinstance(made, type) else f"has the type {type(made).__name__}"
        raise UserError(f"{where}.name: '{name}' {got}; it must be a function of (outputs, targets), or a subclass of "
                        f"{Loss.__module__}:{Loss.__name__}")  # fmt: skip
    return OwnLoss(made, name, tuple(sorted(options.items())))


@dataclass(frozen=True, eq=False)
class _OfClasses(Loss):
    """Base class of losses with a weight for each class or token."""

    tasks = (CLASS, NEXT)
    class_weights: Any = option(
        [],
        "weight of each class; balanced: n / (k * count), by the k classes among the site's n targets; empty: 1 for all",
        takes="a list of numbers, or balanced",
    )

    def __post_init__(self) -> None:
        weights = self.class_weights
        numbers = isinstance(weights, list) and all(type(one) in (int, float) and one >= 0 for one in weights)
        if not numbers and weights != BALANCED:
            takes = f"takes a list of numbers from 0 on, or {BALANCED}"
            raise UserError(f"{WHERE}.class_weights: got {plain(str(weights))}, {takes}")

    @property
    def by_site(self) -> bool:
        return self.class_weights == BALANCED

    def of_site(self, targets: Tensor, outputs: int) -> Loss:
        if not self.by_site:
            return self
        counts = targets[targets != IGNORED].bincount(minlength=outputs).double()
        weights = counts.sum() / (counts.count_nonzero() * counts)
        return replace(self, class_weights=weights.masked_fill(counts == 0, 0.0).tolist())

    def check(self, outputs: int) -> None:
        if not self.by_site:
            _check_weights(self.class_weights, outputs, "class_weights")


@LOSSES.register("cross_entropy")
@dataclass(frozen=True, eq=False)
class CrossEntropy(_OfClasses):
    """Cross-entropy of classes or next tokens, with training.label_smoothing."""

    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        if not self.class_weights and targets.ndim == 1:
            return task_loss(scores, targets, smoothing)
        return _weighted(scores, targets, smoothing, self.class_weights)


@LOSSES.register("focal")
@dataclass(frozen=True, eq=False)
class Focal(_OfClasses):
    """Focal loss: cross-entropy times (1 - p) ** gamma, for the label's probability p (Lin et al. 2017, Eq. 4 and 5)."""

    gamma: float = option(2.0, "larger values count well classified examples less", low=0.0)

    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return _weighted(scores, targets, smoothing, self.class_weights, self.gamma)


@LOSSES.register("binary_cross_entropy")
@dataclass(frozen=True, eq=False)
class BinaryCrossEntropy(Loss):
    """Binary cross-entropy of each label's logit."""

    tasks = (MULTILABEL,)
    positive_weights: list[float] = option([], "weight of each label where it is 1; empty: as where it is 0", low=0.0)

    def check(self, outputs: int) -> None:
        _check_weights(self.positive_weights, outputs, "positive_weights")

    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        scores = full(scores)
        weights = _weights(self.positive_weights, scores)
        targets = targets * (1.0 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(scores, targets, pos_weight=weights)


@LOSSES.register("mse")
@dataclass(frozen=True, eq=False)
class MeanSquaredError(Loss):
    """Mean of squared errors."""

    tasks = (REGRESSION,)

    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return F.mse_loss(full(scores), targets)


@LOSSES.register("mae")
@dataclass(frozen=True, eq=False)
class MeanAbsoluteError(Loss):
    """Mean of absolute errors."""

    tasks = (REGRESSION,)

    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return F.l1_loss(full(scores), targets)


@LOSSES.register("huber")
@dataclass(frozen=True, eq=False)
class Huber(Loss):
    """Huber loss: squared up to an error of `delta`, absolute beyond."""

    tasks = (REGRESSION,)
    delta: float = option(1.0, "error from which the loss grows linearly", low=1e-9)

    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return F.huber_loss(full(scores), targets, delta=self.delta)


@LOSSES.register("quantile")
@dataclass(frozen=True, eq=False)
class Quantile(Loss):
    """Quantile (pinball) loss: the network learns the targets' quantile (Koenker and Bassett 1978)."""

    tasks = (REGRESSION,)
    quantile: float = option(0.5, "0.5: the median", low=0.0, high=1.0)

    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        errors = targets - full(scores)
        return torch.maximum(self.quantile * errors, (self.quantile - 1.0) * errors).mean()


def _weighted(scores: Tensor, targets: Tensor, smoothing: float, weights: list[float], gamma: float = 0.0) -> Tensor:
    """Return the mean cross-entropy of classes [n] or next tokens [n, steps], by weight of the class, without IGNORED."""
    scores, targets = full(scores).flatten(0, -2), targets.flatten()
    counts, chosen = (targets != IGNORED).to(scores.dtype), targets.clamp(min=0)
    each = F.cross_entropy(scores, chosen, reduction="none", label_smoothing=smoothing)
    if gamma:
        each = (1.0 - scores.softmax(1).gather(1, chosen[:, None])[:, 0]) ** gamma * each
    by_class = _weights(weights, scores)
    counts = counts if by_class is None else counts * by_class[chosen]
    return (each * counts).sum() / counts.sum().clamp(min=1e-12)


def _weights(weights: list[float], scores: Tensor) -> Tensor | None:
    return torch.tensor(weights, dtype=scores.dtype, device=scores.device) if weights else None


def _check_weights(weights: list[float], outputs: int, key: str) -> None:
    """Raise UserError for weights that are all 0, or not one for each output. An empty list is valid."""
    if weights and len(weights) != outputs:
        raise UserError(f"{WHERE}.{key}: got {len(weights)} weights, takes one for each of {outputs} outputs")
    if weights and not any(weights):
        raise UserError(f"{WHERE}.{key}: all weights are 0, so nothing would be learned; set at least one above 0")


def loss_section(training: TrainingConfig, task: str = CLASS) -> Mapping[str, Any]:
    """Return the configured loss's section: name (default: the task's usual one) and options."""
    unset = training.loss in (None, "", {})
    chosen = {} if unset else section_of(training.loss, WHERE, "{name: focal, gamma: 2}")
    return {"name": USUAL[task], **chosen}


def loss_of(training: TrainingConfig, task: str) -> Loss:
    """Return the configured loss, or the task's usual one. Raises UserError for one that takes other targets."""
    section = loss_section(training, task)
    loss = LOSSES.build(section, WHERE)
    if task not in loss.tasks:
        fitting = ", ".join(name for name in LOSSES.names() if LOSSES.shipped(name) and task in LOSSES.get(name).tasks)
        numbers = f"; {AS_NUMBERS}" if task == CLASS and REGRESSION in loss.tasks else ""
        fault = f"{WHERE}: '{section['name']}' is not for {TARGETS[task]}, the targets here"
        raise UserError(f"{fault}; write one of: {fitting}, or module:function{numbers}")
    if training.label_smoothing and task == REGRESSION:
        raise UserError("training.label_smoothing: is for classes and labels, but the targets are numbers; set it to 0")
    return loss
