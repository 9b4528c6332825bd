"""Pool the channels of several networks of one structure, and build the network of the selected ones.

The first network gives the basis: its widths count, and where nothing can be selected its own channels are used.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.moves import carried
from fedloom.fusion.cla_ot.plans import Body
from fedloom.fusion.graph.channels import Axis, Wiring, wire
from fedloom.fusion.graph.resize import with_state
from fedloom.fusion.refit.activations import activation_behind
from fedloom.fusion.refit.selection import (
    Choice,
    Pool,
    best_groups,
    choice_of,
    choose,
    importance,
    keeping,
    pooled,
    side_by_side,
)
from fedloom.fusion.refit.sensitivity import sensitivities
from fedloom.fusion.state import State

FIXED = "its code or its heads fix numbers of channels; fuse networks of equal widths, with width=1"


@dataclass(frozen=True, eq=False)
class Part:
    """How one network's channels of an axis enter the fused network, [n, m] each: for writers, and for readers."""

    outgoing: Tensor
    incoming: Tensor


def chosen_channels(
    bodies: Sequence[Body], weights: Sequence[float], width: float, probe: Tensor, classes: bool = True
) -> dict[int, Choice]:
    """Select channels from all networks, for each axis that can move.

    Args:
        bodies: The networks, with equal layers.
        weights: Their weights, with sum 1.
        width: The number of selected channels, relative to the first network.
        probe: Images [n, c, h, w].
        classes: Whether the networks return logits.

    Returns:
        The Choice for each axis, by its index.
    """
    pools = _Pools(bodies, weights, probe, classes)
    choices: dict[int, Choice] = {}
    axes = bodies[0].wiring.axes
    for axis in axes:
        if axis.fixed or (axis.parent is not None and not axes[axis.parent].fixed):
            continue
        members = [member for member in axes if member.parent == axis.index]
        count = max(1, min(round(width * axis.size), sum(pools.sizes(axis))))
        if members:
            choices |= _chosen_groups(pools, axis, members, count)
        else:
            pool = pools.of(axis) if axis.parent is None else None
            choices[axis.index] = keeping(pools.sizes(axis)) if pool is None else choose(pool, count)
    return choices


def _chosen_groups(pools: "_Pools", axis: Axis, members: Sequence[Axis], count: int) -> dict[int, Choice]:
    """Select whole groups, the same on all axes of their members; the first network's if groups are not comparable."""
    candidates = [pools.of(member) for member in members]
    if any(pool is None or pool.groups.shape[0] != sum(pools.sizes(axis)) for pool in candidates):
        return {each.index: keeping(pools.sizes(each)) for each in (axis, *_below(pools, axis))}
    several = [pool for pool in candidates if pool is not None]
    blocks = best_groups(side_by_side(several), count)
    chosen = {member.index: choice_of(pool, blocks) for member, pool in zip(members, several, strict=True)}
    return {axis.index: keeping(pools.sizes(axis), blocks), **chosen}


def _below(pools: "_Pools", axis: Axis) -> list[Axis]:
    members = [member for member in pools.bodies[0].wiring.axes if member.parent == axis.index]
    return [descendant for member in members for descendant in (member, *_below(pools, member))]


