"""The modes of sum aggregation: a table that sites and server both read, so that they agree on what is summed."""

from dataclasses import dataclass

from torch import Tensor

from fedloom.clients.networks.base import EXTRACTOR
from fedloom.clients.objectives.base import Objective
from fedloom.conf.errors import unknown
from fedloom.fusion.state import State

AGGREGATE = "aggregate"  # an initialisation: at the aggregate of the sites that have trained


@dataclass(frozen=True)
class Mode:
    """What one mode sums and what its aggregate is.

    `sums`: the sites' extractors are kept and summed exactly. `convolutions_only`: of these, only the convolution weights.
    `own_head`: a site keeps a head of its own. `subsets`: leave-one-out sums are trained on.
    `star`: there is a free network N* beside the sites' own, averaged over each round's replies (the paper's).
    `display_name`: the aggregate's, in tables.
    """

    sums: bool
    convolutions_only: bool
    star: bool
    own_head: bool
    subsets: bool
    display_name: str

    def summed(self, name: str, tensor: Tensor) -> bool:
        """Whether a site's tensor enters the exact sum."""
        if not self.sums or not name.startswith(EXTRACTOR):
            return False
        return tensor.ndim == 4 or not self.convolutions_only

    def summed_part(self, state: State) -> State:
        """Of a site's contribution, what enters the exact sum."""
        return {name: tensor for name, tensor in state.items() if self.summed(name, tensor)}

    def site_part(self, state: State) -> State:
        """Of a network's state, what is the site's own contribution."""
        return {name: tensor for name, tensor in state.items() if self.own_head or name.startswith(EXTRACTOR)}


MODES = {
    "exact": Mode(sums=True, convolutions_only=False, star=False, own_head=False, subsets=True, display_name="sum"),
    "regularised": Mode(sums=True, convolutions_only=True, star=True, own_head=False, subsets=False, display_name="sum"),
    "independent": Mode(sums=True, convolutions_only=False, star=False, own_head=True, subsets=False, display_name="sum"),
    "fedavg": Mode(sums=False, convolutions_only=False, star=False, own_head=False, subsets=False, display_name="fedavg"),
}


def mode_of(objective: Objective) -> Mode:
    """The mode of an objective. Raises UserError for an unknown one."""
    if objective.mode not in MODES:
        raise unknown("objective.mode", objective.mode, MODES)
    return MODES[objective.mode]
