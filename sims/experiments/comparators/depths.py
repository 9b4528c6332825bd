"""Comparators for networks of different depth: identity expansion, and segments with zipping."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.fusion.cla_ot.balance import balanced
from fedloom.fusion.cla_ot.matching import costs_between, wired
from fedloom.fusion.cla_ot.transport import correlation_cost
from fedloom.fusion.graph.channels import Wiring
from fedloom.fusion.probe import observe
from fedloom.sims.experiments.comparators.channels import assigned, by_axis, refuse_groups, zipit
from fedloom.sims.experiments.comparators.layers import prepared, spread


@torch.no_grad()
def identity_expansion(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """Merge by identity expansion and permutation ("Is depth heterogeneity a barrier to model merging?", ICLR 2026).

    Shallower networks get identity layers (residual blocks: zero branches), which count in the mean like all others.
    Channels are permuted to the largest sum of correlations with those of `into`. Then REPAIR sets the statistics.
    Only the paper's abstract was available: CKA places the added layers, as in `fuse`.
    """
    frame = prepared(networks, into, depth, probe)
    refuse_groups(frame, "Identity expansion")
    values = by_axis(frame)
    hidden = [axis.index for axis in frame.structure.axes if not axis.fixed]
    plans = [{} if index == into else {axis: _permutation(each[axis], values[into][axis]) for axis in hidden}
             for index, each in enumerate(values)]  # fmt: skip
    moves = [frame.by_layer(plan, {axis: spread(matrix) for axis, matrix in plan.items()}) for plan in plans]
    equal = {name: [1.0 / len(networks)] * len(networks) for name in frame.shares}
    return frame.repaired(frame.averaged(moves, equal), moves, equal)


def _permutation(theirs: Tensor, goal: Tensor) -> Tensor:
    """Return [n, m] from pre-activations [n, r] and [m, r]. Channels without any stay in order."""
    if not (theirs.any() and goal.any()):
        return assigned(np.eye(len(theirs), len(goal)))
    return assigned(1.0 - correlation_cost([(theirs, goal)]))


@torch.no_grad()
def segments(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """Merge by layer alignment and elastic neuron zipping (Xu et al. 2024, arXiv 2501.00061).

    Each layer of a shallower network stands for a segment of consecutive layers of the deeper one, so that the sum of
    CKA over all layers of the deeper network is largest. It takes the segment's first place; the others are
    identities. Then channels are zipped to the widths of `into` (`zipit`).
    """
    deeper = networks[depth]
    return zipit([_in_segments(network, deeper, probe) for network in networks], into, depth, probe)


def _in_segments(network: nn.Module, deeper: nn.Module, probe: Tensor) -> nn.Module:
    """Return a network with as many layers as `deeper`; the network itself if it has as many or more."""
    structure, wiring = wired([deeper, network], probe)
    if len(wiring.units) >= len(structure.units):
        return network
    return balanced(deeper, structure, network, wiring, _first_of_segments(structure, wiring, probe)).network


def _first_of_segments(deep: Wiring, shallow: Wiring, probe: Tensor) -> dict[int, int]:
    """Return, for the first unit of each segment of `deep`, the unit of `shallow` that takes its place."""
    seen, other = (observe(each, probe, grams={unit.node for unit in each.units}) for each in (deep, shallow))
    similar = 1.0 - costs_between(deep.units, shallow.units, seen, other, "cka")
    matches = {}
    for group in {unit.group for unit in deep.units}:
        rows, columns = ([k for k, unit in enumerate(each.units) if unit.group == group] for each in (deep, shallow))
        for column, row in enumerate(segment_starts(similar[np.ix_(rows, columns)])):
            matches[rows[row]] = columns[column]
    return matches


def segment_starts(similar: np.ndarray) -> list[int]:
    """Divide the rows into as many consecutive segments as there are columns, with the largest sum of similarities.

    Args:
        similar: Similarities [m, n] with m >= n; row i in segment j adds similar[i, j].

    Returns:
        The first row of each segment, by column.
    """
    rows, columns = similar.shape
    best = np.full((rows, columns), -np.inf)  # [i, j]: the largest sum of rows 0..i, with row i in segment j
    best[:, 0] = similar[:, 0].cumsum()
    for row in range(1, rows):
        for column in range(1, columns):
            best[row, column] = max(best[row - 1, column - 1], best[row - 1, column]) + similar[row, column]
    starts, row = [0] * columns, rows - 1
    for column in range(columns - 1, 0, -1):
        while best[row - 1, column] >= best[row - 1, column - 1]:
            row -= 1
        starts[column] = row
        row -= 1
    return starts