class _Pools:
    """Builds the pool of an axis."""

    def __init__(self, bodies: Sequence[Body], weights: Sequence[float], probe: Tensor, classes: bool) -> None:
        self.bodies, self.weights, self.classes = bodies, weights, classes
        wiring = bodies[0].wiring
        self.behind = {node: activation_behind(wiring.graph, node) for nodes in wiring.points.values() for node in nodes}
        self.sensitivity = [self._sensitivity(body, probe) for body in bodies]

    def _sensitivity(self, body: Body, probe: Tensor) -> dict[str, Tensor]:
        layouts = body.wiring.layouts
        return sensitivities(body.wiring.graph, probe, {name: layouts[name].dims for name, _ in self.behind.values()},
                             self.classes)  # fmt: skip

    def sizes(self, axis: Axis) -> tuple[int, ...]:
        """Return the number of channels of each network."""
        return tuple(body.wiring.axes[axis.index].size for body in self.bodies)

    def of(self, axis: Axis) -> Pool | None:
        """Return the pool; None if the axis is not observed, or its groups differ in size between networks."""
        own = [body.wiring.axes[axis.index] for body in self.bodies]
        if len({each.places.shape[1] for each in own if each.parent is not None}) > 1:
            return None
        sizes = self.sizes(axis)
        starts = [sum(sizes[:index]) for index in range(len(sizes))]
        single = axis.parent is None
        groups = [torch.arange(each.size)[:, None] if single else each.places for each in own]
        nodes = [node for node in self.bodies[0].wiring.points.get(axis.index, ())
                 if any(node in body.values for body in self.bodies)]  # fmt: skip
        all_groups = torch.cat([group + start for group, start in zip(groups, starts, strict=True)])
        return pooled((self._point(axis, node) for node in nodes), sizes, all_groups) if nodes else None

    def _point(self, axis: Axis, node: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return values [N, n] after the activation (mean square 1), importance [N], and the values before it."""
        name, activation = self.behind[node]
        values_by_network = [_values(body, node, axis.index) for body in self.bodies]
        some = next(part for part in values_by_network if part is not None)
        counts = {part.shape[1] for part in values_by_network if part is not None}
        if len(counts) > 1:
            numbers = " and ".join(map(str, sorted(counts)))
            layers = self.bodies[0].wiring.layers
            layer = next((layer.name for layer in layers if layer.outputs == axis.index and layer.kind != "norm"), node)
            raise UserError(f"layer '{layer}': {numbers} values of a channel: the networks work at different resolutions")
        values, weights, before = [], [], []
        for index, (part, size) in enumerate(zip(values_by_network, self.sizes(axis), strict=True)):
            rows = some.new_zeros(size, some.shape[1]) if part is None else part
            before.append(rows.cpu())
            values.append(activation(rows).cpu())
            hangs = self._hangs(index, name, axis.index, size)
            weights.append(importance(values[-1], hangs) * self.weights[index] ** 0.5)
        all_values = torch.cat(values)
        scale = float(all_values.double().square().mean().sqrt()) or 1.0
        return all_values.div_(scale), torch.cat(weights) * scale, torch.cat(before).div_(scale)

    def _hangs(self, index: int, node: str, axis: int, size: int) -> Tensor:
        sums, layout = self.sensitivity[index].get(node), self.bodies[index].wiring.layouts[node]
        if sums is None or axis not in layout.entries:
            return torch.zeros(size, dtype=torch.float64)
        return sums[layout.entries[axis]].sum(dim=1)


def _values(body: Body, node: str, axis: int) -> Tensor | None:
    """Return values of the channels of an axis at a node [size, n]; the entries of a channel are concatenated."""
    if node not in body.values:
        return None
    entries = body.wiring.layouts[node].entries.get(axis)
    if entries is None:
        raise UserError(f"the networks have different designs: their channels are tied in different ways at '{node}'")
    return body.values[node][entries].flatten(1)


def parts_of(choices: Mapping[int, Choice], index: int) -> dict[int, Part]:
    """Return how the channels of network `index` enter the fused network, by axis."""
    return {axis: Part(*choice.rows(index)) for axis, choice in choices.items()}


def goal_of(network: nn.Module, body: Body, choices: Mapping[int, Choice], probe: Tensor) -> Wiring:
    """Return the wiring of the fused network.

    Args:
        network: The network that sets the layers.
        body: The first network, with these layers.
        choices: The selected channels, by axis index.
        probe: Images [n, c, h, w].

    Raises:
        UserError: A network with the selected widths does not run.
    """
    wiring = body.wiring
    if all(choice.keeps.shape[1] == wiring.axes[axis].size for axis, choice in choices.items()):
        return wiring
    sizes = {name: list(tensor.shape) for name, tensor in body.network.state_dict().items()}
    for axis, choice in choices.items():
        for slot in wiring.axes[axis].slots:
            more = (choice.keeps.shape[1] - len(slot.entries)) * slot.repeat
            sizes[slot.tensor][slot.dim] += more if slot.dim != 1 else more // slot.blocks
    state = body.network.state_dict()
    ones = {name: state[name].new_ones(size) for name, size in sizes.items()}
    goal = _run(lambda: with_state(network, ones, like=body.network), probe)
    for axis, choice in choices.items():
        if axis >= len(goal.axes) or goal.axes[axis].size != choice.keeps.shape[1]:
            widths = f"{choice.keeps.shape[1]} channels written by {_writer(wiring, axis)}"
            raise UserError(f"the fused network cannot have {widths} of {wiring.axes[axis].size}: {FIXED}")
    return goal


def _run(make: Callable[[], nn.Module], probe: Tensor) -> Wiring:
    try:
        return wire(make(), probe[:1])
    except UserError as error:
        raise UserError(f"the fused network does not run ({error}): {FIXED}") from None


def _writer(wiring: Wiring, axis: int) -> str:
    return next((f"'{layer.name}'" for layer in wiring.layers if layer.outputs == axis and layer.kind != "norm"), "no layer")


def selected_state(bodies: Sequence[Body], choices: Mapping[int, Choice], weights: Sequence[float], goal: Wiring) -> State:
    """Return the fused network's tensors before the refit.

    A selected channel is written by its own network's weights. Readers have the weights of all networks, for channels
    estimated from the selected ones. Tensors that write no selected channel (the last layer) are a weighted mean.
    """
    written = {slot.tensor for axis in choices for slot in bodies[0].wiring.axes[axis].slots if not slot.reads}
    total: State = {}
    for index, (body, weight) in enumerate(zip(bodies, weights, strict=True)):
        for name, tensor in carried(_whole(body), body.wiring, goal, parts_of(choices, index)):
            if not tensor.is_floating_point():
                total.setdefault(name, tensor)
                continue
            part = tensor if name in written else tensor * weight
            total[name] = total[name].add_(part) if name in total else part
    return total


def _whole(body: Body) -> State:
    """Return a network's tensors, with neutral ones for norms that it lacks."""
    state, wanted = body.network.state_dict(), body.wiring.graph.state_dict()
    neutral = partial(torch.full_like, memory_format=torch.preserve_format)
    return {name: state.get(name, neutral(like, float(name.endswith("weight")))) for name, like in wanted.items()}
