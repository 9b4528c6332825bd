"""Smaller networks as parts of a larger one, and the mean of networks that each hold some layers and channels.

Units of the smaller network (layers, residual blocks) are assigned to units of the larger one, in order. Its channels
are the first of the larger one's, or the first after a rotation (FedRolex). A missing layer can count as one that
leaves the function unchanged: the identity, or a block whose branch is zero (CLA+OT, Sec. 3.2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.matching import match_evenly
from fedloom.fusion.graph.channels import Slot, Unit, Wiring
from fedloom.fusion.state import BATCH_NORM, State

Index = tuple[Tensor | None, ...]


@dataclass(frozen=True, eq=False)
class Submodel:
    """Where a smaller network's tensors lie in a larger one.

    Attributes:
        places: By tensor of the smaller network, the larger network's tensor and its entries in each dimension (None: all).
        neutral: For layers that the smaller network lacks, tensors that leave the larger one's function unchanged.
    """

    places: Mapping[str, tuple[str, Index]]
    neutral: Mapping[str, Tensor]

    def taken(self, state: Mapping[str, Tensor]) -> State:
        """Return the smaller network's state, copied out of the larger network's `state`."""
        return {name: _picked(state[own], index).clone() for name, (own, index) in self.places.items()}

    def spread(self, state: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Index, Tensor]]:
        """Yield where the smaller network's `state` lies in the larger one, `whole`: (name, entries, values) by tensor."""
        for name, (own, index) in self.places.items():
            if own in whole:
                yield own, index, state[name]


@dataclass(frozen=True, eq=False)
class Held:
    """One input of `mean_over_holders`: a smaller network and its place in the larger one.

    Attributes:
        submodel: The place of each tensor in the larger network.
        state: The smaller network's tensors.
        weight: Its weight in the mean.
        lacking: The relative weight of the neutral tensors that replace its missing layers.
        shares: Only if `state` is already a mean in which missing entries count as 0. By tensor of the larger network, the
            share of the weight that holds each entry; it is broadcast to the smaller tensor.
    """

    submodel: Submodel
    state: Mapping[str, Tensor]
    weight: float
    lacking: float = 0.0
    shares: Mapping[str, Tensor] = field(default_factory=dict)


def mean_over_holders(held: Sequence[Held], before: Mapping[str, Tensor]) -> State:
    """Return the larger network's state: the weighted mean of the networks that hold an entry; else that of `before`.

    If all networks have one architecture, this is their weighted mean, bit for bit.
    """
    total = {name: torch.zeros(tensor.shape, dtype=torch.float64) for name, tensor in before.items()}
    for holder in held:
        for name, index, weight, _ in _parts(holder, before):
            _add(total[name], index, weight * holder.shares.get(name, torch.ones(())).double())
    mean = {name: torch.zeros_like(tensor) for name, tensor in total.items()}
    for name, index, weight, part in (entry for holder in held for entry in _parts(holder, before)):
        share = torch.tensor(weight, dtype=torch.float64).div(_picked(total[name], index))
        _add(mean[name], index, part.double() * share)
    return {
        name: _as(torch.where(total[name] > 0.0, mean[name], tensor.double()), tensor) for name, tensor in before.items()
    }


def _parts(one: Held, whole: Mapping[str, Tensor]) -> Iterator[tuple[str, Index, float, Tensor]]:
    for name, index, part in one.submodel.spread(one.state, whole):
        yield name, index, one.weight, part
    for name, tensor in one.submodel.neutral.items() if one.lacking > 0.0 else ():
        yield name, (None,) * tensor.ndim, one.weight * one.lacking, tensor


