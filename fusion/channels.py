"""Wiring is derived, not written by hand: which dimensions of a network's state carry the same channels.

An axis is a set of channels; a permutation of one, applied to all its slots, leaves the network's outputs unchanged.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from fusion.tracing import CONVOLUTIONS, NORMS, Refusal, Rule, Rules, Ties, Value, Walk, WiringError, place
from fusion.units import Flow, Layer, Unit, find_units

__all__ = ["Axis", "Layer", "Slot", "Unit", "Wiring", "WiringError", "permuted", "wire"]


@dataclass(frozen=True)
class Slot:
    """Dimension `dim` of a tensor of the state dict, with `repeat` consecutive entries for each channel of an axis."""

    tensor: str
    dim: int
    repeat: int = 1


@dataclass(frozen=True)
class Axis:
    """`size` channels and the slots that carry them.

    fixed: input or output of the network, never moved; groups: channels move only within whole groups of consecutive
    ones, and whole groups among each other (GroupNorm).
    """

    index: int
    size: int
    slots: tuple[Slot, ...]
    fixed: bool
    groups: int = 1

    def permutation(self, generator: torch.Generator) -> Tensor:
        """A random allowed permutation, int64 [size]; the identity for a fixed axis."""
        if self.fixed:
            return torch.arange(self.size)
        within = [torch.randperm(self.size // self.groups, generator=generator) for _ in range(self.groups)]
        starts = torch.randperm(self.groups, generator=generator) * (self.size // self.groups)
        return (torch.stack(within) + starts[:, None]).flatten()


@dataclass(frozen=True, eq=False)
class Wiring:
    """How a network is wired.

    graph: its trace, which shares the network's modules and parameters; node_axes: axis of the channel dimension (dim 1)
    of each fx node, but for those whose channels a flatten repeats; points: for each axis that is not fixed its
    pre-activations, the nodes that are outputs of convolution, linear, norm or sum and have a user that is neither norm
    nor sum. The users of a point may overwrite it (ReLU in place).
    """

    axes: tuple[Axis, ...]
    layers: tuple[Layer, ...]
    units: tuple[Unit, ...]
    graph: fx.GraphModule
    node_axes: dict[str, int]
    points: dict[int, tuple[str, ...]]


def permuted(state: Mapping[str, Tensor], axis: Axis, permutation: Tensor) -> dict[str, Tensor]:
    """The state with channel k of the axis replaced, everywhere, by channel permutation[k]; other tensors are shared."""
    result = dict(state)
    for slot in axis.slots:
        entries = permutation[:, None] * slot.repeat + torch.arange(slot.repeat, device=permutation.device)
        tensor = result[slot.tensor]
        result[slot.tensor] = tensor.index_select(slot.dim, entries.flatten().to(tensor.device))
    return result


def wire(network: nn.Module, example: Tensor) -> Wiring:
    """The wiring of `network` for inputs like `example`, [n, c, h, w] or [n, d].

    The network runs once, in eval mode; its flags and buffers stay as they are. Raises WiringError, naming node, module
    and source line as far as known, for operations that mix channels in ways not understood here, for parameters that
    would lie on no axis and for anything but one input and one output.
    """
    walk = Walk(network, example, _RULES)
    walk.run()
    _check_covered(network, walk.ties)
    roots = {root: index for index, root in enumerate(walk.ties.roots())}
    number = {axis: roots[walk.ties.find(axis)] for axis in range(len(walk.ties.sizes))}
    fixed = frozenset(number[axis] for axis in walk.ends)
    _check_softmax(walk, number, fixed)
    groups = _groups(walk, number)
    slots = _slots(walk.ties, number)
    axes = tuple(
        Axis(index, walk.ties.sizes[root], tuple(slots.get(index, ())), index in fixed, groups.get(index, 1))
        for root, index in roots.items()
    )
    layers = {
        node: replace(layer, inputs=number[layer.inputs], outputs=number[layer.outputs])
        for node, layer in walk.layers.items()
    }
    node_axes = {node.name: number[value.axis] for node, value in walk.values.items() if value.repeat == 1}
    value_axes = {node: number[value.axis] for node, value in walk.values.items()}
    flow = Flow(walk.sources, layers, frozenset(walk.sums), value_axes, fixed)
    points = {axis.index: _points(flow, axis.index, node_axes) for axis in axes if not axis.fixed}
    return Wiring(axes, tuple(layers.values()), find_units(flow), walk.trace.graph, node_axes, points)


def _check_covered(network: nn.Module, ties: Ties) -> None:
    known = {tensor for tensor, _ in ties.slots}
    for name, parameter in network.named_parameters():
        if parameter.numel() > 1 and id(parameter) not in known:
            raise WiringError(
                f"parameter '{name}' {list(parameter.shape)} lies on no axis: unused, or not channel by channel"
            )


def _check_softmax(walk: Walk, number: Mapping[int, int], fixed: frozenset[int]) -> None:
    for node in walk.softmax:
        if number[walk.values[node].axis] not in fixed:
            raise WiringError(f"{place(node)}: softmax over hidden channels cannot be wired")


def _groups(walk: Walk, number: Mapping[int, int]) -> dict[int, int]:
    """Group numbers of the axes that have some.

    Two different partitions into equal groups have no free structure in common, so all must agree.
    """
    groups: dict[int, int] = {}
    for node, count in walk.groups.items():
        if groups.setdefault(number[walk.values[node].axis], count) != count:
            raise WiringError(f"{place(node)}: {count} groups of channels that another norm puts into other groups")
    return groups


def _slots(ties: Ties, number: Mapping[int, int]) -> dict[int, list[Slot]]:
    slots: dict[int, list[Slot]] = {}
    for (tensor, dim), value in ties.slots.items():
        slots.setdefault(number[value.axis], []).extend(Slot(name, dim, value.repeat) for name in ties.names[tensor])
    return slots


def _points(flow: Flow, axis: int, node_axes: Mapping[str, int]) -> tuple[str, ...]:
    def is_linear(node: Node) -> bool:
        return node in flow.layers or node in flow.sums

    def ends_here(node: Node) -> bool:
        return any(user not in flow.sums and not flow.is_kind(user, ("norm",)) for user in node.users)

    return tuple(node.name for node in flow.axes if node_axes.get(node.name) == axis and is_linear(node) and ends_here(node))


def _argument(node: Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def _weighted(walk: Walk, node: Node) -> Value:
    """Convolution or linear layer: a new axis of outputs."""
    module, (source, inputs) = walk.module(node), walk.only(node)
    kind = "linear" if isinstance(module, nn.Linear) else "conv"
    if kind == "linear" and len(walk.shape(source)) != 2:
        raise Refusal(f"a linear layer takes [n, d] here, got {list(walk.shape(source))}")
    known = walk.ties.slots.get((id(module.weight), 0))
    outputs = known or walk.ties.new(module.weight.shape[0])
    walk.ties.slot(module.weight, 1, inputs)
    walk.ties.slot(module.weight, 0, outputs)
    walk.ties.slot(module.bias, 0, outputs)
    return walk.layer(node, kind, inputs, outputs)


def _convolution(walk: Walk, node: Node) -> Value:
    module, (source, value) = walk.module(node), walk.only(node)
    if len(walk.shape(source)) != module.weight.dim():
        raise Refusal(f"a convolution of {list(walk.shape(source))}, which has no batch dimension")
    if module.groups == 1:
        return _weighted(walk, node)
    if not module.groups == module.in_channels == module.out_channels:
        raise Refusal(
            f"a grouped convolution ({module.in_channels} to {module.out_channels} channels in {module.groups} groups) "
            "cannot be wired"
        )
    walk.ties.slot(module.weight, 0, value)
    walk.ties.slot(module.bias, 0, value)
    return walk.layer(node, "depthwise", value, value)


def _norm(walk: Walk, node: Node) -> Value:
    module, (source, value) = walk.module(node), walk.only(node)
    if isinstance(module, nn.LayerNorm) and len(module.normalized_shape) != len(walk.shape(source)) - 1:
        raise Refusal(f"LayerNorm over {list(module.normalized_shape)} of {list(walk.shape(source))} cannot be wired")
    if isinstance(module, nn.GroupNorm):
        _note_groups(walk, node, module, value)
    for name in ("weight", "bias", "running_mean", "running_var"):
        walk.ties.slot(getattr(module, name, None), 0, value)
    return walk.layer(node, "norm", value, value)


def _note_groups(walk: Walk, node: Node, module: nn.GroupNorm, value: Value) -> None:
    entries = module.num_channels // module.num_groups
    if module.num_groups == 1 or entries == value.repeat:
        return
    if entries % value.repeat:
        raise Refusal(f"GroupNorm with groups of {entries} entries, {value.repeat} a channel")
    walk.groups[node] = module.num_groups


def _prelu(walk: Walk, node: Node) -> Value:
    module, (_, value) = walk.module(node), walk.only(node)
    if module.weight.numel() > 1:
        walk.ties.slot(module.weight, 0, value)
    return value


def _keep(walk: Walk, node: Node) -> Value:
    """Entry by entry: the same channels."""
    source, value = walk.only(node)
    if walk.shape(node) != walk.shape(source):
        raise Refusal(f"{walk.what(node)} turns {list(walk.shape(source))} into {list(walk.shape(node))}")
    return value


def _spatial(walk: Walk, node: Node) -> Value:
    """Pooling, padding, resizing: each channel by itself. The number in MaxPool2d and the like tells the dimensions."""
    source, value = walk.only(node)
    dims = re.search(r"([123])d$", walk.what(node))
    if len(walk.shape(source)) != (int(dims[1]) + 2 if dims else max(3, len(walk.shape(node)))):
        raise Refusal(f"{walk.what(node)} of {list(walk.shape(source))}, which has no batch dimension or no spatial one")
    return value


def _reshape(walk: Walk, node: Node) -> Value:
    """A row-major reshape: a channel must become whole entries of dim 1."""
    source, value = walk.only(node)
    before, after = walk.shape(source), walk.shape(node)
    if len(after) < 2 or after[0] != walk.batch:
        raise Refusal(f"{walk.what(node)} turns {list(before)} into {list(after)}: the batch dimension is lost")
    block, rest = value.repeat * prod(before[2:]), prod(after[2:])
    if block % rest:
        raise Refusal(f"{walk.what(node)} turns {list(before)} into {list(after)}: it splits or joins channels")
    return Value(value.axis, block // rest)


def _reduction(walk: Walk, node: Node) -> Value:
    """A mean or sum over spatial dimensions."""
    source, value = walk.only(node)
    dims = _argument(node, 1, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not dims or any(not isinstance(dim, int) or dim % len(walk.shape(source)) < 2 for dim in dims):
        raise Refusal(f"{walk.what(node)} over {dims or 'all dimensions'} cannot be wired, only over dimensions beyond 1")
    return value


def _softmax(walk: Walk, node: Node) -> Value:
    source, value = walk.only(node)
    dim = walk.module(node).dim if node.op == "call_module" else _argument(node, 1, "dim")
    if not isinstance(dim, int) or dim % len(walk.shape(source)) == 0:
        raise Refusal(f"{walk.what(node)} over dimension {dim} cannot be wired")
    if dim % len(walk.shape(source)) == 1:
        walk.softmax.append(node)
    return value


def _add(walk: Walk, node: Node) -> Value:
    """A sum or difference of two tensors ties their axes; that with a number keeps the one."""
    operands = [operand for operand in node.args if isinstance(operand, Node) and operand in walk.values]
    operands += [operand for operand in node.kwargs.values() if isinstance(operand, Node) and operand in walk.values]
    if len(operands) < 2 or operands[0] is operands[1]:
        return _keep(walk, node)
    first, second = operands
    if len(walk.shape(first)) != len(walk.shape(second)):
        raise Refusal(f"a sum of {list(walk.shape(first))} and {list(walk.shape(second))}")
    walk.ties.tie(walk.values[first], walk.values[second])
    walk.sums.append(node)
    return walk.values[first]


def _index(walk: Walk, node: Node) -> Value:
    """A slice of the spatial dimensions."""
    _, value = walk.only(node)
    index = node.args[1]
    whole = slice(None)
    if not isinstance(index, tuple) or index[:2] != (whole, whole) or not all(_is_plain(part) for part in index[2:]):
        raise Refusal(f"the index {index} cannot be wired, only [:, :, ...]")
    return value


def _is_plain(part: object) -> bool:
    return part is None or isinstance(part, int | slice)


def _pad(walk: Walk, node: Node) -> Value:
    source, value = walk.only(node)
    pads = _argument(node, 1, "pad")
    if not isinstance(pads, list | tuple) or len(pads) > 2 * (len(walk.shape(source)) - 2):
        raise Refusal(f"padding {pads} of {list(walk.shape(source))} reaches channels")
    return value


def _table(*rows: tuple[Rule, tuple[Any, ...]]) -> dict[Any, Rule]:
    return {key: rule for rule, keys in rows for key in keys}


_QUESTIONS = frozenset(("size", "dim", "numel", "getattr", "get_device", "is_floating_point"))

_MODULES: dict[type, Rule] = _table(
    (_weighted, (nn.Linear,)),
    (_convolution, CONVOLUTIONS),
    (_norm, NORMS),
    (_prelu, (nn.PReLU,)),
    (_reshape, (nn.Flatten, nn.Unflatten)),
    (_softmax, (nn.Softmax, nn.LogSoftmax)),
    (_keep, (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)),
    (_keep, (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Threshold)),
    (_keep, (nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Tanh, nn.Tanhshrink, nn.Hardtanh, nn.Softplus, nn.Softsign)),
    (_keep, (nn.Hardswish, nn.Hardshrink, nn.Softshrink)),
    (_spatial, (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LPPool2d)),
    (_spatial, (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)),
    (_spatial, (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)),
    (_spatial, (nn.ZeroPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d, nn.ConstantPad2d, nn.CircularPad2d)),
    (_spatial, (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)),
)

_FUNCTIONS: dict[str, Rule] = _table(
    (_add, ("add", "sub")),
    (_reshape, ("flatten", "view", "reshape", "unflatten", "squeeze", "unsqueeze")),
    (_reduction, ("mean", "sum", "amax", "amin")),
    (_softmax, ("softmax", "log_softmax")),
    (_index, ("getitem",)),
    (_pad, ("pad",)),
    (_keep, ("relu", "relu6", "leaky_relu", "rrelu", "elu", "selu", "celu", "gelu", "silu", "mish", "threshold")),
    (_keep, ("sigmoid", "logsigmoid", "hardsigmoid", "tanh", "tanhshrink", "hardtanh", "softplus", "softsign")),
    (_keep, ("hardswish", "hardshrink", "softshrink", "clamp", "clip", "abs", "neg", "exp", "square", "sqrt")),
    (_keep, ("mul", "truediv", "div", "pow")),
    (
        _keep,
        ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "stochastic_depth"),
    ),
    (_keep, ("contiguous", "clone", "detach", "float", "double", "to", "type")),
    (_spatial, ("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "lp_pool2d")),
    (_spatial, ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")),
    (_spatial, ("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")),
    (_spatial, ("interpolate", "upsample")),
)

_RULES = Rules(_MODULES, _FUNCTIONS, _QUESTIONS)
