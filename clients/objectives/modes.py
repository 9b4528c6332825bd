"""The modes of sum aggregation, a table that sites and server share, so that they agree on what is summed."""

from dataclasses import dataclass

from torch import Tensor

from fedloom.clients.networks.base import EXTRACTOR
from fedloom.clients.objectives.base import Objective
from fedloom.conf.errors import unknown
from fedloom.fusion.state import State

AGGREGATE = "aggregate"  # an initialisation: from the aggregate of the sites that have trained


@dataclass(frozen=True)
class Mode:
    """A mode of sum aggregation: what sites train and send, and what is summed."""

    sums: bool  # the server stores the sites' extractors and sums them exactly
    convolutions_only: bool  # only convolution weights are summed
    star: bool  # an additional free network N* is averaged over each round's replies (as in the paper)
    own_head: bool  # each site has its own head
    subsets: bool  # sites also train on leave-one-out sums
    display_name: str  # the aggregate's name in tables

    def summed(self, name: str, tensor: Tensor) -> bool:
        """Return whether a site's tensor enters the exact sum."""
        if not self.sums or not name.startswith(EXTRACTOR):
            return False
        return tensor.ndim == 4 or not self.convolutions_only

    def summed_part(self, state: State) -> State:
        """Return the part of a site's contribution that enters the exact sum."""
        return {name: tensor for name, tensor in state.items() if self.summed(name, tensor)}

    def site_part(self, state: State) -> State:
        """Return the part of a network's state that is the site's contribution."""
        return {name: tensor for name, tensor in state.items() if self.own_head or name.startswith(EXTRACTOR)}


MODES = {
    "exact": Mode(sums=True, convolutions_only=False, star=False, own_head=False, subsets=True, display_name="sum"),
    "regularised": Mode(sums=True, convolutions_only=True, star=True, own_head=False, subsets=False, display_name="sum"),
    "independent": Mode(sums=True, convolutions_only=False, star=False, own_head=True, subsets=False, display_name="sum"),
    "fedavg": Mode(sums=False, convolutions_only=False, star=False, own_head=False, subsets=False, display_name="fedavg"),
}


def mode_of(objective: Objective) -> Mode:
    """Return the Mode that objective.mode names. Raises UserError for an unknown name."""
    if objective.mode not in MODES:
        raise unknown("objective.mode", objective.mode, MODES)
    return MODES[objective.mode]
