"""Comparators that match channels: by weights (Git Re-Basin), by correlation (ZipIt), by CCA (CCA Merge)."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.moves import Moves, apply
from fedloom.fusion.cla_ot.repair import recompute_statistics, rescale
from fedloom.fusion.cla_ot.transport import correlation_cost
from fedloom.fusion.graph.channels import Axis
from fedloom.fusion.probe import features_of, observe
from fedloom.fusion.refit.patches import picked
from fedloom.fusion.state import State
from fedloom.sims.experiments.comparators.layers import (
    Frame,
    in_channels,
    norms,
    prepared,
    refuse_unequal_widths,
    spread,
    walk,
    weighted,
)

SWEEPS = 50  # most passes of weight matching over all axes
AGAIN = 0.3  # ZipIt: factor of a merged group's correlations
CCA = 0.1  # relative to the mean variance; added to the variances


@torch.no_grad()
def git_rebasin(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """Merge by weight matching (Ainsworth et al. 2023, Alg. 1) onto `into`, averaging and REPAIR.

    Axis by axis in random order, it assigns channels to maximise the inner product of all weights on the axis, until
    nothing changes. Unmatched channels of a wider network are dropped; channels of a narrower one are used several
    times.
    """
    frame = prepared(networks, into, depth, probe)
    refuse_groups(frame, "Git Re-Basin")
    goal, known = dict(frame.bodies[into].state_dict()), {name for name, share in frame.shares.items() if share[into]}
    moves = {into: Moves({}, {}, {})}
    for index in sorted(range(len(frame.bodies)), key=lambda index: index != depth):
        if index != into:
            plans = _matched_weights(frame, index, goal, known)
            moves[index] = frame.by_layer(plans, {axis: spread(plan) for axis, plan in plans.items()})
        if index == depth:  # from here on, layers that `into` lacks are those of this network
            state = frame.moved(index, moves[index])
            goal |= {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] not in known}
            known = set(frame.shares)
    all_moves = [moves[index] for index in range(len(frame.bodies))]
    return frame.repaired(frame.averaged(all_moves, frame.shares), all_moves, frame.shares)


def _matched_weights(frame: Frame, index: int, goal: State, known: set[str]) -> dict[int, Tensor]:
    """Return assignments [n, m] by axis."""
    axes = [axis for axis in frame.structure.axes if not axis.fixed]
    parameters = dict(frame.bodies[index].named_parameters())
    own = {name for name, share in frame.shares.items() if share[index]} & known
    state = {name: tensor.double() for name, tensor in parameters.items() if name.rpartition(".")[0] in own}
    where = {(slot.tensor, slot.dim): axis.index for axis in axes for slot in axis.slots}
    size = {axis.index: axis.size for axis in frame.wirings[index].axes}
    plans = {axis.index: assigned(np.eye(size[axis.index], frame.size(axis.index))) for axis in axes}
    generator = torch.Generator(device="cpu").manual_seed(0)
    for _ in range(SWEEPS):
        changed = False
        for k in torch.randperm(len(axes), generator=generator).tolist():
            gain = _gain(axes[k], state, goal, where, plans)
            new = plans[axes[k].index] if gain is None else assigned(gain)
            changed |= not torch.equal(new, plans[axes[k].index])
            plans[axes[k].index] = new
        if not changed:
            break
    return plans


def _gain(axis: Axis, state: Mapping[str, Tensor], goal: State, where: Mapping[tuple[str, int], int],
          plans: Mapping[int, Tensor]) -> np.ndarray | None:  # fmt: skip
    """Return inner products [n, m] of the tensors on the axis, their other dimensions moved; None without tensors."""
    total = None
    for slot in axis.slots:
        if slot.tensor not in state:
            continue
        mine = state[slot.tensor]
        for dim in {0, 1} - {slot.dim}:
            if (slot.tensor, dim) in where and dim < mine.ndim:
                plan = plans[where[slot.tensor, dim]]
                mine = apply(mine, spread(plan) if dim else plan, dim, slot.tensor)
        one, other = (tensor.movedim(slot.dim, 0).reshape(tensor.shape[slot.dim] // slot.repeat, -1)
                      for tensor in (mine, goal[slot.tensor].double()))  # fmt: skip
        total = one @ other.T if total is None else total + one @ other.T
    return None if total is None else total.numpy()


def assigned(gain: np.ndarray) -> Tensor:
    """Return [n, m] with the largest sum: one of n rows for each of m columns. Every row is used before any repeats."""
    plan, unassigned = np.zeros(gain.shape), np.arange(gain.shape[1])
    while len(unassigned):
        rows, columns = linear_sum_assignment(gain[:, unassigned], maximize=True)
        plan[rows, unassigned[columns]] = 1.0
        unassigned = np.delete(unassigned, columns)
    return torch.from_numpy(plan)


@torch.no_grad()
def zipit(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """Merge by ZipIt (Stoica et al. 2024, Sec. 4), then repair statistics (REPAIR).

    It merges the most correlated channels, within and across networks, to their means, until `into`'s number is left.
    Readers get each group's mean for all its members (the pseudo-inverse). All layers are merged.

    There is one merge for each axis, from all its pre-activations. A merged group's correlations are the smaller of
    its members', times 0.3. Works for any widths.
    """
    frame = prepared(networks, into, depth, probe)
    refuse_groups(frame, "ZipIt")
    values = by_axis(frame)
    means: list[dict[int, Tensor]] = [{} for _ in frame.bodies]
    members: list[dict[int, Tensor]] = [{} for _ in frame.bodies]
    for axis in (axis.index for axis in frame.structure.axes if not axis.fixed):
        present = [index for index, each in enumerate(values) if each[axis].any()]
        together = torch.cat([values[index][axis] for index in present])
        groups = _zipped(1.0 - correlation_cost([(together, together)]), frame.size(axis))
        pieces = iter(groups.split([len(values[index][axis]) for index in present]))
        counts = groups.sum(dim=0)
        for index, each in enumerate(values):
            member = next(pieces) if index in present else torch.zeros(len(each[axis]), len(counts), dtype=torch.float64)
            members[index][axis], means[index][axis] = member, len(values) * member / counts
    moves = [
        frame.by_layer(*pair) for pair in zip(means, members, strict=True)
    ]  # the mean of these is the sum over networks
    equal = {name: [1.0 / len(values)] * len(values) for name in frame.shares}
    return frame.repaired(frame.averaged(moves, equal), moves, equal)


def _zipped(correlation: np.ndarray, number: int) -> Tensor:
    """Return the membership [n, number], float64, of n channels in groups."""
    groups, near = [[k] for k in range(len(correlation))], correlation.copy()
    np.fill_diagonal(near, -np.inf)
    for _ in range(len(correlation) - number):
        one, other = sorted(np.unravel_index(int(near.argmax()), near.shape))
        groups[one] += groups[other]
        groups[other] = []
        together = AGAIN * np.minimum(near[one], near[other])
        near[one], near[:, one] = together, together
        near[other], near[:, other], near[one, one] = -np.inf, -np.inf, -np.inf
    remaining = [group for group in groups if group]
    membership = torch.zeros(len(correlation), len(remaining), dtype=torch.float64)
    for column, group in enumerate(remaining):
        membership[group, column] = 1.0
    return membership


@torch.no_grad()
def cca_merge(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """Merge by CCA Merge (Horoi et al. 2024, Sec. 4), average and REPAIR: W_B <- T' W_B T_before^-T.

    T = S_BB^-1/2 V U' S_AA^1/2, where U S V' is the SVD of S_AA^-1/2 S_AB S_BB^-1/2 of the pre-activations. A is
    `into`. A tenth of the mean variance is added to each variance. BatchNorms are first folded into the layers before
    them, because T mixes channels. Needs equal widths.
    """
    frame = prepared(networks, into, depth, probe)
    refuse_groups(frame, "CCA Merge")
    refuse_unequal_widths(frame, "CCA Merge")
    values, behind = by_axis(frame), norms(frame.structure, frame.bodies[into])
    frame.fold()
    hidden = [axis.index for axis in frame.structure.axes if not axis.fixed]
    turns = [{} if index == into else {axis: _cca(each[axis], values[into][axis]) for axis in hidden}
             for index, each in enumerate(values)]  # fmt: skip
    moves = [frame.by_layer(turn, {axis: torch.linalg.inv(matrix).T for axis, matrix in turn.items()}) for turn in turns]
    result = frame.averaged(moves, frame.shares)
    nodes = {layer.name: layer.node for layer in frame.structure.layers}
    ends = {nodes[behind[layer.name] or layer.name]: layer for layer in weighted(frame.structure)}
    targets = {}
    for steps in zip(*(walk(wiring, probe) for wiring in frame.wirings), strict=True):
        layer = ends.get(steps[0][0].name)
        if layer is None or frame.structure.axes[layer.outputs].fixed:
            continue
        rows = [in_channels(picked(env[node], None), turn.get(layer.outputs)).double()
                for (node, env), turn in zip(steps, turns, strict=True)]  # fmt: skip
        parts = list(zip(frame.shares[layer.name], rows, strict=True))
        targets[layer.name] = (sum(part * row.mean(dim=0) for part, row in parts if part),
                               sum(part * row.std(dim=0, correction=0) for part, row in parts if part))  # fmt: skip
    _set_statistics(result, targets, behind, probe)
    return result


def _cca(theirs: Tensor, goal: Tensor) -> Tensor:
    """Return T [n, n] from values [n, r] of both networks; the identity if one has no values."""
    y, x = (values.double() - values.double().mean(dim=1, keepdim=True) for values in (theirs, goal))
    if not (x.any() and y.any()):
        return torch.eye(len(y), dtype=torch.float64)
    syy, sxx, sxy = y @ y.T / y.shape[1], x @ x.T / x.shape[1], x @ y.T / x.shape[1]
    (_, inner), (outer, back) = _roots(syy), _roots(sxx)
    u, _, v = torch.linalg.svd(back @ sxy @ inner)
    return inner @ v.T @ u.T @ outer


def _roots(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return S^1/2 and S^-1/2 of the covariance plus CCA times its mean variance."""
    more = CCA * covariance.diagonal().mean()
    values, vectors = torch.linalg.eigh(covariance + more * torch.eye(len(covariance), dtype=covariance.dtype))
    return (vectors * values.sqrt()) @ vectors.T, (vectors / values.sqrt()) @ vectors.T


