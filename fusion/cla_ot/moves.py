"""Move networks into another basis: every tensor along its axes, by one plan for each axis.

Where an axis is written, a plan's columns sum to 1, so that each new channel is a mean of old ones. Where it is read,
the rows sum to 1, so that the scale of later layers is unchanged (fusion.cla_ot.transport).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.transport import Plan
from fedloom.fusion.graph.channels import Layer, Slot, Wiring
from fedloom.fusion.graph.grouped import dense, in_groups
from fedloom.fusion.state import State

PIECE = 1024  # columns of a weight that are moved at once
FEW = 4  # a plan with at most this many entries a row or column is processed as sparse


@dataclass(frozen=True, eq=False)
class Moves:
    """How the channels of one network move to those of another. Axes (channels that move as one) without a plan stay.

    Attributes:
        outgoing: By layer name, [n, m]: how the layer's outputs move.
        incoming: By layer name, [n, m]: how its inputs move. Only if plans are by layer (fusion.cla_ot.reference).
        costs: By layer name, the cost of the plan.
        plans: By axis index, the transport plan; None if plans are by layer.
    """

    outgoing: Mapping[str, Tensor]
    incoming: Mapping[str, Tensor]
    costs: Mapping[str, float]
    plans: Mapping[int, Plan] | None = None


def moved(state: Mapping[str, Tensor], layers: Sequence[Layer], moves: Moves) -> State:
    """Return a network's state after its layers' channels move by `moves.outgoing` and `moves.incoming`.

    Weights [out, in, ...] move on both sides. Vectors (bias, norms and their statistics) move with the outputs, and a
    linear layer after a flatten with its channels. Raise UserError if a tensor's size is not the plan's. The message
    has its name.
    """
    new = dict(state)
    for layer in {layer.name: layer for layer in layers}.values():
        for name, tensor in ((name, state[name]) for name in state if name.rpartition(".")[0] == layer.name):
            if tensor.ndim and layer.name in moves.outgoing:
                new[name] = apply(new[name], moves.outgoing[layer.name], 0, name)
            if tensor.ndim > 1 and layer.kind != "depthwise" and layer.name in moves.incoming:
                new[name] = apply(new[name], moves.incoming[layer.name], 1, name)
    return {name: tensor.clone() if tensor is state[name] else tensor for name, tensor in new.items()}


class Movement(Protocol):
    """How the n channels of an axis move to m channels, as two matrices [n, m].

    `outgoing` moves tensors that write the channels; `incoming` moves tensors that read them.
    """

    @property
    def outgoing(self) -> Tensor: ...

    @property
    def incoming(self) -> Tensor: ...


def carried(
    state: Mapping[str, Tensor], source: Wiring, goal: Wiring, plans: Mapping[int, Movement]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a network's tensors, by name, with its channels moved to those of another network of the same structure.

    A tensor that reads channels moves by `incoming`, one that writes them by `outgoing`.

    Args:
        state: The network's tensors.
        source: The network's own wiring.
        goal: The other network's wiring.
        plans: By axis index, the movement.

    Raises:
        UserError: A tensor's size is not the plan's. The message has its name.
    """
    sizes, slots = goal.graph.state_dict(), slots_of(source, goal)
    for name, tensor in state.items():
        pairs = slots.get(name, [])
        if not any(index in plans for index, _, _ in pairs):
            yield name, tensor.clone(memory_format=torch.contiguous_format)
            continue
        blocks = max(ours.blocks for _, ours, _ in pairs), max(theirs.blocks for _, _, theirs in pairs)
        tensor = dense(tensor, blocks[0]) if blocks[0] > 1 else tensor
        size = list(sizes[name].shape)
        size[1:2] = [size[1] * blocks[1]] if len(size) > 1 else []
        for dim in dict.fromkeys(ours.dim for _, ours, _ in pairs):
            here = [pair for pair in pairs if pair[1].dim == dim]
            tensor = moved_along(tensor, dim, here, plans, size[dim], name)
        yield name, (in_groups(tensor, blocks[1]) if blocks[1] > 1 else tensor).contiguous()


