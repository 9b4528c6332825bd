"""Compute the moves into another network's basis, from what two networks of one structure do, or from their weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.moves import Moves, across, apply, moved_along, slots_of
from fedloom.fusion.cla_ot.reference import sequential_moves
from fedloom.fusion.cla_ot.transport import (
    GROUNDS,
    Blocks,
    Plan,
    TransportSettings,
    between_groups,
    neutral_plan,
    same_plan,
    solve,
)
from fedloom.fusion.graph.channels import Axis, Layer, Wiring
from fedloom.fusion.graph.units import WEIGHTED

OUTPUTS = {"transposed": 1, "embedding": 1}  # the output dimension of a layer's weight, by kind; else 0
Pairs = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Body:
    """A network with the result's layers, its wiring, and its nodes' values [channels, n] on the probe set."""

    network: nn.Module
    wiring: Wiring
    values: Mapping[str, Tensor]


def axis_moves(structure: Wiring, body: Body, into: Body, settings: TransportSettings, basis: str) -> Moves:
    """Return how `body`'s channels move to `into`'s: by a plan for each hidden axis, from all pre-activations on it.

    With `basis` "weights", plans come from the first layer that writes the axis. With "same", every channel stays in
    place. The inside of a block that one network lacks has nothing to compare. Groups are matched by the costs of
    their members on all axes. Raise UserError if pre-activations have different resolutions, or a plan cannot be
    computed. The message has the layer.
    """
    slots_of(body.wiring, into.wiring)  # checks that the structure is the same
    plans = _Planner(structure, body, into, settings, basis).run()
    return _of_axes(structure, body.wiring, into.wiring, plans)


def layer_moves(structure: Wiring, body: Body, into: Body, settings: TransportSettings, basis: str) -> Moves:
    """Return how `body`'s channels move to `into`'s: by a plan for each layer, also the last, from its own outputs.

    This follows the public code (fusion.cla_ot.reference). Raise UserError for layers or a `basis` that it lacks.
    """
    if basis == "weights":
        raise UserError("sequential plans are made from activations; use basis='activations', or sequential=False")
    if any(layer.kind == "depthwise" for layer in structure.layers):
        raise UserError("sequential plans do not support depthwise convolutions; use sequential=False")
    for layer in structure.layers:
        if layer.kind not in ("conv", "linear", "norm") or layer.weight not in ("", f"{layer.name}.weight"):
            raise UserError(f"layer '{layer.name}': sequential plans support convolutions and linear layers, not "
                            f"'{layer.kind}'; use sequential=False")  # fmt: skip
    plans = {}
    for layer in structure.layers:
        if layer.kind != "norm":
            own, other = (_weight(one, layer).flatten(1).norm(dim=1) for one in (body, into))
            with _named(layer.name):
                cost = GROUNDS[settings.ground]([(body.values[layer.node], into.values[layer.node])])
                plans[layer.name] = solve(cost, settings, importance=(own, other))
    return sequential_moves(structure, plans)


@contextmanager
def _named(layer: str) -> Iterator[None]:
    """Add the layer's name to errors."""
    try:
        yield
    except UserError as error:
        raise UserError(f"layer '{layer}': {error}") from error


