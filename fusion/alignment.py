"""Find which layers of two networks correspond."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor, nn

from fedloom.fusion.cla_ot.matching import layer_costs, match_units, pairs_of, wired
from fedloom.fusion.inputs import plain_networks
from fedloom.fusion.settings import FusionSettings


@dataclass(frozen=True, eq=False)
class Alignment:
    """Which hidden layers (or residual blocks) of two networks correspond.

    Attributes:
        layers: The names of both networks' layers, [m] and [n].
        costs: How different the layers are, float64 [m, n].
        pairs: Layers of the first network with those of the second, as many as the shallower network has.
    """

    layers: tuple[tuple[str, ...], tuple[str, ...]]
    costs: np.ndarray
    pairs: Mapping[str, str]

    def __repr__(self) -> str:
        one, other = map(len, self.layers)
        return f"Alignment({one} and {other} layers, {len(self.pairs)} pairs)"


def align(one: nn.Module, other: nn.Module, *, probe: Tensor, settings: FusionSettings | None = None) -> Alignment:
    """Return which layers of two networks correspond, as in `fuse`. The networks stay unchanged. CLA+OT, Algorithm 1.

    Args:
        one: The first network.
        other: The second network.
        probe: Inputs without labels, [k, ...] with k >= 2, as for `fuse`.
        settings: Only `comparison`, `pin_first` and `pin_last` are used.

    Raises:
        UserError: The networks have different families, or the probe set is not usable. The message says which and
            why.
    """
    chosen = settings or FusionSettings()
    kind = "neurons" if chosen.comparison == "neurons" else "preactivation"
    one, other = plain_networks([one, other])
    costs = layer_costs(one, other, probe, representation=kind, dissimilarity=chosen.comparison)
    ours, theirs = wired([one, other], probe)
    matches = match_units(ours, theirs, costs, pin_first=chosen.pin_first, pin_last=chosen.pin_last)
    names = tuple(unit.name for unit in ours.units), tuple(unit.name for unit in theirs.units)
    return Alignment(names, costs, pairs_of(ours, theirs, matches))
