"""Rules of operations that only move entries: labels pass through the same operations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import Node

from fedloom.fusion.graph.labels import NONE, STILL, Value, value_of, varied
from fedloom.fusion.graph.rules_entries import joined, squeezed, table
from fedloom.fusion.graph.walk import Refusal, Rule, Walk, argument, linear_places


def movement(walk: Walk, node: Node) -> Value:
    """Return the labels of a tensor after its entries are moved, possibly with omissions or repetitions."""
    return _moved(walk, node, _operation(walk, node))


def _operation(walk: Walk, node: Node) -> Callable[[dict[Node, Tensor]], Any]:
    """Return the operation of a node as a function of tensors that replace its operands."""

    def apply(values: dict[Node, Tensor]) -> Any:
        args, kwargs = fx.map_arg(
            (node.args, node.kwargs), lambda source: values.get(source, walk.trace.constants.get(source))
        )
        if node.op == "call_module":
            return walk.module(node)(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    return apply


def _moved(walk: Walk, node: Node, apply: Callable[[dict[Node, Tensor]], Any]) -> Value:
    operands = [source for source in node.all_input_nodes if source in walk.values]
    if len(operands) != 1:
        raise Refusal(f"{walk.what(node)} of {', '.join(map(str, operands))}; use one tensor with channels")
    (operand,) = operands
    value, factors = walk.values[operand], []
    for factor in value.factors:
        new = apply({operand: factor.expand(value.shape).contiguous()})
        places = linear_places(value.shape, factor)
        factors.append(walk.compressed(new, lambda places=places: apply({operand: places})))
    return value_of(factors, walk.shape(node))


def unfolded(walk: Walk, node: Node) -> Value:
    """Return the labels of F.unfold's or nn.Unfold's windows, for which torch requires floating-point numbers."""
    apply = _operation(walk, node)
    if node.op == "call_method":  # Tensor.unfold
        return _moved(walk, node, apply)
    padding = walk.module(node).padding if node.op == "call_module" else argument(node, 3, "padding", 0)
    if padding not in (0, (0, 0), [0, 0]):
        raise Refusal(f"{walk.what(node)} with padding {padding}; use none; try F.pad before it")
    return _moved(walk, node, lambda values: apply({source: labels.double() for source, labels in values.items()}).long())


def getitem(walk: Walk, node: Node) -> Value:
    """Return the labels of a part of a tensor, or of one tensor in a list."""
    source = node.args[0]
    if isinstance(source, Node) and walk.trace.shapes[source] is None:
        parts, picked = _operation(walk, source), _operation(walk, node)
        operand = next(one for one in source.all_input_nodes if one in walk.values)
        value, factors = walk.values[operand], []
        for factor in value.factors:
            run = lambda labels: picked({source: parts({operand: labels})})  # noqa: E731
            new = run(factor.expand(value.shape).contiguous())
            factors.append(walk.compressed(new, lambda run=run, f=factor: run(linear_places(value.shape, f))))
        return value_of(factors, walk.shape(node))
    return movement(walk, node)


def expanded(walk: Walk, node: Node) -> Value:
    """Return the labels of `expand`, whose new dimensions have equal entries."""
    value = walk.known(node.args[0])
    shape = tuple(walk.shape(node))
    more = len(shape) - len(value.shape)
    factors = [factor[(None,) * more] for factor in value.factors]
    wider = {dim for dim, size in enumerate(shape) if dim < more or size != value.shape[dim - more]}
    return value_of(factors, shape, wider | {dim + more for dim in value.even if dim + more not in wider})


def concatenation(walk: Walk, node: Node) -> Value:
    """Return the labels of `cat` or `stack`: the tensors' factors joined. Tensors without channels do not move."""
    parts = node.args[0] if node.args else node.kwargs["tensors"]
    if not isinstance(parts, list | tuple):
        raise Refusal(f"{walk.what(node)} of {parts}; use a list of tensors")
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
    values = [walk.known(part) for part in parts]
    join = torch.stack if walk.what(node) == "stack" else torch.cat
    size = len(values[0].shape) + (join is torch.stack)
    dim = int(dim) % size  # pyright: ignore[reportArgumentType]
    keys = list(dict.fromkeys(_key(f, dim, join) for value in values for f in value.factors if walk.free(f)))
    keys = keys or list(dict.fromkeys(_key(f, dim, join) for value in values for f in value.factors))
    factors = []
    for key in keys:
        matching = [next((f for f in value.factors if _key(f, dim, join) == key), None) for value in values]
        labels = [_filled(factor, value) for factor, value in zip(matching, values, strict=True)]
        base, places = 0, []
        for one, factor in zip(values, matching, strict=True):
            positions = linear_places(one.shape, torch.zeros([1] * len(one.shape)) if factor is None else factor)
            places.append(positions + base)
            base += int(positions.max()) + 1 if positions.numel() else 0
        factors.append(walk.compressed(join(labels, dim), lambda places=places: join(places, dim)))
    return value_of(factors, walk.shape(node))


def _key(factor: Tensor, dim: int, join: Any) -> frozenset[int]:
    """Return the dimensions that factors of several parts must share to be joined."""
    lies = varied(factor)
    if join is torch.cat and (dim in lies or not lies):
        return frozenset([dim])
    return lies


def _filled(factor: Tensor | None, value: Value) -> Tensor:
    if factor is not None:
        return factor.expand(value.shape).contiguous()
    alike = len(value.even) == len(value.shape)
    return torch.full(value.shape, NONE if alike else STILL)


