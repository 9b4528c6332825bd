"""Knowledge distillation: train a network on the answers of others, with or without labels."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.conf.randomness import drawing
from fedloom.fusion.graph.tracing import evaluating
from fedloom.fusion.graph.undisturbed import undisturbed

SHIFT = 8  # images are shifted by up to a part of this size


@dataclass(frozen=True)
class Distillation:
    """The settings of `distil`: Adam on `distillation_loss` (`temperature`, `weight`).

    The learning rate falls from `rate` to 0 as half a cosine over `steps` steps of `batch` inputs.
    """

    steps: int = 300
    rate: float = 1e-3
    batch: int = 128
    temperature: float = 1.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"distillation {name}: got {getattr(self, name)}, takes a number of at least 1")
        for name in ("rate", "temperature"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise UserError(f"distillation {name}: got {getattr(self, name)}, takes a number above 0")


def distillation_loss(
    logits: Tensor, answers: Tensor, temperature: float, labels: Tensor | None = None, weight: float = 1.0
) -> Tensor:
    """Return a student's loss: weight T^2 KL(softmax(answers / T) || softmax(logits / T)) + (1 - weight) cross-entropy.

    It is the mean over the batch (Hinton et al. 2015, Sec. 2), with cross-entropy from the labels.

    Args:
        logits: The student's, [k, classes] or [k, steps, classes].
        answers: The teacher's logits, of the same shape.
        temperature: T.
        labels: int64 [k] or [k, steps] (-100: no label); needed for a weight below 1.
        weight: The weight of the teacher's answers; 0 is plain training on the labels.

    Raises:
        UserError: The weight is not in [0, 1], or labels are missing.
    """
    if not 0.0 <= weight <= 1.0 or (labels is None and weight < 1.0):
        raise UserError(f"distillation weight: got {weight}; use 0 to 1, and labels if it is below 1")
    logits, answers = logits.flatten(0, -2), answers.flatten(0, -2)  # each step counts as an example
    plain = F.cross_entropy(logits, labels.flatten()) if labels is not None and weight < 1.0 else None
    if weight == 0.0 and plain is not None:
        return plain
    goal, predicted = (answers / temperature).softmax(dim=1), (logits / temperature).log_softmax(dim=1)
    soft = temperature**2 * F.kl_div(predicted, goal, reduction="batchmean")
    return soft if plain is None else weight * soft + (1.0 - weight) * plain


def distil(
    student: nn.Module, inputs: Tensor, answers: Tensor, settings: Distillation, generator: torch.Generator,
    labels: Tensor | None = None,
) -> None:  # fmt: skip
    """Train a network, in place, to return the teachers' `answers` on `inputs` [k, ...].

    Training modes and gradients (`grad`) of the network stay unchanged. `answers`, `labels`: as in `distillation_loss`.

    Raise UserError if the numbers of inputs and answers differ, or are below 2.
    """
    if len(inputs) != len(answers) or len(inputs) < 2:
        raise UserError(f"distillation: {len(inputs)} inputs and {len(answers)} answers; use equal numbers, at least two")
    order = torch.empty(0, dtype=torch.int64)

    def loss() -> Tensor:
        nonlocal order
        if len(order) < 2:  # BatchNorm has no variance for a single input
            order = torch.randperm(len(inputs), generator=generator)
        drawn, order = order[: settings.batch], order[settings.batch :]
        targets = None if labels is None else labels[drawn]
        return distillation_loss(student(inputs[drawn]), answers[drawn], settings.temperature, targets, settings.weight)

    _descend(student, loss, settings)


def imitate(
    student: nn.Module, teachers: Sequence[nn.Module], weights: Sequence[float], images: Tensor, settings: Distillation
) -> None:
    """Train a network, in place, to return the teachers' mean answer to images [k, c, h, w], mirrored and shifted.

    Each step draws `settings.batch` images (at most all), mirrors half of them, and shifts each by up to an eighth of its
    size. The teachers answer for these views, so a few hundred images suffice (Beyer et al. 2022). All parameters of the
    student are trained. The teachers stay unchanged, and so do the student's training modes, `grad` and `requires_grad`.
    Draws are the same in each call.

    Args:
        student: A classifier that returns logits [k, classes].
        teachers: Classifiers of the same classes.
        weights: The share of each teacher's probabilities in the answer; their sum is 1.
        images: Without labels.
        settings: The settings; `temperature` and `weight` are not used.

    Raises:
        UserError: The inputs are not images, or fewer than two.
    """
    check_images(images)
    generator = torch.Generator().manual_seed(0)

    def loss() -> Tensor:
        drawn = torch.randperm(len(images), generator=generator)[: settings.batch]
        views = _views(images[drawn.to(images.device)], generator)
        with torch.no_grad():
            answers = [share * teacher(views).softmax(dim=1) for share, teacher in zip(weights, teachers, strict=True)]
        return F.kl_div(student(views).log_softmax(dim=1), torch.stack(answers).sum(dim=0), reduction="batchmean")

    with ExitStack() as stack, torch.enable_grad():
        stack.enter_context(drawing(device=images.device))  # for Dropout
        for teacher in teachers:
            stack.enter_context(undisturbed(teacher))
            stack.enter_context(evaluating(teacher))
        stack.enter_context(_restored(student))
        student.requires_grad_(True)
        _descend(student, loss, settings)


def check_images(images: Tensor) -> None:
    """Raise UserError unless these are two or more images [k, channels, h, w]."""
    if images.ndim != 4 or len(images) < 2:
        raise UserError(f"distillation: got inputs {list(images.shape)}, takes at least two images [k, channels, h, w]")


@contextmanager
def _restored(network: nn.Module) -> Iterator[None]:
    """At the end of the context, restore the training mode of each module, and `requires_grad` and `grad` of parameters."""
    modes = {module: module.training for module in network.modules()}
    needed = {weight: (weight.requires_grad, weight.grad) for weight in network.parameters()}
    try:
        yield
    finally:
        for module, was in modes.items():
            module.training = was
        for weight, (was, gradient) in needed.items():
            weight.requires_grad_(was)
            weight.grad = gradient


def _descend(student: nn.Module, loss: Callable[[], Tensor], settings: Distillation) -> None:
    """Minimise a loss by Adam, in training mode, with a falling rate. The network's modes and gradients stay unchanged."""
    optimiser = torch.optim.Adam([weight for weight in student.parameters() if weight.requires_grad], settings.rate)
    with _restored(student):
        student.train()
        for step in range(settings.steps):
            for group in optimiser.param_groups:
                group["lr"] = settings.rate * 0.5 * (1.0 + math.cos(math.pi * step / settings.steps))
            optimiser.zero_grad()
            loss().backward()
            optimiser.step()


def _views(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return the images, half of them mirrored, each shifted by up to an eighth of its size. Edges are reflected."""
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    images = torch.where(mirrored.to(images.device)[:, None, None, None], images.flip(3), images)
    high, wide = images.shape[2] // SHIFT, images.shape[3] // SHIFT
    padded = F.pad(images, [wide, wide, high, high], mode="reflect")
    down = torch.randint(0, 2 * high + 1, (len(images),), generator=generator).tolist()
    right = torch.randint(0, 2 * wide + 1, (len(images),), generator=generator).tolist()
    return torch.stack([image[:, y : y + images.shape[2], x : x + images.shape[3]]
                        for image, y, x in zip(padded, down, right, strict=True)])  # fmt: skip
