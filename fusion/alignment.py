"""Which layers of two networks correspond, on networks in memory."""

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

    `layers`: the names of both networks' [m] and [n]; `costs`: [m, n] float64, how unlike they are; `pairs`: of those that
    correspond the one's name and the other's, as many as the shallower network has.
    """

    layers: tuple[tuple[str, ...], tuple[str, ...]]
    costs: np.ndarray
    pairs: Mapping[str, str]


def align(one: nn.Module, other: nn.Module, *, probe: Tensor, settings: FusionSettings | None = None) -> Alignment:
    """Compare the layers of two networks, as `fuse` does, on inputs [k, ...]; they stay as they are.

    Of the settings `comparison`, `pin_first` and `pin_last` count. CLA+OT, Algorithm 1.
    Raises UserError, naming what is at fault, for networks of different families and probe sets that cannot be used.
    """
    chosen = settings or FusionSettings()
    kind = "neurons" if chosen.comparison == "neurons" else "preactivation"
    one, other = plain_networks([one, other])
    costs = layer_costs(one, other, probe, representation=kind, dissimilarity=chosen.comparison)
    ours, theirs = wired([one, other], probe)
    matches = match_units(ours, theirs, costs, pin_first=chosen.pin_first, pin_last=chosen.pin_last)
    names = tuple(unit.name for unit in ours.units), tuple(unit.name for unit in theirs.units)
    return Alignment(names, costs, pairs_of(ours, theirs, matches))
