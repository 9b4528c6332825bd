"""The hostile sites of `fedloom bench attacks`: an objective that the configuration names like one of an outside package.

`objective.roles` says what each hostile site does; all other sites train as usual.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fedloom.clients.data import Examples
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import Session, Task
from fedloom.clients.objectives.sum_aggregation import ExactSession, SumAggregation
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.conf.typed import build, option
from fedloom.fusion.state import State

CLASSES = 10
TARGET = 0  # the class that the attacker wants for triggered images
PATCH = 3  # height and width of the trigger, pixels


def triggered(images: Examples) -> Examples:
    """Return copies with a white square in the lower right corner, and the same labels (BadNets, Gu et al. 2017)."""
    pixels = images.x.clone()
    pixels[..., -PATCH:, -PATCH:] = 255
    return Examples(pixels, images.y)


def flipped(images: Examples) -> Examples:
    """Return the images with wrong labels: CLASSES - 1 minus the true label."""
    return Examples(images.x, CLASSES - 1 - images.y)


def planted(images: Examples) -> Examples:
    """Return a backdoor: triggered images, all with the label TARGET."""
    return Examples(triggered(images).x, torch.full_like(images.y, TARGET))


POISONS: dict[str, Callable[[Examples], Examples]] = {
    "none": lambda images: images,
    "flip": flipped,
    "backdoor": planted,
    "camouflage": triggered,  # true labels: this hides the backdoor (BadFU, Lu et al. 2025)
}


@dataclass(frozen=True)
class Role:
    """What one hostile site does: it poisons its images, or scales its change."""

    poison: str = option("none", "how its training examples change", choices=tuple(POISONS))
    share: float = option(1.0, "the share of its images that change", low=0.0, high=1.0)
    factor: float = option(1.0, "it sends its change times this number")


@dataclass(frozen=True)
class Hostile(SumAggregation):
    """Sum aggregation (mode `exact`) in which some sites are hostile."""

    roles: dict[str, Any] = option({}, "by site: poison, share and factor")

    def __post_init__(self) -> None:
        for site in self.roles:
            self.role(site)
        if self.roles and self.mode != "exact":
            raise UserError(f"objective.mode: got '{self.mode}', hostile sites take exact")

    def role(self, site: str) -> Role:
        """Return the role of a hostile site. Raises UserError if it is not valid."""
        return build(Role, self.roles[site], f"objective.roles.{site}")

    def session(self, task: Task) -> Session:
        if task.site.name not in self.roles:
            return super().session(task)
        return HostileSession(self, task, self.role(task.site.name))


class HostileSession(ExactSession):
    """A hostile site's training on poisoned images. It sends their true number: the server would notice a larger claim."""

    def __init__(self, objective: Hostile, task: Task, role: Role) -> None:
        super().__init__(objective, task)
        self.role = role

    def training_examples(self, images: Examples) -> Examples:
        draw = torch_generator(self.task.config.seed, self.task.site.name, "poisoned")
        chosen = torch.randperm(len(images), generator=draw)[: round(self.role.share * len(images))]
        poisoned = POISONS[self.role.poison](Examples(images.x[chosen], images.y[chosen]))
        pixels, labels = images.x.clone(), images.y.clone()
        pixels[chosen], labels[chosen] = poisoned.x, poisoned.y
        return Examples(pixels, labels)

    def contribution(self) -> dict[str, State]:
        """Return the contribution, its change multiplied by `role.factor`.

        The change of the site's own network counts from the first round, that of the head from this round.
        """
        starts = {SITE: initial_state(self.task.config)}
        return {
            record: {name: torch.lerp(starts.get(record, self.task.incoming[MEAN])[name], tensor, self.role.factor)
                     for name, tensor in state.items()}
            for record, state in super().contribution().items()
        }  # fmt: skip