def slots_of(source: Wiring, goal: Wiring) -> dict[str, list[tuple[int, Slot, Slot]]]:
    """Return by tensor its (axis index, slot in `source`, slot in `goal`). Raise UserError if the structures differ."""
    slots: dict[str, list[tuple[int, Slot, Slot]]] = {}
    for ours, theirs in zip(source.axes, goal.axes, strict=False):
        places = [[(slot.tensor, slot.dim) for slot in axis.slots] for axis in (ours, theirs)]
        if places[0] != places[1] or len(source.axes) != len(goal.axes):
            apart = next((one for one, other in zip(*places, strict=False) if one != other), (places[0] or places[1])[-1:])
            raise UserError(f"the networks have different designs: their channels are tied in different ways at {apart}")
        for one, other in zip(ours.slots, theirs.slots, strict=True):
            slots.setdefault(one.tensor, []).append((ours.index, one, other))
    return slots


def moved_along(
    tensor: Tensor, dim: int, pairs: list[tuple[int, Slot, Slot]], plans: Mapping[int, Movement], size: int, name: str
) -> Tensor:
    """Return a tensor whose channels along one dimension are moved. Entries on no axis stay in place.

    Args:
        tensor: The tensor.
        dim: The dimension.
        pairs: By axis: its index, and its entries in the old and in the new tensor.
        plans: By axis index, the movement.
        size: The new size of the dimension.
        name: The tensor's name, for errors.
    """
    front = tensor.movedim(dim, 0)
    new = front.clone() if size == len(front) else front.new_zeros(size, *front.shape[1:])
    for index, ours, theirs in pairs:
        rows = front.index_select(0, ours.entries.flatten().to(front.device))
        if index in plans:
            matrix = plans[index].incoming if ours.reads else plans[index].outgoing
            if ours.entries.shape != (len(matrix), theirs.repeat) or len(theirs.entries) != matrix.shape[1]:
                raise UserError(
                    f"tensor '{name}': dimension {dim} has {ours.entries.numel()} entries, the plan {len(matrix)} channels"
                )
            rows = apply(rows.reshape(len(rows), -1), matrix, 0, name).view(-1, *front.shape[1:])
        elif ours.entries.shape != theirs.entries.shape:
            raise UserError(f"tensor '{name}': dimension {dim} does not move, but has {ours.entries.numel()} entries here "
                            f"and {theirs.entries.numel()} there")  # fmt: skip
        new[theirs.entries.flatten().to(front.device)] = rows
    return new.movedim(0, dim)


def across(pairs: list[tuple[int, Slot, Slot]], plans: Mapping[int, Plan]) -> Tensor:
    """Return the matrix [n, m] by which all entries of one dimension move: the plans of all slots on it."""
    n = max(int(ours.entries.max()) for _, ours, _ in pairs) + 1
    m = max(int(theirs.entries.max()) for _, _, theirs in pairs) + 1
    matrix = torch.zeros(n, m, dtype=torch.float64)
    for index, ours, theirs in pairs:
        block = plans[index].outgoing if index in plans else torch.eye(len(ours.entries), dtype=torch.float64)
        for mine, other in zip(ours.entries.T, theirs.entries.T, strict=True):
            matrix[mine[:, None], other] = block
    return matrix


def apply(tensor: Tensor, matrix: Tensor, dim: int, name: str = "") -> Tensor:
    """Return the tensor with dimension `dim`, of n channels, mapped to m channels by `matrix` [n, m], float64.

    After a flatten, it has n * r entries. Raise UserError for another number.
    """
    repeat, rest = divmod(tensor.shape[dim], len(matrix))
    if rest or (repeat > 1 and tensor.ndim > 2):
        raise UserError(f"tensor '{name}': dimension {dim} has {tensor.shape[dim]} entries, the plan {len(matrix)} channels")
    front = tensor.movedim(dim, 0)
    pieces = front.reshape(len(matrix), -1).split(PIECE, dim=1)
    times = _sparse(matrix) if matrix.count_nonzero() <= FEW * sum(matrix.shape) else matrix.T.matmul
    new = torch.cat([times(piece.to(matrix)).to(tensor) for piece in pieces], dim=1)
    return new.reshape(matrix.shape[1] * repeat, *front.shape[1:]).movedim(0, dim).contiguous()


def _sparse(matrix: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that multiplies by the transposed matrix, entry by entry: an exact plan has at most n + m - 1."""
    rows, columns = matrix.nonzero(as_tuple=True)
    entries = matrix[rows, columns][:, None]
    return lambda piece: piece.new_zeros(matrix.shape[1], piece.shape[1]).index_add_(0, columns, piece[rows] * entries)