def submodel(
    large: Wiring,
    small: Wiring,
    *,
    matches: Mapping[int, int] | None = None,
    turn: int = 0,
    names: tuple[str, str] = ("", ""),
) -> Submodel:
    """Return where the tensors of a smaller network lie in a larger one.

    Args:
        large: The wiring of the larger network.
        small: The wiring of the smaller network.
        matches: By unit of the smaller network, its unit in the larger one; None: evenly spread in each group of layers.
        turn: How far the larger network's channels are rotated before the first are taken.
        names: The names of both networks, for errors.

    Raises:
        UserError: The smaller network is not a part of the larger one. The message says which layer does not fit.
    """
    message = f"{names[1] or 'a network'} is not a part of {names[0] or 'another'}"
    try:
        pairs = match_evenly(large, small) if matches is None else {ours: theirs for theirs, ours in matches.items()}
        if len(pairs) < len(small.units):
            raise UserError("it has more layers")
        layers = _layer_pairs(large, small, pairs)
        state = large.graph.state_dict()
        places = {
            name: index for theirs, ours in layers for name, index in _places(large, small, theirs, ours, turn).items()
        }
        missing = [name for name in small.graph.state_dict() if name not in places]
        if missing:
            raise UserError(f"'{missing[0]}' has no counterpart")
    except UserError as error:
        raise UserError(f"{message}: {error}") from None
    lacking = [unit for index, unit in enumerate(large.units) if index not in pairs]
    return Submodel(places, {name: tensor for unit in lacking for name, tensor in neutral(large, unit, state).items()})


def neutral(wiring: Wiring, unit: Unit, state: Mapping[str, Tensor]) -> State:
    """Return values with which a layer or block returns its input unchanged (after a ReLU).

    Args:
        wiring: The wiring of the network with the layer or block.
        unit: The layer or block.
        state: The network's tensors.

    Returns:
        The values of the unit's weights and biases, by the names that they have in `state`; empty if it has no such values.
    """
    modules = dict(wiring.graph.named_modules())
    if unit.kind == "block":
        last = unit.layers[-1]
        zeros = {name: torch.zeros_like(state[name]) for name in (f"{last}.weight", f"{last}.bias") if name in state}
        return zeros if unit.identity_skip else {}
    tensors: State = {}
    for layer in unit.layers:
        module = modules[layer]
        own = _identity(module)
        if own is None:
            return {}
        tensors |= {f"{layer}.{name}": tensor for name, tensor in own.items()}
    return tensors


