"""What a method declares: the slots that sites put into."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.fusion.state import State
from fedloom.server.ledger.contributions import prefixes


def everything(state: State) -> State:
    """All of it."""
    return state


@dataclass(frozen=True)
class Sum:
    """The exact sum of what sites put, each site's last put. `part`: of a put, what is summed; the rest is only kept.

    `weighted`: each counts as many times as the site has samples, so that the mean is a weighted one.
    `resumable`: a site that lost its own state can begin again at what it put. `masked`: nobody but the site can read what
    it put; masks cancel in the sum, which is one modulo 2**64 (server.rounds.secure_aggregation).
    """

    part: Callable[[State], State] = everything
    weighted: bool = False
    resumable: bool = False
    masked: bool = False


@dataclass(frozen=True)
class PerClientSlot:
    """What each site put last, never summed: it is the site's own. `resumable`: as for `Sum`."""

    resumable: bool = False


Slot = Sum | PerClientSlot


def declared_sums(slots: Mapping[str, Slot]) -> dict[str, dict[str, Any]]:
    """The sums of a method as its ledger's first event says them."""
    start = prefixes(list(slots))
    sums = {name: one for name, one in slots.items() if isinstance(one, Sum)}
    return {name: {"prefix": start[name], "weighted": one.weighted, **({"masked": True} if one.masked else {})}
            for name, one in sums.items()}  # fmt: skip
