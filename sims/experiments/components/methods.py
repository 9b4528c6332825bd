"""Ways to make components compatible, as settings of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

PULLS = {"as the paper": 0.0, "pulled": 0.1}  # columns; objective.pull
DCC, ALL = "DCC", "IIW+RP+DCC"
INDEPENDENT, IIW = "independent", "IIW"


@dataclass(frozen=True)
class Way:
    """The settings of a way. `pulls`: it has a head of the common classes, to which objective.pull applies."""

    settings: Mapping[str, Any]
    pulls: bool = False

    def pulled(self, pull: float) -> dict[str, Any]:
        """Return the settings, with this objective.pull if it applies."""
        return {**self.settings, **({"objective.pull": pull} if self.pulls else {})}

    @property
    def columns(self) -> dict[str, float]:
        """The entries of PULLS that make a difference."""
        return PULLS if self.pulls else dict(list(PULLS.items())[:1])


def _heads(*tasks: str, same: bool = False) -> Way:
    return Way({"objective.auxiliary": list(tasks), "objective.same_start": same, "objective.pull": 0.0}, "dcc" in tasks)


WAYS = {
    INDEPENDENT: Way({"objective.mode": "alone"}),
    IIW: Way({"objective.auxiliary": [], "objective.same_start": True}),
    "RP": _heads("rp"),
    DCC: _heads("dcc"),
    "IIW+RP": _heads("rp", same=True),
    "IIW+DCC": _heads("dcc", same=True),
    "RP+DCC": _heads("dcc", "rp"),
    ALL: _heads("dcc", "rp", same=True),
}