def _identity(module: Any) -> State | None:
    if isinstance(module, BATCH_NORM) and module.running_var is not None:
        size = module.num_features
        new = {"running_mean": torch.zeros(size), "running_var": torch.ones(size)}
        scale = {"weight": torch.full_like(module.weight, (1.0 + module.eps) ** 0.5), "bias": torch.zeros_like(module.bias)}
        return new | (scale if module.affine else {})
    if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d) or _changes_size(module):
        return None
    weight = module.weight
    new = torch.zeros_like(weight)
    middle = tuple(size // 2 for size in weight.shape[2:])
    new[(slice(None), slice(None), *middle)] = torch.eye(len(weight), dtype=weight.dtype)
    return {"weight": new, **({} if module.bias is None else {"bias": torch.zeros_like(module.bias)})}


def _changes_size(module: nn.Linear | nn.Conv1d | nn.Conv2d) -> bool:
    weight = module.weight
    odd = isinstance(module, nn.Conv1d | nn.Conv2d) and (
        max(module.stride) > 1 or module.groups > 1 or weight.shape[-1] % 2 == 0
    )
    return odd or weight.shape[0] != weight.shape[1]


def _layer_pairs(large: Wiring, small: Wiring, pairs: Mapping[int, int]) -> list[tuple[str, str]]:
    """Pair layers of the larger network with those of the smaller: in matched units, then outside of units."""
    pairs_: list[tuple[str, str]] = []
    for theirs, ours in sorted(pairs.items()):
        pairs_ += _zipped(large.units[theirs].layers, small.units[ours].layers)
    rest = []
    for wiring in (large, small):
        inside = {name for unit in wiring.units for name in unit.layers}
        rest.append(list(dict.fromkeys(layer.name for layer in wiring.layers if layer.name not in inside)))
    return pairs_ + _zipped(*rest)


def _zipped(theirs: Sequence[str], ours: Sequence[str]) -> list[tuple[str, str]]:
    if len(theirs) != len(ours):
        raise UserError(f"'{' + '.join(ours) or 'nothing'}' does not match '{' + '.join(theirs) or 'nothing'}'")
    return list(zip(theirs, ours, strict=True))


def _places(large: Wiring, small: Wiring, theirs: str, ours: str, turn: int) -> dict[str, tuple[str, Index]]:
    """Return the places of a layer's tensors, as in `Submodel.places`."""
    states = large.graph.state_dict(), small.graph.state_dict()
    names = [{name.rpartition(".")[2]: name for name in state if name.rpartition(".")[0] == layer}
             for state, layer in zip(states, (theirs, ours), strict=True)]  # fmt: skip
    if odd := sorted(names[0].keys() ^ names[1].keys()):
        raise UserError(f"of '{ours}' and '{theirs}' only one has a {odd[0]}")
    places: dict[str, tuple[str, Index]] = {}
    for kind, name in names[1].items():
        if states[0][names[0][kind]].ndim != states[1][name].ndim:
            raise UserError(f"'{name}' and '{names[0][kind]}' have different numbers of dimensions")
        index = tuple(_index(large, small, names[0][kind], name, dim, turn) for dim in range(states[1][name].ndim))
        places[name] = names[0][kind], index
    return places


def _index(large: Wiring, small: Wiring, theirs: str, ours: str, dim: int, turn: int) -> Tensor | None:
    """Return the entries of one dimension of the larger network's tensor; None: all of them, in order."""
    sizes = large.graph.state_dict()[theirs].shape[dim], small.graph.state_dict()[ours].shape[dim]
    index = torch.arange(sizes[1])
    pairs = list(zip(_slots(large, theirs, dim), _slots(small, ours, dim), strict=False))
    for (free, one), (_, other) in pairs:
        size = len(other.entries)
        short = size < len(one.entries) and (not free or one.blocks > 1)
        if one.repeat != other.repeat or size > len(one.entries) or short:
            if any(axis.groups > 1 and one in axis.slots for axis in large.axes):
                fault = f"attention and grouped layers take equal widths, but have {size} and {len(one.entries)} channels"
                raise UserError(f"{fault}; vary other options, such as feed_forward or layers")
            raise UserError(f"'{ours}' has {size} channels, '{theirs}' {len(one.entries)}, along dimension {dim}")
        chosen = (torch.arange(size) - (turn if free and size < len(one.entries) else 0)) % len(one.entries)
        index[other.entries.flatten()] = one.entries[chosen].flatten()
    if not pairs and sizes[0] != sizes[1]:
        raise UserError(f"'{ours}' has {sizes[1]} entries, '{theirs}' {sizes[0]}, along dimension {dim}")
    return None if torch.equal(index, torch.arange(sizes[0])) else index


def _slots(wiring: Wiring, tensor: str, dim: int) -> list[tuple[bool, Slot]]:
    """Return the slots on this dimension, each with whether its channels can be selected."""
    return [(not axis.fixed and axis.groups == 1, slot)
            for axis in wiring.axes for slot in axis.slots if (slot.tensor, slot.dim) == (tensor, dim)]  # fmt: skip


def _picked(tensor: Tensor, index: Index) -> Tensor:
    for dim, entries in enumerate(index):
        tensor = tensor if entries is None else tensor.index_select(dim, entries)
    return tensor


def _add(total: Tensor, index: Index, part: Tensor) -> None:
    if all(entries is None for entries in index):
        total += part
        return
    places = [torch.arange(size) if entries is None else entries for size, entries in zip(total.shape, index, strict=True)]
    shape = [len(entries) for entries in places]
    total.index_put_(torch.meshgrid(*places, indexing="ij"), part.expand(shape), accumulate=True)


def _as(value: Tensor, like: Tensor) -> Tensor:
    return value.to(like.dtype) if like.is_floating_point() else value.round().to(like.dtype)
