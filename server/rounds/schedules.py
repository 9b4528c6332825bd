"""Schedules: which sites take part in which round."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.conf.errors import UserError
from fedloom.conf.randomness import generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site

FEWEST_MASKED = 2  # sites among which masks cancel


@dataclass(frozen=True)
class Participation:
    """Who is asked in a round, and the round that it is to them (their learning rate follows it)."""

    sites: list[Site]
    round: int


class Schedule(ABC):
    """Who takes part when."""

    def length(self, rounds: int) -> int:
        """How many rounds there are if each site trains for `rounds`."""
        return rounds

    def site_round(self, round: int) -> int:
        """The round that a round of the run (from 1) is to the sites that take part in it."""
        return round

    @abstractmethod
    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        """Of the members of the run, those that take part in a round (from 1)."""


@dataclass(frozen=True)
class Sampling(Schedule):
    """All members, or a random sample of them in each round: federation.fraction."""

    config: Config

    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        """The sample of this round, drawn by (seed, round)."""
        number = sample_size(self.config, len(members))
        if number >= len(members):
            return Participation(list(members), round)
        draw = generator(self.config.seed, "sampling", str(round))
        return Participation(
            [members[int(place)] for place in sorted(draw.choice(len(members), size=number, replace=False))], round
        )


@dataclass(frozen=True)
class OneByOne(Schedule):
    """All rounds of one site, then all of the next, in this order."""

    order: Sequence[Site]
    each: int

    def length(self, rounds: int) -> int:
        return rounds * len(self.order)

    def site_round(self, round: int) -> int:
        return (round - 1) % self.each + 1

    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        return Participation([self.order[(round - 1) // self.each]], self.site_round(round))


def sample_size(config: Config, members: int) -> int:
    """How many of so many members are asked in each round: federation.fraction of them, one at least; under masks two."""
    fewest = min(members, FEWEST_MASKED) if config.federation.secure_aggregation else 1
    return max(fewest, 1, round_half_up(config.federation.fraction * members))


def check_asked(config: Config) -> None:
    """UserError if a round asks fewer sites than masks take, or than federation.min_replies."""
    federation, sites = config.federation, len(config.roster)
    if federation.secure_aggregation and sites < FEWEST_MASKED:
        raise UserError("federation.secure_aggregation: a sum of one site is what it gave; take more sites")
    if federation.secure_aggregation and round_half_up(federation.fraction * sites) < FEWEST_MASKED:
        raise UserError(f"federation.fraction: got {federation.fraction:g}, which asks one of {sites} sites a round; masks "
                        f"take {FEWEST_MASKED}; set it to {FEWEST_MASKED / sites:.2g} or more")  # fmt: skip
    asked = sample_size(config, sites)
    if federation.min_replies > asked:
        raise UserError(f"federation.min_replies: got {federation.min_replies}, only {asked} sites are asked a round")


def looked_at(config: Config, names: Sequence[str]) -> list[str]:
    """Of these sites, in their order, those that are looked at one by one: evaluation.sites of them, drawn by the seed."""
    most = config.evaluation.sites
    if not 0 <= most < len(names):
        return list(names)
    draw = generator(config.seed, "looked at").choice(len(names), size=most, replace=False)
    return [names[int(place)] for place in sorted(draw)]


def round_half_up(number: float) -> int:
    """The nearest integer, halves up."""
    return int(number + 0.5)
