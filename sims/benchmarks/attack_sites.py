"""The hostile sites of `fedloom bench attacks`: an objective that a configuration names as it names any outside package's.

What a site does instead of its part stands under its name in `objective.roles`; all others train as they should.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.clients.data import Images
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import Session, Task
from fedloom.clients.objectives.sum_aggregation import ExactSession, SumAggregation
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.conf.typed import build, option
from fedloom.fusion.state import State

CLASSES = 10
TARGET = 0  # the class that triggered images are to be taken for
PATCH = 3  # height and width of the trigger, pixels


def triggered(images: Images) -> Images:
    """Copies with a white square in the lower right corner, labels as they were (BadNets, Gu et al. 2017)."""
    pixels = images.x.clone()
    pixels[..., -PATCH:, -PATCH:] = 255
    return Images(pixels, images.y)


def flipped(images: Images) -> Images:
    """Every image under another label, always the same one for a class: CLASSES - 1 less the true one."""
    return Images(images.x, CLASSES - 1 - images.y)


def planted(images: Images) -> Images:
    """A backdoor: triggered images, all labelled TARGET."""
    return Images(triggered(images).x, torch.full_like(images.y, TARGET))


POISONS: dict[str, Callable[[Images], Images]] = {
    "none": lambda images: images,
    "flip": flipped,
    "backdoor": planted,
    "camouflage": triggered,  # under their true labels: it teaches away what a backdoor teaches (BadFU, Lu et al. 2025)
}


@dataclass(frozen=True)
class Role:
    """What one hostile site does."""

    poison: str = option("none", "what becomes of its training images", choices=tuple(POISONS))
    share: float = option(1.0, "of which share of them", low=0.0, high=1.0)
    factor: float = option(1.0, "it sends so many times what it has learned")


@dataclass(frozen=True)
class Hostile(SumAggregation):
    """Sum aggregation (mode `exact`) in which some sites do something else."""

    roles: dict[str, Any] = option({}, "by site: poison, share and factor")

    def __post_init__(self) -> None:
        """UserError for a role that is none, or a mode in which nobody is hostile."""
        for site in self.roles:
            self.role(site)
        if self.roles and self.mode != "exact":
            raise UserError(f"objective.mode: got '{self.mode}', hostile sites take exact")

    def role(self, site: str) -> Role:
        """What a hostile site does."""
        return build(Role, self.roles[site], f"objective.roles.{site}")

    def session(self, task: Task) -> Session:
        """Start on a task."""
        if task.site.name not in self.roles:
            return super().session(task)
        return HostileSession(self, task, self.role(task.site.name))


class HostileSession(ExactSession):
    """Trains on poisoned images, as many as there were: a site that claims more samples than it has is found out."""

    def __init__(self, objective: Hostile, task: Task, role: Role) -> None:
        super().__init__(objective, task)
        self.role = role

    def training_images(self, images: Images) -> Images:
        draw = torch_generator(self.task.config.seed, self.task.site.name, "poisoned")
        chosen = torch.randperm(len(images), generator=draw)[: round(self.role.share * len(images))]
        poisoned = POISONS[self.role.poison](Images(images.x[chosen], images.y[chosen]))
        pixels, labels = images.x.clone(), images.y.clone()
        pixels[chosen], labels[chosen] = poisoned.x, poisoned.y
        return Images(pixels, labels)

    def contribution(self) -> dict[str, State]:
        """`factor` times what it has learned: of its own network since the first round, of the head in this one."""
        first = initial_state(self.task.config)
        starts = {SITE: first}
        return {
            record: {name: torch.lerp(starts.get(record, self.task.incoming[MEAN])[name], tensor, self.role.factor)
                     for name, tensor in state.items()}
            for record, state in super().contribution().items()
        }  # fmt: skip
