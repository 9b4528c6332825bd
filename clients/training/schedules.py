"""The learning rate over all rounds of a run, by name."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.conf.registry import Registry, section_of
from fedloom.conf.schema import TrainingConfig
from fedloom.conf.typed import option

WHERE = "training.schedule"


@dataclass(frozen=True)
class Schedule(ABC):
    """A schedule begins when warm-up is over, and has the rounds that are left then. A further one is `module:Class`."""

    warm_up: float = option(0.0, "rounds in which the rate rises linearly to training.rate; a fraction counts", low=0.0)
    start_factor: float = option(0.1, "share of training.rate that warm-up begins at", low=0.0, high=1.0)

    def rate(self, rate: float, progress: float, rounds: int) -> float:
        """The learning rate after `progress` rounds (a fraction counts) of `rounds`."""
        if progress < self.warm_up:
            return rate * (self.start_factor + (1.0 - self.start_factor) * progress / self.warm_up)
        return self.after(rate, progress - self.warm_up, rounds - self.warm_up)

    def advice(self, rounds: int) -> list[str]:
        """What to tell at the start of a run of so many rounds."""
        if self.warm_up < rounds:
            return []
        return [f"{WHERE}.warm_up: {self.warm_up:g} of {rounds} rounds; the rate reaches training.rate in none of them"]

    @abstractmethod
    def after(self, rate: float, progress: float, rounds: float) -> float:
        """The same, without warm-up. `rounds` may be 0 or less: then warm-up was all."""


SCHEDULES: Registry[Schedule] = Registry("schedule", Schedule)


@SCHEDULES.register("constant")
@dataclass(frozen=True)
class Constant(Schedule):
    """The same rate in all rounds."""

    def after(self, rate: float, progress: float, rounds: float) -> float:
        return rate


@SCHEDULES.register("cosine")
@dataclass(frozen=True)
class Cosine(Schedule):
    """Falls to 0 at the end as half a cosine (Loshchilov and Hutter 2017, Eq. 5, without restarts), and stays there."""

    def after(self, rate: float, progress: float, rounds: float) -> float:
        share = min(1.0, progress / rounds) if rounds > 0 else 1.0
        return rate * 0.5 * (1.0 + math.cos(math.pi * share))


@SCHEDULES.register("step")
@dataclass(frozen=True)
class Steps(Schedule):
    """Multiplied by `gamma` after every so many rounds."""

    every: int = option(10, "rounds", low=1)
    gamma: float = option(0.1, "factor of the rate", low=0.0, high=1.0)

    def advice(self, rounds: int) -> list[str]:
        found = super().advice(rounds)
        never = f"{WHERE}.every: {self.every}, and there are {rounds} rounds; the rate never falls"
        return found or ([never] if self.warm_up + self.every >= rounds else [])

    def after(self, rate: float, progress: float, rounds: float) -> float:
        return rate * self.gamma ** (int(progress) // self.every)


def schedule_section(training: TrainingConfig) -> Mapping[str, Any]:
    """The configured schedule: its name (none: cosine) and options."""
    return {"name": "cosine", **section_of(training.schedule, WHERE, "{name: step, every: 10}")}


def schedule_of(training: TrainingConfig) -> Schedule:
    """The configured schedule; UserError if there is no such schedule or option."""
    return SCHEDULES.build(schedule_section(training), WHERE)
