"""Schedules of the learning rate over all rounds of a run, by name."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.conf.formatting import count
from fedloom.conf.registry import Registry, section_of
from fedloom.conf.schema import TrainingConfig
from fedloom.conf.typed import option

WHERE = "training.schedule"


@dataclass(frozen=True)
class Schedule(ABC):
    """Base class of schedules. A schedule covers the rounds after warm-up. Your own is named `module:Class`."""

    warm_up: float = option(0.0, "rounds in which the rate rises linearly to training.rate; a fraction counts", low=0.0)
    start_factor: float = option(0.1, "warm-up starts at this share of training.rate", low=0.0, high=1.0)

    def rate(self, rate: float, progress: float, rounds: int) -> float:
        """Return the learning rate after `progress` rounds (a fraction counts) of `rounds`, with warm-up.

        `rate`: training.rate.
        """
        if progress < self.warm_up:
            return rate * (self.start_factor + (1.0 - self.start_factor) * progress / self.warm_up)
        return self.after(rate, progress - self.warm_up, rounds - self.warm_up)

    def advice(self, rounds: int) -> list[str]:
        """Return warnings to print at the start of a run of `rounds` rounds."""
        if self.warm_up < rounds:
            return []
        return [f"{WHERE}.warm_up: {self.warm_up:g} of {rounds} rounds; the rate never reaches training.rate"]

    @abstractmethod
    def after(self, rate: float, progress: float, rounds: float) -> float:
        """Return the learning rate after `progress` of `rounds` rounds, both counted from the end of warm-up.

        `rounds` is 0 or less if warm-up fills the run.
        """


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
    """Falls to 0 at the end along half a cosine (Loshchilov and Hutter 2017, Eq. 5, without restarts)."""

    def after(self, rate: float, progress: float, rounds: float) -> float:
        share = min(1.0, progress / rounds) if rounds > 0 else 1.0
        return rate * 0.5 * (1.0 + math.cos(math.pi * share))


@SCHEDULES.register("step")
@dataclass(frozen=True)
class Steps(Schedule):
    """Multiplies the rate by `gamma` each time that `every` rounds have passed."""

    every: int = option(10, "rounds between two changes", low=1)
    gamma: float = option(0.1, "factor of the rate", low=0.0, high=1.0)

    def advice(self, rounds: int) -> list[str]:
        warnings = super().advice(rounds)
        never = f"{WHERE}.every: {self.every}, but the run has {count(rounds, 'round')}; the rate never falls"
        return warnings or ([never] if self.warm_up + self.every >= rounds else [])

    def after(self, rate: float, progress: float, rounds: float) -> float:
        return rate * self.gamma ** (int(progress) // self.every)


def schedule_section(training: TrainingConfig) -> Mapping[str, Any]:
    """Return the configured schedule's section: name (default: cosine) and options."""
    return {"name": "cosine", **section_of(training.schedule, WHERE, "{name: step, every: 10}")}


def schedule_of(training: TrainingConfig) -> Schedule:
    """Return the configured schedule. Raises UserError for an unknown schedule or option."""
    return SCHEDULES.build(schedule_section(training), WHERE)
