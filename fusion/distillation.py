"""Knowledge distillation: a network learns what others answer, on inputs without labels or with."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.conf.errors import UserError


@dataclass(frozen=True)
class Distillation:
    """Adam with a learning rate that falls from `rate` to 0 as half a cosine over `steps` steps of `batch` inputs each.

    Minimised is the distillation_loss with `temperature` and `weight`.
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
    """weight T^2 KL(softmax(answers / T) || softmax(logits / T)) + (1 - weight) cross-entropy with the labels.

    logits, answers: [k, classes], the student's and the teacher's; labels: int64 [k], needed for a weight below 1 (0: plain
    training). The mean over the batch (Hinton et al. 2015, Sec. 2). Raises UserError for another weight or no labels.
    """
    if not 0.0 <= weight <= 1.0 or (labels is None and weight < 1.0):
        raise UserError(f"distillation weight: got {weight}, takes 0 to 1, and labels where it is below 1")
    plain = F.cross_entropy(logits, labels) if labels is not None and weight < 1.0 else None
    if weight == 0.0 and plain is not None:
        return plain
    goal, given = (answers / temperature).softmax(dim=1), (logits / temperature).log_softmax(dim=1)
    soft = temperature**2 * F.kl_div(given, goal, reduction="batchmean")
    return soft if plain is None else weight * soft + (1.0 - weight) * plain


def distil(
    student: nn.Module, inputs: Tensor, answers: Tensor, settings: Distillation, generator: torch.Generator,
    labels: Tensor | None = None,
) -> None:  # fmt: skip
    """Train a network, in place, to give the teachers' `answers` [k, classes] (logits) on `inputs` [k, ...].

    labels: int64 [k], which a weight below 1 needs. Leaves the network in the mode in which it was. Raises UserError for
    inputs and answers of unequal number.
    """
    if len(inputs) != len(answers) or len(inputs) < 2:
        raise UserError(f"distillation: {len(inputs)} inputs and {len(answers)} answers; takes as many, and two at least")
    was = student.training
    optimiser = torch.optim.Adam([weight for weight in student.parameters() if weight.requires_grad], settings.rate)
    order = torch.empty(0, dtype=torch.int64)
    student.train()
    for step in range(settings.steps):
        if len(order) < 2:  # BatchNorm has no variance of a single input
            order = torch.randperm(len(inputs), generator=generator)
        drawn, order = order[: settings.batch], order[settings.batch :]
        for group in optimiser.param_groups:
            group["lr"] = settings.rate * 0.5 * (1.0 + math.cos(math.pi * step / settings.steps))
        optimiser.zero_grad()
        given = None if labels is None else labels[drawn]
        loss = distillation_loss(student(inputs[drawn]), answers[drawn], settings.temperature, given, settings.weight)
        loss.backward()
        optimiser.step()
    student.train(was)