class _Planner:
    """Computes the plans of all axes, those of groups together with their members."""

    def __init__(self, structure: Wiring, body: Body, into: Body, settings: TransportSettings, basis: str) -> None:
        self.structure, self.body, self.into, self.settings, self.basis = structure, body, into, settings, basis
        self.members: dict[int, list[Axis]] = {}
        for axis in structure.axes:
            if axis.parent is not None and not axis.fixed:
                self.members.setdefault(axis.parent, []).append(axis)
        self.writers = _writers(structure)
        self.blocks: dict[int, Blocks] = {}
        self.plans: dict[int, Plan] = {}

    def run(self) -> dict[int, Plan]:
        order = {layer.node: index for index, layer in enumerate(self.structure.layers)}
        axes = [axis for axis in self.structure.axes if not axis.fixed]
        first = {axis.index: order[self.writers[axis.index].node] for axis in axes if axis.index in self.writers}
        for axis in sorted(axes, key=lambda axis: (first.get(axis.index, len(order)), axis.index)):
            root = axis
            while root.parent is not None and not self.structure.axes[root.parent].fixed:
                root = self.structure.axes[root.parent]
            if root.index not in self.plans:
                self._plan(root)
        return self.plans

    def _plan(self, root: Axis) -> None:
        if self.basis == "same":
            self._stay(root)
            return
        with _named(self._name(root)):
            table = self._table(root)
            if root.parent is not None:  # its groups stay in place
                self.plans[root.index] = self._blocks(root, table).plan(np.eye(root.groups))
            elif root.index in self.members and table is not None:
                joint = torch.from_numpy(between_groups(table))
                self.plans[root.index] = Plan(joint, float((joint.numpy() * table).sum()), self.settings.normalisation)
            elif table is None:
                self.plans[root.index] = neutral_plan(*self._sizes(root), self.settings.normalisation)
            else:
                self.plans[root.index] = solve(table, self.settings, importance=self._importance(root))
            self._descend(root)

    def _stay(self, axis: Axis) -> None:
        """Map the channels of an axis and of its members to the same numbers."""
        self.plans[axis.index] = same_plan(*self._sizes(axis), self.settings.normalisation)
        for member in self.members.get(axis.index, ()):
            self._stay(member)

    def _descend(self, axis: Axis) -> None:
        """Compute the plans of an axis's members from its own plan."""
        for member in self.members.get(axis.index, ()):
            self.plans[member.index] = self.blocks[member.index].plan(self.plans[axis.index].joint.numpy())
            self._descend(member)

    def _table(self, axis: Axis) -> np.ndarray | None:
        """Return costs [n, m] of the channels of an axis and its members; None if channels are indistinguishable."""
        pairs = self._pairs(axis)
        table = GROUNDS[self._ground(axis)](pairs) if pairs else None
        for member in self.members.get(axis.index, ()):
            costs = self._blocks(member, self._table(member)).table
            table = costs if table is None else table + costs
        return table

    def _ground(self, axis: Axis) -> str:
        """Return the cost function: "squared" for values that are the same for all inputs (an MLP of coordinates)."""
        nodes = self.structure.points[axis.index]
        still = self.basis == "activations" and nodes and self.structure.still.issuperset(nodes)
        return "squared" if still else self.settings.ground

    def _blocks(self, axis: Axis, table: np.ndarray | None) -> Blocks:
        n, m = self._sizes(axis)
        if table is None:
            table = 1.0 - np.eye(n) if n == m else np.zeros((n, m))
        own, other = (one.wiring.axes[axis.index].places.numpy() for one in (self.body, self.into))
        self.blocks[axis.index] = Blocks(table, (own, other), self.settings, self._importance(axis))
        return self.blocks[axis.index]

    def _sizes(self, axis: Axis) -> tuple[int, int]:
        return self.body.wiring.axes[axis.index].size, self.into.wiring.axes[axis.index].size

    def _name(self, axis: Axis) -> str:
        """Return the layer that writes an axis, or else the first tensor on it or its members."""
        members = self.members.get(axis.index, ())
        if axis.index in self.writers:
            return self.writers[axis.index].name
        return axis.slots[0].tensor if axis.slots else next(self._name(member) for member in members)

    def _pairs(self, axis: Axis) -> Pairs:
        if self.basis == "weights":
            return self._rows(axis)
        seen = self.body.values.keys() & self.into.values.keys()
        nodes = [node for node in self.structure.points[axis.index] if node in seen]
        pairs = [(_values(self.body, node, axis.index), _values(self.into, node, axis.index)) for node in nodes]
        for one, other in pairs:
            if one.shape[1] != other.shape[1]:
                raise UserError(f"{one.shape[1]} values of a channel here, {other.shape[1]} there: the networks work at "
                                "different resolutions")  # fmt: skip
        return pairs

    def _importance(self, axis: Axis) -> tuple[Tensor, Tensor] | None:
        """Return the norms of each channel's incoming weights, [n] and [m]."""
        if axis.index not in self.writers:
            return None
        rows = (_written(one, self.writers[axis.index], axis.index)[0] for one in (self.body, self.into))
        one, other = (row.norm(dim=1) for row in rows)
        return one, other

    def _rows(self, axis: Axis) -> Pairs:
        """Return both networks' weights as vectors of the channels that they write, with the read side in one basis.

        The list is empty for zero weights. Within a family of groups, both sides are still unknown: then the vectors
        are sorted.
        """
        if axis.index not in self.writers:
            return []
        layer = self.writers[axis.index]
        (own, dim), (other, _) = (_written(one, layer, axis.index) for one in (self.body, self.into))
        if not own.any() or not other.any():
            return []
        slots = [pair for pair in slots_of(self.body.wiring, self.into.wiring)[layer.weight] if pair[1].reads]
        if any(not self.structure.axes[index].fixed and index not in self.plans for index, _, _ in slots):
            return [(own.sort(dim=1).values, other.sort(dim=1).values)]
        if slots and any(index in self.plans for index, _, _ in slots):
            weight = _weight(self.body, layer)
            if len(slots) == 1:
                weight = apply(weight, self.plans[slots[0][0]].incoming, 1 - dim, layer.weight)
            else:
                size = _weight(self.into, layer).shape[1 - dim]
                weight = moved_along(weight, 1 - dim, slots, self.plans, size, layer.weight)
            own = _rows_of(weight, dim, self.body.wiring, layer, axis.index)
        return [(own, other)]


