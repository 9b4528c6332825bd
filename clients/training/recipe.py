"""The section `training` of a configuration, with its optimiser, schedule and augmentations built."""

from dataclasses import dataclass

from fedloom.clients.training.augmentation import Augmentation, augmentation_of
from fedloom.clients.training.optimizers import Optimizer, optimizer_of
from fedloom.clients.training.schedules import Schedule, schedule_of
from fedloom.conf.schema import TrainingConfig


@dataclass(frozen=True)
class Recipe:
    """The resolved section `training`. Its numbers are those of TrainingConfig."""

    optimizer: Optimizer
    schedule: Schedule
    augmentation: Augmentation | None
    epochs: float
    steps: int
    batch: int
    rate: float
    momentum: float
    weight_decay: float
    clip: float
    label_smoothing: float
    precision: str
    channels_last: bool

    def rate_at(self, rounds: int, progress: float) -> float:
        """Return the learning rate after `progress` rounds (a fraction counts) of `rounds`."""
        return self.schedule.rate(self.rate, progress, rounds)


def recipe_of(training: TrainingConfig) -> Recipe:
    """Resolve a section `training`. Raises UserError for unknown names and options."""
    return Recipe(
        optimizer=optimizer_of(training),
        schedule=schedule_of(training),
        augmentation=augmentation_of(training),
        epochs=training.epochs,
        steps=training.steps,
        batch=training.batch,
        rate=training.rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
        clip=training.clip,
        label_smoothing=training.label_smoothing,
        precision=training.precision,
        channels_last=training.channels_last,
    )
