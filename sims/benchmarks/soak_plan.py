"""What goes wrong when in a soak: a function of the numbers of sites and rounds only, so workers and server agree."""

import functools
from dataclasses import dataclass

from fedloom.conf.randomness import generator
from fedloom.sims.benchmarks.soak_replies import PARTIALS, REFUSED

BLOCK = 75  # rounds; each of EVENTS happens in one of them
EVENTS = ("kill", "kill", "hang", "stop", "slow", "node")
AT_A_SITE = ("kill", "hang", "stop")
ODD_SHARE = 0.1  # of the answers
SLOW_SECONDS = 1.5  # that every site takes in a slow round
TASK_TIMEOUT, ROUND_TIMEOUT, WINDOW = 8.0, 20.0, 10
NODE_ROUNDS = 3  # until a dead node is replaced
LOST_ONCE, LOST_TWICE = "a lost state", "a state lost twice"
COUNTS = (LOST_ONCE, *PARTIALS)  # faults after which the reply counts
ODD = (*REFUSED, *COUNTS, LOST_TWICE)
NO_REPLY = f"no reply within {ROUND_TIMEOUT:g} s"
NEEDS_NONE = "it reports a lost state, but has none yet"  # a site that has never contributed

REASONS = {
    "kill": "killed its worker 2 times",
    "hang": f"took longer than engine.task_timeout={TASK_TIMEOUT:g} s",
    "stop": f"took longer than engine.task_timeout={TASK_TIMEOUT:g} s",
    LOST_TWICE: "it lost its own state again",
    **{name: reason for name, (_, reason) in REFUSED.items()},
}


@dataclass(frozen=True)
class Plan:
    """The planned faults of a soak test: what happens to which site in which round.

    All values follow from the attributes, so the workers and the server compute the same plan. The first round has no
    events, so that workers can start.

    Attributes:
        sites: The number of sites.
        rounds: The number of rounds.
    """

    sites: int
    rounds: int

    @functools.cached_property
    def events(self) -> dict[int, str]:
        """The event of each round that has one, such as "kill". No event happens while a node is missing."""
        events = {}
        for first in range(2, self.rounds + 1, BLOCK):
            draw, length = generator(0, "soak", str(first)), min(BLOCK, self.rounds + 1 - first)
            offsets = sorted(draw.permutation(length - NODE_ROUNDS)[: len(EVENTS)]) if length > NODE_ROUNDS else []
            for offset, event in zip(offsets, draw.permutation(EVENTS), strict=False):
                events[first + int(offset)] = str(event)
                first += NODE_ROUNDS if event == "node" else 0
        return events

    def event(self, site: int, round: int) -> str:
        """Return the event that hits a site in a round: kill, hang, stop or slow; "" for none.

        "kill", "hang" and "stop" hit one site; "slow" hits all sites.
        """
        event = self.events.get(round, "")
        hit = event == "slow" or (event in AT_A_SITE and site == int(_drawn("victim", round) * self.sites))
        return event if hit else ""

    def odd(self, site: int, round: int) -> str:
        """Return the fault of the reply that a site sends in a round: one of ODD; "" for a normal reply."""
        index = int(_drawn("odd", round, site) / ODD_SHARE * len(ODD))
        return ODD[index] if index < len(ODD) else ""

    def kind(self, site: int, round: int) -> str:
        """Return the fault of a site, or else of its reply, in a round: one of AT_A_SITE or ODD; "" for none.

        A slow site has no fault.
        """
        event = self.event(site, round)
        return event if event in AT_A_SITE else self.odd(site, round)


plan_of = functools.cache(Plan)  # once for each process


def _drawn(*words: str | int) -> float:
    """A number from [0, 1) that depends on the words only."""
    return float(generator(0, "soak", *map(str, words)).random())