def _set_statistics(network: nn.Module, targets: Mapping[str, tuple[Tensor, Tensor]], behind: Mapping[str, str],
                    probe: Tensor) -> None:  # fmt: skip
    """Give every layer's outputs (after its BatchNorm, if any) the mean and standard deviation [channels]."""
    for name, (mean, std) in targets.items():
        if norm := behind[name]:
            network.get_parameter(f"{norm}.weight").copy_(std)
            network.get_parameter(f"{norm}.bias").copy_(mean)
    recompute_statistics(network, [probe])
    if plain := {name: target for name, target in targets.items() if not behind[name]}:
        rescale(network, probe, plain)


def by_axis(frame: Frame) -> list[dict[int, Tensor]]:
    """Return, for each network, the pre-activations [channels, values] on each axis."""
    values = []
    for wiring in frame.wirings:
        points = frame.structure.points
        seen = observe(wiring, frame.probe, features={node for nodes in points.values() for node in nodes}, positions=2048)
        values.append(
            {axis: torch.cat([features_of(seen, node) for node in nodes], dim=1) for axis, nodes in points.items()}
        )
    return values


def refuse_groups(frame: Frame, name: str) -> None:
    """Raise UserError if channels are in groups (GroupNorm). The message has the method's `name` and a layer."""
    for axis in frame.structure.axes:
        if axis.groups > 1:
            raise UserError(
                f"{name}: '{axis.slots[0].tensor}' has channels in groups (GroupNorm), which it does not support"
            )