def spatial(walk: Walk, node: Node) -> Value:
    """Return the labels of pooling, padding or resizing over the dimensions after the second, for each channel."""
    value = walk.known([*node.args, *node.kwargs.values()][0])
    return mixed(walk, value, range(2, len(value.shape)), walk.shape(node))


def mixed(walk: Walk, value: Value, dims: Any, shape: Any) -> Value:
    """Return the labels after an operation that mixes entries along some dimensions.

    Channels that differ along these dimensions, and also along others, become one channel.

    Args:
        walk: The walk through the network.
        value: The labels before the operation.
        dims: The mixed dimensions.
        shape: The shape of the result.
    """
    factors = []
    for factor in value.factors:
        over = varied(factor) & set(dims)
        if over and not walk.free(factor) and not varied(factor) - over:
            continue
        if over and not varied(factor) - over:
            walk.atoms.pin(factor)
            continue
        for dim in over:
            first = factor.narrow(dim, 0, 1)
            walk.atoms.tie(first.expand(factor.shape), factor)
            factor = first
        factors.append(factor)
    return value_of(factors, shape)


def pad(walk: Walk, node: Node) -> Value:
    """Return the labels of F.pad: constants in any dimension, other modes after the second."""
    mode = node.args[2] if len(node.args) > 2 else node.kwargs.get("mode", "constant")
    if mode != "constant":
        return spatial(walk, node)
    value, factors = walk.known(argument(node, 0, "input")), []
    pads = [int(walk.trace.constants.get(p, p)) for p in argument(node, 1, "pad")]
    ndim = len(value.shape)
    touched = {ndim - 1 - index // 2 for index, count in enumerate(pads) if count}
    for factor in value.factors:
        if not touched & varied(factor):
            factors.append(factor)
            continue
        new = torch.nn.functional.pad(factor.expand(value.shape).contiguous(), pads, value=NONE)
        places = linear_places(value.shape, factor)
        factors.append(walk.compressed(new, lambda places=places: torch.nn.functional.pad(places, pads)))
    return value_of(factors, walk.shape(node))


def padded_windows(walk: Walk, node: Node) -> Value:
    """Return the labels after a node that cuts padded positions into windows, or joins windows: channels stay last.

    Raises Refusal if channels are in another dimension than the last one.
    """
    value = walk.known(node.args[0])
    last = len(value.shape) - 1
    factors = [f for f in value.factors if varied(f) <= {last}]
    if any(walk.free(f) for f in value.factors if not varied(f) <= {last}):
        raise Refusal(f"{walk.what(node)} of channels outside the last dimension; use [n, h, w, c]")
    shape = tuple(walk.shape(node))
    return value_of([f.reshape([1] * (len(shape) - 1) + [-1]) for f in factors], shape)


def merged_windows(walk: Walk, node: Node) -> Value:
    """Return the labels of patches of 2 x 2 positions joined into one with four times the channels."""
    return _moved(walk, node, _operation(walk, node))


def indexed(walk: Walk, node: Node) -> Value:
    """Return the labels of index_select and similar functions with constant indices."""
    operand = node.args[0]
    rest = [one for one in node.all_input_nodes if one is not operand]
    if any(one not in walk.trace.constants for one in rest):
        raise Refusal(f"{walk.what(node)} by indices that depend on data; use constant ones")
    return movement(walk, node)


def same(walk: Walk, node: Node) -> Value:
    """Return the labels of operations that leave each entry in place (casts, copies): those of the operand."""
    return joined(walk, [walk.known(node.args[0])])


def squeeze(walk: Walk, node: Node) -> Value:
    """Return the labels of `squeeze`, without the dimensions of size 1 that it removes."""
    value, shape = walk.known(node.args[0]), tuple(walk.shape(node))
    dims = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    every = range(len(value.shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    result = squeezed(value, [d for d in every if value.shape[d] == 1])  # pyright: ignore
    assert result.shape == shape
    return result


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FUNCTIONS: dict[str, Rule] = table(
    (movement, _names("flatten view reshape view_as reshape_as unflatten unsqueeze permute transpose swapaxes swapdims")),
    (movement, _names("movedim moveaxis t mT roll flip narrow select chunk tile repeat repeat_interleave")),
    (movement, _names("pixel_shuffle pixel_unshuffle channel_shuffle tril triu rot90 diagonal")),
    (unfolded, ("unfold",)),
    (merged_windows, ("_merged",)),
    (padded_windows, ("windows", "unwindowed")),
    (indexed, _names("index_select")),
    (getitem, ("getitem",)),
    (squeeze, ("squeeze",)),
    (expanded, ("expand", "expand_as", "broadcast_to")),
    (concatenation, _names("cat concat concatenate stack")),
    (pad, ("pad",)),
    (spatial, _names("max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d lp_pool2d interpolate upsample")),
    (spatial, _names("boolean_dispatch adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d")),
    (spatial, _names("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d")),
)
MODULES: dict[type, Rule] = table(
    (movement, (nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)),
    (unfolded, (nn.Unfold,)),
    (spatial, (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LPPool2d)),
    (spatial, (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)),
    (spatial, (nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)),
    (spatial, (nn.ZeroPad1d, nn.ZeroPad2d, nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReplicationPad2d)),
    (spatial, (nn.ConstantPad1d, nn.ConstantPad2d, nn.CircularPad2d)),
    (spatial, (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)),
)
