"""Derive the wiring of a network: which entries of its state carry the same channels.

An axis is a set of channels. If all its slots are permuted in the same way, the network's outputs stay unchanged.
Labels pass through the operations of the network (fusion.graph.walk) and identify these entries.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from fedloom.fusion.graph import rules_entries, rules_layers, rules_moves
from fedloom.fusion.graph.axes import Channels
from fedloom.fusion.graph.grouped import dense, in_groups
from fedloom.fusion.graph.labels import varied
from fedloom.fusion.graph.tracing import WiringError, place
from fedloom.fusion.graph.units import Flow, Layer, Unit, find_units
from fedloom.fusion.graph.walk import Rules, Walk

__all__ = ["Axis", "Layer", "Layout", "Slot", "Unit", "Wiring", "WiringError", "permuted", "wire"]

RULES = Rules(
    {**rules_layers.MODULES, **rules_moves.MODULES, nn.Softmax: rules_entries.softmax, nn.LogSoftmax: rules_entries.softmax},
    {**rules_entries.FUNCTIONS, **rules_moves.FUNCTIONS, **rules_layers.FUNCTIONS},
)


@dataclass(frozen=True, eq=False)
class Slot:
    """Where the channels of an axis are in a tensor of the state dict: entries `entries` [size, r] of dimension `dim`.

    `reads`: the tensor's layer reads these channels there. `blocks`: the number of groups of a grouped convolution;
    the entries are those of its dense weight (fusion.graph.grouped).
    """

    tensor: str
    dim: int
    entries: Tensor
    reads: bool = False
    blocks: int = 1

    @property
    def repeat(self) -> int:
        """The number of entries of each channel."""
        return self.entries.shape[1]


@dataclass(frozen=True, eq=False)
class Axis:
    """A set of `size` channels, which may be permuted, and the slots of tensors that carry them.

    Attributes:
        fixed: Whether the axis never moves: input or output of the network, or channels that share a tensor with
            these.
        groups: The number of groups.
        parent: The index of the axis whose channels are the groups (GroupNorm's, a grouped convolution's, attention
            heads). Channels move within their group, and groups move as the parent's channels.
        members: The parent's channel for each channel, [size].
    """

    index: int
    size: int
    slots: tuple[Slot, ...]
    fixed: bool
    groups: int = 1
    parent: int | None = None
    members: Tensor | None = None

    @cached_property
    def places(self) -> Tensor:
        """The channels of each group, int64 [groups, size / groups]."""
        order = torch.arange(self.size) if self.members is None else self.members.argsort(stable=True)
        return order.view(self.groups, -1)

    def permutation(self, generator: torch.Generator, groups: Tensor | None = None) -> Tensor:
        """Return a random allowed permutation, int64 [size]; the identity for a fixed axis.

        `groups`: the parent's permutation, [groups].
        """
        if self.fixed:
            return torch.arange(self.size)
        members = self.places if groups is None else self.places[groups]
        mixed = [line[torch.randperm(len(line), generator=generator)] for line in members]
        result = torch.empty(self.size, dtype=torch.int64)
        result[self.places.flatten()] = torch.cat(mixed)
        return result


@dataclass(frozen=True, eq=False)
class Layout:
    """Where a node's tensor carries channels: `dims`, flattened, have entries `entries` [size, r] by axis index.

    `others`: dimensions of other channels, whose order can differ in another network.
    """

    dims: tuple[int, ...]
    entries: Mapping[int, Tensor]
    others: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Wiring:
    """How a network is wired: the axes of its channels, its layers, and its units.

    Attributes:
        graph: Its trace, which shares the network's modules and parameters.
        layouts: The layout of each node whose tensor carries channels.
        node_axes: The axis of dimension 1 of each fx node that has one whole axis there, in its order.
        points: The pre-activations of each axis that is not fixed: nodes that are outputs of a layer or a sum, and
            have a user that is neither norm nor sum. Users of a point can overwrite it (in-place ReLU).
        still: The nodes that are the same for all inputs.
    """

    axes: tuple[Axis, ...]
    layers: tuple[Layer, ...]
    units: tuple[Unit, ...]
    graph: fx.GraphModule
    node_axes: dict[str, int]
    points: dict[int, tuple[str, ...]]
    layouts: dict[str, Layout]
    still: frozenset[str] = frozenset()

    def permutations(self, generator: torch.Generator) -> dict[int, Tensor]:
        """Return a random permutation [size] of every axis that is not fixed, groups together with their members."""
        drawn: dict[int, Tensor] = {}

        def draw(axis: Axis) -> Tensor:
            if axis.index not in drawn:
                groups = None if axis.parent is None else draw(self.axes[axis.parent])
                drawn[axis.index] = axis.permutation(generator, groups)
            return drawn[axis.index]

        return {axis.index: draw(axis) for axis in self.axes if not axis.fixed}

    def permuted(self, state: Mapping[str, Tensor], permutations: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """Return the state with channel k of each axis replaced, everywhere, by channel permutations[axis][k].

        Other tensors are shared.
        """
        slots = [(slot, order) for index, order in permutations.items() for slot in self.axes[index].slots]
        return _permuted(state, slots)


def permuted(state: Mapping[str, Tensor], axis: Axis, permutation: Tensor) -> dict[str, Tensor]:
    """Return the state as `Wiring.permuted` does, for one axis. An axis of groups needs its members moved with it."""
    return _permuted(state, [(slot, permutation) for slot in axis.slots])


def _permuted(state: Mapping[str, Tensor], slots: list[tuple[Slot, Tensor]]) -> dict[str, Tensor]:
    result = dict(state)
    blocks = {slot.tensor: slot.blocks for slot, _ in slots if slot.blocks > 1}
    for name, groups in blocks.items():
        result[name] = dense(result[name], groups)
    for slot, permutation in slots:
        order = torch.arange(result[slot.tensor].shape[slot.dim])
        order[slot.entries.flatten()] = slot.entries[permutation.cpu()].flatten()
        tensor = result[slot.tensor]
        result[slot.tensor] = tensor.index_select(slot.dim, order.to(tensor.device))
    for name, groups in blocks.items():
        result[name] = in_groups(result[name], groups)
    return result


def wire(network: nn.Module, example: Tensor) -> Wiring:
    """Return the wiring of `network` for inputs like `example`, such as [n, c, h, w] or [n, d].

    The network runs once, on one sample in eval mode. Its flags and buffers stay unchanged. Raise WiringError if an
    operation mixes channels in an unsupported way, a parameter is on no axis, or it does not
    have one input and one output. The message has the node, module and source line, as far as known.
    """
    if any(isinstance(module, nn.RNNBase) for module in network.modules()):
        raise WiringError("recurrent networks such as lstm cannot be fused, since several gates at every step share a "
                          "channel; use transformer, cnn1d or mlp, or a strategy without fusion such as fedavg")  # fmt: skip
    walk = Walk(network, example, RULES)
    walk.run()
    _check_covered(network, walk)
    _pin_unlearned(network, walk)
    inputs = next(iter(walk.values.values()))
    wanted = [inputs.factors[0].flatten(), *walk.slots.values()]
    wanted += [atoms for layer in walk.layers.values() for atoms in (layer.inputs, layer.outputs)]
    everything = torch.cat(wanted)
    channels = Channels(walk.atoms, everything[everything >= 0].numpy())
    _check_softmax(walk)
    axes = _axes(walk, channels)
    return _finished(walk, channels, axes)


def _axes(walk: Walk, channels: Channels) -> tuple[Axis, ...]:
    slots: dict[int, list[Slot]] = {}
    for (tensor, dim), atoms in walk.slots.items():
        reads, blocks = (tensor, dim) in walk.reads, walk.blocks.get((tensor, dim), 1)
        for index, entries in channels.split(atoms).items():
            slots.setdefault(index, []).extend(Slot(name, dim, entries, reads, blocks) for name in walk.names[tensor])
    axes = []
    for index, drawn in enumerate(channels.axes):
        members = None if drawn.members is None else torch.from_numpy(drawn.members)
        groups = 1 if drawn.parent is None else len(channels.axes[drawn.parent].channels)
        size = len(drawn.channels)
        axes.append(Axis(index, size, tuple(slots.get(index, ())), drawn.fixed, groups, drawn.parent, members))
    return tuple(axes)


def _finished(walk: Walk, channels: Channels, axes: tuple[Axis, ...]) -> Wiring:
    layouts = {node: layout for node in walk.values if (layout := _layout(walk, channels, node)) is not None}
    layers = {node: _layer(walk, channels, node) for node in walk.layers}
    first = {node: next(iter(layout.entries)) for node, layout in layouts.items()}
    fixed = frozenset(axis.index for axis in axes if axis.fixed)
    live = {node: layer for node, layer in layers.items() if node in walk.sources}
    flow = Flow(walk.sources, live, frozenset(walk.sums), first, fixed)
    points = {axis.index: _points(walk, axis, layouts) for axis in axes if not axis.fixed}
    node_axes = {node.name: first[node] for node in layouts if _is_whole(layouts[node], axes[first[node]], walk.shape(node))}
    still = frozenset(node.name for node in walk.values if node not in walk.sources)
    by_name = {node.name: layout for node, layout in layouts.items()}
    return Wiring(axes, tuple(layers.values()), find_units(flow), walk.trace.graph, node_axes, points, by_name, still)


def _layer(walk: Walk, channels: Channels, node: Node) -> Layer:
    layer = walk.layers[node]

    def axis(atoms: Tensor) -> int:
        """Return the first axis that the atoms are on."""
        known = atoms[atoms >= 0]
        return int(channels.axis_of[channels.roots[int(known[0])]]) if len(known) else 0

    weight = "" if layer.weight is None else walk.names[id(layer.weight)][0]
    shape = tuple(walk.shape(node)[1:])
    return Layer(layer.name, layer.kind, node.name, axis(layer.inputs), axis(layer.outputs), shape, weight)


def _layout(walk: Walk, channels: Channels, node: Node) -> Layout | None:
    """Return the layout of the latest factor that is not pinned."""
    if node not in walk.values:
        return None
    factors = list(walk.values[node].factors)
    factors.sort(key=walk.free)  # stable
    for factor in reversed(factors):
        dims = tuple(sorted(varied(factor))) or ((1,) if factor.ndim > 1 and walk.shape(node)[1] == 1 else ())
        entries = channels.split(factor.flatten())
        if entries and dims and 0 not in dims:
            others = frozenset().union(*(varied(each) for each in factors if each is not factor and walk.free(each)))
            return Layout(dims, entries, tuple(sorted(others - {*dims})))
    return None


def _is_whole(layout: Layout, axis: Axis, shape: torch.Size) -> bool:
    entries = layout.entries[axis.index]
    return layout.dims == (1,) and shape[1] == axis.size and torch.equal(entries, torch.arange(axis.size)[:, None])


def _points(walk: Walk, axis: Axis, layouts: Mapping[Node, Layout]) -> tuple[str, ...]:
    """Return the nodes where the axis is observed, preferably alone or written."""

    def is_norm(node: Node) -> bool:
        return node in walk.layers and walk.layers[node].kind == "norm"

    def ends_here(node: Node) -> bool:
        return any(user not in walk.sums and not is_norm(user) for user in node.users)

    linear = [node for node in layouts if node in walk.layers or node in walk.sums]
    observed = [node for node in linear if axis.index in layouts[node].entries and ends_here(node)]
    alone = [node for node in observed if len(layouts[node].entries) == 1 or not is_norm(node)]
    return tuple(node.name for node in alone or observed)


def _check_covered(network: nn.Module, walk: Walk) -> None:
    known = {tensor for tensor, _ in walk.slots}
    for name, parameter in network.named_parameters():
        if parameter.numel() > 1 and id(parameter) not in known:
            raise WiringError(
                f"parameter '{name}' {list(parameter.shape)} lies on no axis: unused, or not channel by "
                "channel; every parameter must affect the output; try to remove parts that are for training only"
            )


def _pin_unlearned(network: nn.Module, walk: Walk) -> None:
    """Pin channels that no parameter writes, only a buffer of numbers (coordinates)."""
    learned = {id(parameter) for parameter in network.parameters()}
    moving = [atoms for key, atoms in walk.slots.items() if key[0] in learned and key not in walk.reads]
    written = torch.zeros(len(walk.atoms.root), dtype=torch.bool)
    for atoms in moving:
        written[walk.atoms.find(atoms)] = True
    for (tensor, _), atoms in walk.slots.items():
        if tensor not in learned:
            walk.atoms.pin(atoms[~written[walk.atoms.find(atoms)]])


def _check_softmax(walk: Walk) -> None:
    for node, factor in walk.softmax:
        if walk.free(factor):
            raise WiringError(
                f"{place(node)}: softmax over hidden channels cannot be wired; use it over positions or at "
                "the end, or try another activation"
            )
