"""Ways to make components compatible, as words of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PULLS = {"as the paper": 0.0, "pulled": 0.1}  # columns; objective.pull
DCC, ALL = "DCC", "IIW+RP+DCC"
INDEPENDENT, IIW = "independent", "IIW"


@dataclass(frozen=True)
class Way:
    """`words`: without objective.pull, which says nothing where no heads are shared (`shares`)."""

    words: Mapping[str, Any]
    shares: bool = True

    def pulled(self, pull: float) -> dict[str, Any]:
        """All words."""
        return {**self.words, **({"objective.pull": pull} if self.shares else {})}


def _heads(*tasks: str, same: bool = False) -> Way:
    return Way({"objective.auxiliary": list(tasks), "objective.same_start": same})


WAYS = {
    INDEPENDENT: Way({"objective.mode": "alone"}, shares=False),
    IIW: Way({"objective.auxiliary": [], "objective.same_start": True}, shares=False),
    "RP": _heads("rp"),
    DCC: _heads("dcc"),
    "IIW+RP": _heads("rp", same=True),
    "IIW+DCC": _heads("dcc", same=True),
    "RP+DCC": _heads("dcc", "rp"),
    ALL: _heads("dcc", "rp", same=True),
}
