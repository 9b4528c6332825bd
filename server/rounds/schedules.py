"""Schedules: which sites participate in which round."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.clients.protocol.messages import WHEN
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site

MIN_MASKED_SITES = 2  # sites among which masks cancel


@dataclass(frozen=True)
class Participation:
    """Who participates in a round.

    Attributes:
        sites: The sites that the round asks.
        round: The round's number for these sites (Schedule.site_round). Their learning rate depends on it.
    """

    sites: list[Site]
    round: int


@dataclass(frozen=True)
class Restoration:
    """A round after a subtraction in which the remaining sites train the aggregate as one network.

    Attributes:
        number: The round's number in the restoration, from 1. The learning rate depends on it.
        rounds: How many rounds the restoration has.
        share: The share of the way by which the first one moves the aggregate back to its initial state.
    """

    number: int
    rounds: int
    share: float

    @property
    def back(self) -> float:
        """The share of the way by which this round first moves the aggregate back."""
        return self.share if self.number == 1 else 0.0


class Schedule(ABC):
    """Chooses the participants of each round."""

    def length(self, rounds: int) -> int:
        """Return the number of rounds of the run.

        Args:
            rounds: The number of rounds in which each site trains (configuration key `rounds`).
        """
        return rounds

    def site_round(self, round: int) -> int:
        """Convert a round's number in the run (from 1) to its number for the sites in it (from 1).

        The two differ if sites train one after the other: each site starts with its round 1.
        """
        return round

    @abstractmethod
    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        """Return which of the members participate in a round (from 1)."""


@dataclass(frozen=True)
class Sampling(Schedule):
    """All members, or a random sample of them in each round (federation.fraction)."""

    config: Config

    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        """Return the members sampled for this round, drawn by (seed, round)."""
        number = sample_size(self.config, len(members))
        if number >= len(members):
            return Participation(list(members), round)
        draw = generator(self.config.seed, "sampling", str(round))
        return Participation(
            [members[int(index)] for index in sorted(draw.choice(len(members), size=number, replace=False))], round
        )


@dataclass(frozen=True)
class OneByOne(Schedule):
    """Lets sites train one after the other.

    Attributes:
        order: The sites in their order.
        each: The number of rounds of each site.
    """

    order: Sequence[Site]
    each: int

    def length(self, rounds: int) -> int:
        return rounds * len(self.order)

    def site_round(self, round: int) -> int:
        return (round - 1) % self.each + 1

    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        return Participation([self.order[(round - 1) // self.each]], self.site_round(round))


def sample_size(config: Config, members: int) -> int:
    """Return how many of `members` sites a round asks: federation.fraction, at least 1 (secure aggregation: 2)."""
    fewest = min(members, MIN_MASKED_SITES) if config.federation.secure_aggregation else 1
    return max(fewest, 1, round_half_up(config.federation.fraction * members))


def failing(config: Config, round: int, sites: Sequence[Site]) -> dict[str, str]:
    """Return, by name, the sites that fail in a round, and when (WHEN): federation.dropout, drawn by (seed, site, round).

    As many sites as the round needs do not fail.
    """
    federation = config.federation
    if not federation.dropout:
        return {}
    needed = max(1, federation.min_replies)
    if federation.secure_aggregation:
        from fedloom.clients.privacy.secure_aggregation.primitives import threshold_of  # imported only here: slow

        needed = max(needed, MIN_MASKED_SITES, threshold_of(federation.secure_threshold, len(sites)))
    draws = {site.name: generator(config.seed, site.name, "dropout", str(round)).random(2) for site in sites}
    chosen = sorted((name for name in draws if draws[name][0] < federation.dropout), key=lambda name: draws[name][0])
    most = max(0, len(sites) - needed)
    return {name: WHEN[int(len(WHEN) * draws[name][1])] for name in chosen[:most]}


def check_asked(config: Config) -> None:
    """Raise UserError if a round asks fewer sites than secure aggregation or federation.min_replies needs."""
    federation, sites = config.federation, len(config.roster)
    if federation.secure_aggregation and sites < MIN_MASKED_SITES:
        raise UserError("federation.secure_aggregation: the sum of one site is its contribution; use more sites")
    if federation.secure_aggregation and round_half_up(federation.fraction * sites) < MIN_MASKED_SITES:
        raise UserError(f"federation.fraction: got {federation.fraction:g}, so a round asks one of {sites} sites; secure "
                        f"aggregation needs {MIN_MASKED_SITES}; "
                        f"set it to {MIN_MASKED_SITES / sites:.2g} or more")  # fmt: skip
    asked = sample_size(config, sites)
    if federation.min_replies > asked:
        raise UserError(f"federation.min_replies: got {federation.min_replies}, but a round asks only {asked} sites")


def looked_at(config: Config, names: Sequence[str]) -> list[str]:
    """Return the names of the sites to evaluate one by one: evaluation.sites of `names`, drawn by the seed, in order."""
    most = config.evaluation.sites
    if not 0 <= most < len(names):
        return list(names)
    draw = generator(config.seed, "looked at").choice(len(names), size=most, replace=False)
    return [names[int(index)] for index in sorted(draw)]


def round_half_up(number: float) -> int:
    """Return the nearest integer; halves are rounded up."""
    return int(number + 0.5)
