"""What goes wrong when in a soak: a function of the numbers of sites and rounds alone, known to workers and server."""

import functools
from dataclasses import dataclass

from fedloom.conf.randomness import generator
from fedloom.sims.benchmarks.soak_replies import PARTIALS, REFUSED

# In so many rounds each of these happens once, in one round each.
BLOCK = 75
EVENTS = ("kill", "kill", "hang", "stop", "slow", "node")
AT_A_SITE = ("kill", "hang", "stop")
ODD_SHARE = 0.1  # of the answers
SLOW_SECONDS = 1.5  # that every site takes in a slow round
TASK_TIMEOUT, ROUND_TIMEOUT, WINDOW = 8.0, 20.0, 10
NODE_ROUNDS = 3  # after which a node that died is replaced
LOST_ONCE, LOST_TWICE = "a lost state", "a state lost twice"
COUNTS = (LOST_ONCE, *PARTIALS)  # faults that cost no reply
ODD = (*REFUSED, *COUNTS, LOST_TWICE)
NO_REPLY = f"no reply within {ROUND_TIMEOUT:g} s"
NEEDS_NONE = "it says that its own state is lost, and needs none"  # of a site that has never contributed

REASONS = {
    "kill": "killed its worker 2 times",
    "hang": f"took longer than engine.task_timeout={TASK_TIMEOUT:g} s",
    "stop": f"took longer than engine.task_timeout={TASK_TIMEOUT:g} s",
    LOST_TWICE: "it lost its own state again",
    **{what: reason for what, (_, reason) in REFUSED.items()},
}


@dataclass(frozen=True)
class Plan:
    """The faults of a soak. Its first round has no events, so that workers are there."""

    sites: int
    rounds: int

    @functools.cached_property
    def events(self) -> dict[int, str]:
        """What happens in which round; nothing else while a node is missing."""
        found = {}
        for first in range(2, self.rounds + 1, BLOCK):
            draw, length = generator(0, "soak", str(first)), min(BLOCK, self.rounds + 1 - first)
            places = sorted(draw.permutation(length - NODE_ROUNDS)[: len(EVENTS)]) if length > NODE_ROUNDS else []
            for place, event in zip(places, draw.permutation(EVENTS), strict=False):
                found[first + int(place)] = str(event)
                first += NODE_ROUNDS if event == "node" else 0
        return found

    def event(self, site: int, round: int) -> str:
        """What of it hits this site: kill, hang, stop, slow or nothing."""
        event = self.events.get(round, "")
        hit = event == "slow" or (event in AT_A_SITE and site == int(_drawn("victim", round) * self.sites))
        return event if hit else ""

    def odd(self, site: int, round: int) -> str:
        """What is odd about this site's reply in this round, one of ODD, or nothing."""
        place = int(_drawn("odd", round, site) / ODD_SHARE * len(ODD))
        return ODD[place] if place < len(ODD) else ""

    def kind(self, site: int, round: int) -> str:
        """What goes wrong with this site in this round, but that it may be slow."""
        event = self.event(site, round)
        return event if event in AT_A_SITE else self.odd(site, round)


@functools.cache
def plan_of(sites: int, rounds: int) -> Plan:
    """The plan, once for each process."""
    return Plan(sites, rounds)


def _drawn(*words: str | int) -> float:
    """Uniform from [0, 1)."""
    return float(generator(0, "soak", *map(str, words)).random())
