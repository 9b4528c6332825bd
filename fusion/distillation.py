"""Knowledge distillation: a network learns what others answer, on inputs without labels."""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from conf.errors import UserError


@dataclass(frozen=True)
class Distillation:
    """Adam with a learning rate that falls from `rate` to 0 as half a cosine over `steps` steps of `batch` inputs each.

    Minimised is T^2 KL(softmax(teacher / T) || softmax(student / T)) with the temperature T (Hinton et al. 2015, Sec. 2).
    """

    steps: int = 300
    rate: float = 1e-3
    batch: int = 128
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch"):
            if getattr(self, name) < 1:
                raise UserError(f"distillation {name}: got {getattr(self, name)}, takes a number of at least 1")
        for name in ("rate", "temperature"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise UserError(f"distillation {name}: got {getattr(self, name)}, takes a number above 0")


def distil(student: nn.Module, inputs: Tensor, answers: Tensor, settings: Distillation, generator: torch.Generator) -> None:
    """Train a network, in place, to give the teachers' `answers` [k, classes] (logits) on `inputs` [k, ...].

    Leaves it in the mode in which it was. Raises UserError for inputs and answers of unequal number.
    """
    if len(inputs) != len(answers) or len(inputs) < 2:
        raise UserError(f"distillation: {len(inputs)} inputs and {len(answers)} answers; takes as many, and two at least")
    heat, was = settings.temperature, student.training
    optimiser = torch.optim.Adam([weight for weight in student.parameters() if weight.requires_grad], settings.rate)
    goal, order = (answers / heat).softmax(dim=1), torch.empty(0, dtype=torch.int64)
    student.train()
    for step in range(settings.steps):
        if len(order) < 2:  # BatchNorm has no variance of a single input
            order = torch.randperm(len(inputs), generator=generator)
        drawn, order = order[: settings.batch], order[settings.batch :]
        for group in optimiser.param_groups:
            group["lr"] = settings.rate * 0.5 * (1.0 + math.cos(math.pi * step / settings.steps))
        optimiser.zero_grad()
        given = (student(inputs[drawn]) / heat).log_softmax(dim=1)
        (heat**2 * F.kl_div(given, goal[drawn], reduction="batchmean")).backward()
        optimiser.step()
    student.train(was)
