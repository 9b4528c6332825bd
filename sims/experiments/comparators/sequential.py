"""Neuron Interpolation (arXiv 2507.00037): HF-linear and KF-linear.

From the first layer to the last, the networks' neurons are grouped. The fused layer gets the weights that best
produce each group's mean from the fused network's current inputs.
"""

import copy
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn

from fedloom.fusion.graph.channels import Layer, Wiring, wire
from fedloom.fusion.refit.patches import patches, picked
from fedloom.sims.experiments.comparators.layers import (
    ROWS,
    Frame,
    in_channels,
    norms,
    prepared,
    products,
    refuse_unequal_widths,
    ridge,
    walk,
    weighted,
    with_ones,
    written,
)

LLOYD = 50  # most steps of k-means

# Maps the fused network's inputs [r, d] and the networks' outputs [r, n_i] (`into` first) to matrices [n_i, m]: each
# column is a mean over the neurons of all networks
Grouping = Callable[[Tensor, Sequence[Tensor]], list[Tensor]]


@torch.no_grad()
def hungarian(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """Merge by HF-linear: match each neuron of a network with one of `into`, or of the mean of the networks merged before.

    It minimises the sum of s_i ||X w_ij - z_i|| + s_j ||X w_ij - z_j||. Here w_ij = (s_i w_i + s_j w_j) / (s_i + s_j)
    and w = X^+ z. X are the fused network's own inputs, z outputs. All neurons have equal importance s. Needs equal
    widths.
    """
    frame = prepared(networks, into, depth, probe)
    refuse_unequal_widths(frame, "HF-linear")
    return _interpolated(frame, _hungarian)


@torch.no_grad()
def kmeans(networks: Sequence[nn.Module], into: int, depth: int, probe: Tensor) -> nn.Module:
    """Merge by KF-linear: k-means over all networks' neurons as vectors z of outputs, started at those of `into`.

    A new neuron is the mean of its group's w = X^+ z, where X are the fused network's own inputs. Works for any
    widths.
    """
    return _interpolated(prepared(networks, into, depth, probe), _kmeans)


def _interpolated(frame: Frame, grouping: Grouping) -> nn.Module:
    """Compute the fused network layer by layer.

    Outputs are taken after a layer's BatchNorm, which becomes neutral. At the end of a block they are the block's
    sum, minus the fused network's other branch. X^+ uses ridge regression. Groups are formed once for each axis, at
    its first layer.
    """
    result, share = copy.deepcopy(frame.bodies[frame.into]), max(1, ROWS // len(frame.probe))
    structure, wiring = frame.structure, wire(result, frame.probe[:1])
    layers = {layer.node: layer for layer in weighted(structure)}
    behind, nodes = norms(structure, result), {layer.name: layer.node for layer in structure.layers}
    ends = {name: nodes[norm or name] for name, norm in behind.items()}
    sums = _sums(structure, set(ends.values()))
    wanted = {*ends.values(), *(total for total, _ in sums.values())}
    seen = [{node.name: picked(env[node], share).clone() for node, env in walk(each, frame.probe) if node.name in wanted}
            for each in frame.wirings]  # fmt: skip
    groups: dict[int, list[Tensor]] = {}
    for node, env in walk(wiring, frame.probe):
        if (layer := layers.get(node.name)) is None:
            continue
        module, source, end = result.get_submodule(layer.name), node.all_input_nodes[0], ends[layer.name]
        x = with_ones(patches(module, env[source], share)[0])
        total, branch = sums.get(end, (end, ""))
        if layer.outputs not in groups:
            groups[layer.outputs] = _grouped(frame, layer, x, [each[total] for each in seen], grouping)
        other = next((value for one, value in env.items() if one.name == branch), None)
        at = end if other is None else total
        parts = [in_channels(each[at], matrix) for each, matrix in zip(seen, groups[layer.outputs], strict=True)]
        goal = torch.stack(parts).sum(dim=0) - (0.0 if other is None else picked(other, share))
        norm = behind[layer.name]
        written(module, result.get_submodule(norm) if norm else None, ridge(products(x, x), products(x, goal)))
        env[node] = module(env[source])
    return result


def _sums(structure: Wiring, ends: set[str]) -> dict[str, tuple[str, str]]:
    """Return, for each operand of a sum that ends a block, the sum and the other operand."""
    totals, operands = {unit.sum for unit in structure.units}, {}
    for node in structure.graph.graph.nodes:
        if node.name in totals and len(node.all_input_nodes) == 2:
            one, other = (operand.name for operand in node.all_input_nodes)
            operands |= {end: (node.name, rest) for end, rest in ((one, other), (other, one)) if end in ends}
    return operands


def _grouped(frame: Frame, layer: Layer, x: Tensor, outputs: Sequence[Tensor], grouping: Grouping) -> list[Tensor]:
    """Return the groups of each network, [n, m]; those of the output layer are the classes.

    A network whose outputs are all zero here does not join the groups.
    """
    if frame.structure.axes[layer.outputs].fixed:
        return [torch.eye(each.shape[1]) / len(outputs) for each in outputs]
    present = [index for index, each in enumerate(outputs) if each.any()] or [frame.into]
    present.sort(key=lambda index: index != frame.into)
    groups = dict(zip(present, grouping(x, [outputs[index] for index in present]), strict=True))
    width = next(iter(groups.values())).shape[1]
    return [groups.get(index, torch.zeros(each.shape[1], width)) for index, each in enumerate(outputs)]


def _hungarian(x: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    gram = products(x, x)
    images = [x @ ridge(gram, products(x, each)).to(x) for each in outputs]
    mean, image = outputs[0], images[0]
    matrices = [torch.eye(outputs[0].shape[1]).to(x)]
    for done, (z, p) in enumerate(zip(outputs[1:], images[1:], strict=True), 1):
        old, new = done / (done + 1), 1 / (done + 1)
        cost = old * _distances(old * image - mean, new * p) + new * _distances(old * image, new * p - z)
        rows, columns = linear_sum_assignment(cost.numpy())  # row: in the mean so far; column: in this network
        matrices.append(torch.zeros_like(matrices[0]))
        matrices[-1][columns, rows] = 1.0
        mean, image = old * mean + new * z @ matrices[-1], old * image + new * p @ matrices[-1]
    return [matrix / len(outputs) for matrix in matrices]


def _distances(one: Tensor, other: Tensor) -> Tensor:
    """Return ||one_i + other_j|| [n, m] for the columns of [r, n] and [r, m]."""
    squares = products(one, one).diagonal()[:, None] + products(other, other).diagonal() + 2.0 * products(one, other)
    return squares.clamp(min=0.0).sqrt()


def _kmeans(x: Tensor, outputs: Sequence[Tensor]) -> list[Tensor]:
    return clusters(outputs, [each.new_ones(each.shape[1]) for each in outputs])


def clusters(outputs: Sequence[Tensor], importance: Sequence[Tensor]) -> list[Tensor]:
    """Group the neurons of several networks by weighted k-means, started at the neurons of the first.

    Args:
        outputs: The outputs [r, n_i] of each network.
        importance: The weights [n_i] of its neurons.

    Returns:
        For each network a matrix [n_i, n_0]. Each column is the weighted mean over a group's neurons in all networks.
    """
    points, centres, weights = torch.cat([each.T for each in outputs]), outputs[0].T, torch.cat([*importance])[:, None]
    labels = torch.cdist(points, centres).argmin(dim=1)
    for _ in range(LLOYD):
        members = F.one_hot(labels, len(centres)).to(points) * weights
        counts = members.sum(dim=0)
        means = members.T @ points / _at_least(counts)[:, None]
        centres = torch.where(counts[:, None] > 0, means, centres)
        old, labels = labels, torch.cdist(points, centres).argmin(dim=1)
        if torch.equal(old, labels):
            break
    members = F.one_hot(labels, len(centres)).to(points) * weights
    return list((members / _at_least(members.sum(dim=0))).split([each.shape[1] for each in outputs]))


def _at_least(counts: Tensor) -> Tensor:
    """Return the weights of groups, with 1 for an empty group."""
    return torch.where(counts > 0, counts, 1.0)
