"""Refuse what cannot be fused, with a message that says what is wrong."""

import numbers
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.cla_ot.moves import Moves
from fedloom.fusion.graph.channels import Wiring

TYPES = (torch.float32, torch.float64)


def mixing_weights(weights: Sequence[float] | None, number: int) -> list[float]:
    """Return the weights divided by their sum; None: equal ones. Raise UserError if they do not fit `number` networks."""
    try:
        numbers = [1.0] * number if weights is None else [float(weight) for weight in weights]
    except (TypeError, ValueError):
        raise UserError(f"fuse: weights {weights!r}; use one number for each network") from None
    if len(numbers) != number or any(not weight >= 0.0 for weight in numbers) or not 0.0 < sum(numbers) < float("inf"):
        raise UserError(f"fuse: weights {numbers} for {number} networks; use one for each, not negative, not all 0")
    return [weight / sum(numbers) for weight in numbers]


def given_map(chosen: tuple[int, ...], own: int, other: int, networks: int) -> dict[int, int]:
    """Return FusionSettings.map as {layer of the network at `depth`: layer of the other}. Raise UserError if it is wrong.

    `own`, `other`: the numbers of layers of these networks.
    """
    few, many = min(own, other), max(own, other)
    rising = len(chosen) == few and all(a < b for a, b in zip(chosen, (*chosen[1:], many), strict=True)) and chosen[0] >= 0
    if networks != 2 or not rising:
        raise UserError(f"fuse: map {chosen} for {networks} networks of {own} and {other} layers; use, for two networks, "
                        f"{few} rising indices below {many}")  # fmt: skip
    return {(row if own == many else column): (column if own == many else row) for column, row in enumerate(chosen)}


def is_index(index: object, networks: int) -> bool:
    """Return whether this is the index of one of so many networks, also as a number of NumPy's."""
    return isinstance(index, numbers.Integral) and not isinstance(index, bool) and 0 <= int(index) < networks


def check_places(networks: int, into: int, depth: int) -> None:
    """Raise UserError unless there are two or more networks, and the indices `into` and `depth` are in range."""
    if networks < 2:
        raise UserError(f"fuse: got {networks} network{'s' * (networks != 1)}; use two or more")
    for name, index in (("into", into), ("depth", depth)):
        if not is_index(index, networks):
            raise UserError(
                f"fuse: {name}={index!r}; takes the index of one of the {networks} networks: 0 to {networks - 1}"
            )


def check_numbers(index: int, network: nn.Module) -> None:
    """Raise UserError unless the network's floating-point values are finite, and float32 or float64."""
    for name, tensor in network.state_dict().items():
        if tensor.is_floating_point() and tensor.numel() and not bool(torch.isfinite(torch.stack(tensor.aminmax())).all()):
            raise UserError(f"network {index}: tensor '{name}' holds values that are not finite")
        if tensor.is_floating_point() and tensor.dtype not in TYPES:
            raise UserError(f"network {index}: tensor '{name}' is {tensor.dtype}: too coarse; call float() on the network")


def check_layers(index: int, wiring: Wiring) -> None:
    """Raise UserError if the network has no hidden layers, or two layers share a weight."""
    if not wiring.units or not wiring.layers:
        raise UserError(f"network {index} has no hidden layers: nothing to fuse")
    first: dict[str, str] = {}
    for layer in wiring.layers:
        if layer.weight and (other := first.setdefault(layer.weight, layer.name)) != layer.name:
            raise UserError(f"network {index}: the layers '{other}' and '{layer.name}' have one weight, which a fused "
                            "network cannot share; give each layer its own")  # fmt: skip


def check_scale(state: Mapping[str, Tensor], wiring: Wiring, moves: Sequence[Moves]) -> None:
    """Raise UserError if transport plans divided by column sums would scale a layer's input but not its bias."""
    unequal = [name for move in moves for name, plan in move.outgoing.items() if plan.shape[0] != plan.shape[1]]
    normed = {layer.outputs for layer in wiring.layers if layer.kind == "norm"}
    biased = [layer.name for layer in wiring.layers
              if layer.kind != "norm" and layer.outputs not in normed and f"{layer.name}.bias" in state]  # fmt: skip
    if unequal and biased:
        raise UserError(f"fuse: '{biased[-1]}' has a bias, and the widths differ at '{unequal[0]}': plans divided by column "
                        "sums (the public code's) scale a layer's input and not its bias; use networks without biases "
                        "(here bias=false and head_bias=false), or transport normalisation 'both'")  # fmt: skip


def check_ends(one: Wiring, other: Wiring, index: int) -> None:
    """Raise UserError unless both networks have the same number of input channels and of classes."""
    ends = {"input channels": (one.layers[0].inputs, other.layers[0].inputs),
            "classes": (one.layers[-1].outputs, other.layers[-1].outputs)}  # fmt: skip
    for what, (ours, theirs) in ends.items():
        if one.axes[ours].size != other.axes[theirs].size:
            message = f"network {index} has {other.axes[theirs].size} {what}, the others {one.axes[ours].size}"
            raise UserError(message + ("; name them with classes=[...] (or --classes)" if what == "classes" else ""))
