"""How a site trains: the section `training` of a configuration, with what it names built."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from fedloom.clients.training.augmentation import Augmentation, augmentation_of
from fedloom.clients.training.optimizers import SGD, Optimizer, optimizer_of
from fedloom.clients.training.schedules import Cosine, Schedule, schedule_of
from fedloom.conf.schema import TrainingConfig


@dataclass(frozen=True, kw_only=True)
class Recipe(TrainingConfig):
    """`training`, resolved."""

    optimizer: Optimizer = field(default_factory=SGD)
    schedule: Schedule = field(default_factory=Cosine)
    augmentation: Augmentation | None = None

    def rate_at(self, rounds: int, progress: float) -> float:
        """The learning rate after `progress` rounds (a fraction counts) of `rounds`."""
        return self.schedule.rate(self.rate, progress, rounds)


def recipe_of(training: TrainingConfig) -> Recipe:
    """What a section names, built. UserError for unknown names and options."""
    settings: dict[str, Any] = {field.name: getattr(training, field.name) for field in dataclasses.fields(training)}
    settings |= {"optimizer": optimizer_of(training), "schedule": schedule_of(training)}
    return Recipe(**settings, augmentation=augmentation_of(training))