def _values(body: Body, node: str, axis: int) -> Tensor:
    """Return a node's values on the channels of an axis, [size, values]."""
    values, entries = body.values[node], body.wiring.layouts[node].entries[axis]
    if len(entries) == len(values) and torch.equal(entries.flatten(), torch.arange(len(values))):
        return values
    return values[entries.flatten().to(values.device)].view(len(entries), -1)


def _writers(structure: Wiring) -> dict[int, Layer]:
    """Return the first layer that writes each axis."""
    first: dict[int, Layer] = {}
    layers = {layer.weight: layer for layer in reversed(structure.layers) if layer.kind in WEIGHTED}
    order = {layer.node: index for index, layer in enumerate(structure.layers)}
    for axis in structure.axes:
        named = [layers[slot.tensor] for slot in axis.slots
                 if slot.tensor in layers and slot.dim == OUTPUTS.get(layers[slot.tensor].kind, 0)]  # fmt: skip
        if named and not axis.fixed:
            first[axis.index] = min(named, key=lambda layer: order[layer.node])
    return first


def _weight(body: Body, layer: Layer) -> Tensor:
    return body.network.get_parameter(layer.weight).detach()


def _written(body: Body, layer: Layer, axis: int) -> tuple[Tensor, int]:
    """Return the weights by which a layer writes the channels of an axis, [size, rest], and their dimension."""
    dim = OUTPUTS.get(layer.kind, 0)
    return _rows_of(_weight(body, layer), dim, body.wiring, layer, axis), dim


def _rows_of(weight: Tensor, dim: int, wiring: Wiring, layer: Layer, axis: int) -> Tensor:
    slot = next(slot for slot in wiring.axes[axis].slots if (slot.tensor, slot.dim) == (layer.weight, dim))
    rows = weight.movedim(dim, 0).flatten(1)
    return rows[slot.entries.flatten().to(rows.device)].view(len(slot.entries), -1)


def _of_axes(structure: Wiring, source: Wiring, goal: Wiring, plans: Mapping[int, Plan]) -> Moves:
    """Return the moves of axes, with the moves of whole layers' outputs."""
    slots, outgoing = slots_of(source, goal), dict[str, Tensor]()
    for layer in structure.layers:
        dim = OUTPUTS.get(layer.kind, 0)
        here = [pair for pair in slots.get(layer.weight, ()) if pair[1].dim == dim]
        if not here and layer.outputs in plans:  # a norm without weights
            outgoing[layer.name] = plans[layer.outputs].outgoing
        elif len(here) == 1 and here[0][0] in plans and here[0][1].repeat == 1:
            outgoing[layer.name] = plans[here[0][0]].outgoing
        elif any(index in plans for index, _, _ in here):
            outgoing[layer.name] = across(here, plans)
    costs = {layer.name: plans[layer.outputs].cost for layer in structure.layers
             if layer.kind in WEIGHTED and layer.outputs in plans}  # fmt: skip
    return Moves(outgoing, {}, costs, plans)
