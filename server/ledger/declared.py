"""The slots that a method declares."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedloom.fusion.state import State
from fedloom.server.ledger.contributions import prefixes


def everything(state: State) -> State:
    """Return the state unchanged: the default `part` of a `Sum`."""
    return state


@dataclass(frozen=True)
class Sum:
    """A slot for what each site put last, and for the exact sum of that over all sites.

    Args:
        part: returns the part of a contribution that is summed; the rest is only stored.
        weighted: each contribution counts as often as the site has samples, so that the mean is weighted.
        resumable: a site that lost its own state can resume from what it put.
        masked: only the site can read what it put. Masks cancel in the sum, which is modulo 2**64
            (server.rounds.secure_aggregation).
    """

    part: Callable[[State], State] = everything
    weighted: bool = False
    resumable: bool = False
    masked: bool = False


@dataclass(frozen=True)
class PerClientSlot:
    """A slot for what each site put last, which is never summed.

    `resumable`: a site that lost its own state can resume from what it put.
    """

    resumable: bool = False


Slot = Sum | PerClientSlot


def declared_sums(slots: Mapping[str, Slot]) -> dict[str, dict[str, Any]]:
    """Return the description of a method's sums, by slot, that its ledger's first event stores."""
    start = prefixes(list(slots))
    sums = {name: declared for name, declared in slots.items() if isinstance(declared, Sum)}
    return {name: {"prefix": start[name], "weighted": declared.weighted, **({"masked": True} if declared.masked else {})}
            for name, declared in sums.items()}  # fmt: skip
