"""Rules of layers: convolutions, linear layers, embeddings and norms, as modules or as functions of parameters."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node

from fedloom.fusion.graph.labels import Value, value_of, varied
from fedloom.fusion.graph.rules_entries import after_norm, elementwise, joined, table
from fedloom.fusion.graph.rules_moves import mixed
from fedloom.fusion.graph.tracing import CONVOLUTIONS, NORMS, TRANSPOSED
from fedloom.fusion.graph.walk import Refusal, Rule, Walk, along, argument


def _read(walk: Walk, value: Value, dim: int, entries: Tensor) -> tuple[Tensor, ...]:
    """Tie the entries [size] of a weight to the channels along a dimension, and return the other factors."""
    if value.shape[dim] != len(entries):
        raise Refusal(f"reads {len(entries)} channels of {list(value.shape)}")
    here = [f for f in value.factors if dim in varied(f) or (value.shape[dim] == 1 and not varied(f))]
    chosen = [factor for factor in here if walk.free(factor)] or here[:1]
    if len(chosen) > 1:
        raise Refusal("reads two independent sets of channels in one dimension; use one; try not to flatten both")
    chosen = chosen or [factor for factor in value.factors if not varied(factor) and walk.free(factor)]  # one flat channel
    if not chosen:
        walk.atoms.pin(entries)
        return tuple(value.factors)
    labels = chosen[0]
    own = along(entries, dim, labels.ndim).expand(
        torch.broadcast_shapes(labels.shape, along(entries, dim, labels.ndim).shape)
    )
    labels = labels.expand(own.shape)
    walk.atoms.pin(own[labels < 0])
    walk.atoms.tie(own, labels)
    return tuple(factor for factor in value.factors if factor is not chosen[0] and not any(factor is one for one in here))


def _sides(walk: Walk, source: Any, dims: tuple[int, int]) -> tuple[Tensor | None, Tensor, Tensor]:
    """Return a weight of the state (None if it is computed), and the entries [size] of two of its dimensions."""
    if isinstance(source, Tensor) or source.op == "get_attr":
        weight = walk.tensor(source)
        return weight, *(walk.entries(weight, dim) for dim in dims)  # pyright: ignore[reportReturnType]
    value = walk.known(source)
    factors = [next((f for f in value.factors if varied(f) == {dim}), None) for dim in dims]
    if factors[0] is None or factors[1] is None:
        raise Refusal(f"the weight '{source}' is computed in a way that mixes its channels; use parameters; try a layer")
    return None, *(factor.flatten() for factor in factors if factor is not None)  # pyright: ignore[reportReturnType]


def _bias(walk: Walk, source: Any, outputs: Tensor) -> None:
    """Tie a bias, of the state or computed, to the outputs."""
    if source is None:
        return
    if isinstance(source, Tensor) or source.op == "get_attr":
        walk.atoms.tie(walk.entries(walk.tensor(source), 0), outputs)
        return
    for factor in walk.known(source).factors:
        walk.atoms.tie(factor.expand(outputs.shape), outputs)


def _dense(walk: Walk, node: Node, x: Value, weight: Any, bias: Any, dim: int, kind: str) -> Value:
    """Label a layer that mixes all entries of a dimension; a convolution also mixes those of later dimensions."""
    dims = (0, 1) if kind == "transposed" else (1, 0)
    tensor, inputs, outputs = _sides(walk, weight, dims)
    if dim == 1:
        x = mixed(walk, x, range(2, len(x.shape)), x.shape)
    remaining = _read(walk, x, dim, inputs)
    _bias(walk, bias, outputs)
    if tensor is not None:
        walk.reads.add((id(tensor), dims[0]))
    walk.layer(node, kind, tensor, inputs, outputs)
    shape = tuple(walk.shape(node))
    remaining = [factor for factor in remaining if not varied(factor) & {dim}]
    return value_of([*remaining, along(outputs, dim, len(shape))], shape)


def _parts(walk: Walk, node: Node, **places: int) -> list[Any]:
    """Return parts of a layer: by name of its module, or by place and name of a function's arguments; None if missing."""
    if node.op == "call_module":
        return [getattr(walk.module(node), name, None) for name in places]
    return [argument(node, place, name) for name, place in places.items()]


def _linear(walk: Walk, node: Node) -> Value:
    value, (weight, bias) = walk.known(node.args[0]), _parts(walk, node, weight=1, bias=2)
    return _dense(walk, node, value, weight, bias, len(value.shape) - 1, "linear")


def _convolution(walk: Walk, node: Node, kind: str = "conv") -> Value:
    weight, bias, groups = _parts(walk, node, weight=1, bias=2, groups=6)
    return _convolved(walk, node, walk.known(node.args[0]), weight, bias, groups or 1, kind)


def _transposed(walk: Walk, node: Node) -> Value:
    return _convolution(walk, node, "transposed")


def _convolved(walk: Walk, node: Node, x: Value, weight: Any, bias: Any, groups: int, kind: str) -> Value:
    known = walk.known(weight) if isinstance(weight, Node) else value_of([], weight.shape)
    if len(x.shape) != len(known.shape):
        raise Refusal(f"a convolution of {list(x.shape)}, which has no batch dimension")
    if groups == 1:
        return _dense(walk, node, x, weight, bias, 1, kind)
    if kind == "transposed":
        raise Refusal("a transposed convolution in groups cannot be wired; use groups=1; try one for each group")
    return _grouped(walk, node, x, walk.tensor(weight), bias, groups)


def _grouped(walk: Walk, node: Node, x: Value, weight: Tensor, bias: Any, groups: int) -> Value:
    """Label a grouped convolution: its inputs and outputs are members of the same groups, or the same channels."""
    x = mixed(walk, x, range(2, len(x.shape)), x.shape)
    count = x.shape[1]
    inputs = walk.blocks_of.setdefault(id(weight), walk.atoms.new(count))
    outputs = walk.entries(weight, 0)
    _read(walk, x, 1, inputs)
    _bias(walk, bias, outputs)
    each, out = count // groups, len(outputs) // groups
    if each == out == 1:
        walk.atoms.tie(inputs, outputs)
    else:
        leaders = inputs if each == 1 else outputs if out == 1 else walk.atoms.new(groups)
        for members, size in ((inputs, each), (outputs, out)):
            if leaders is not members:
                walk.group(members, leaders.repeat_interleave(size))
    if each > 1:
        walk.slots[id(weight), 1], walk.blocks[id(weight), 1] = inputs, groups
        walk.reads.add((id(weight), 1))
    walk.layer(node, "depthwise" if each == out == 1 else "grouped", weight, inputs, outputs)
    shape = tuple(walk.shape(node))
    return value_of([along(outputs, 1, len(shape))], shape)


def _embedding(walk: Walk, node: Node) -> Value:
    """Label rows of a table that the input or constants select."""
    weight = walk.tensor(*_parts(walk, node, weight=1))
    index, shape = walk.of(node.args[0]), tuple(walk.shape(node))
    rows, outputs = walk.entries(weight, 0), walk.entries(weight, 1)
    walk.atoms.pin(rows)
    walk.layer(node, "embedding", weight, rows, outputs)
    factors = [factor.unsqueeze(-1) for factor in index.factors] if index is not None else []
    return value_of([*factors, along(outputs, len(shape) - 1, len(shape))], shape)


def _affine(walk: Walk, node: Node, value: Value, tensors: list[Any], dim: int) -> Value:
    """Label weight, bias and statistics, along all dimensions from `dim` on or along `dim` alone."""
    operands = [value]
    for tensor in tensors:
        if tensor is None:
            continue
        operand = walk.of(tensor) if isinstance(tensor, Node) else walk.state_value(tensor)
        assert operand is not None
        if dim == 1:
            shape = (1, operand.shape[0], *[1] * (len(value.shape) - 2))
            operand = value_of([factor.view(shape) for factor in operand.factors], shape)
            if value.shape[1] == 1:  # with one channel, no dimension identifies it
                atom = walk.entries(walk.tensor(tensor), 0)
                operand = value_of([atom.view(shape)], shape)
        elif value.shape[-1] == 1 and isinstance(tensor, Tensor) and tensor.ndim == 1:
            operand = value_of([walk.entries(tensor, 0)], operand.shape)
        operands.append(operand)
    result = joined(walk, operands)
    own = [operand for operand in operands[1:] if operand.factors]
    weight = walk.tensor(tensors[0]) if tensors[0] is not None and _is_plain(tensors[0]) else None
    channels = walk.atoms.compressed(own[0].factors[0]).flatten() if own else _channels(walk, value, dim)
    walk.layer(node, "norm", weight, channels, channels)
    return Value(result.factors, result.shape, frozenset(d for d, size in enumerate(result.shape) if size == 1))


def _is_plain(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) or tensor.op == "get_attr"


def _channels(walk: Walk, value: Value, dim: int) -> Tensor:
    """Return the channels that a norm without weights normalises."""
    factors = [factor for factor in value.factors if dim % len(value.shape) in varied(factor) or not varied(factor)]
    return factors[-1].flatten() if factors else torch.empty(0, dtype=torch.int64)


def _batch_norm(walk: Walk, node: Node) -> Value:
    value = walk.known(node.args[0])
    return _affine(walk, node, value, _parts(walk, node, weight=3, bias=4, running_mean=1, running_var=2), 1)


def _group_norm(walk: Walk, node: Node) -> Value:
    groups, weight, bias = _parts(walk, node, num_groups=1, weight=2, bias=3)
    return _in_groups(walk, node, walk.known(node.args[0]), groups, weight, bias)


def _in_groups(walk: Walk, node: Node, value: Value, groups: int, weight: Any, bias: Any) -> Value:
    if groups > 1:
        value = mixed(walk, value, range(2, len(value.shape)), value.shape)
        for factor in value.factors:
            if 1 in varied(factor) and walk.free(factor):
                leaders = walk.atoms.new(groups).repeat_interleave(value.shape[1] // groups)
                walk.group(factor.flatten(), leaders)
    return _affine(walk, node, value, [weight, bias], 1)


def _layer_norm(walk: Walk, node: Node) -> Value:
    over, *tensors = _parts(walk, node, normalized_shape=1, weight=2, bias=3)
    return _over_last(walk, node, over, tensors)


def _rms_norm(walk: Walk, node: Node) -> Value:
    over, weight = _parts(walk, node, normalized_shape=1, weight=2)
    return _over_last(walk, node, over, [weight])


def _over_last(walk: Walk, node: Node, over: Any, tensors: list[Any]) -> Value:
    """Label a norm over the last dimensions."""
    value = walk.known(node.args[0])
    last = len(over)
    value = after_norm(walk, value, range(len(value.shape) - last, len(value.shape)))
    return _affine(walk, node, value, tensors, -1)


def _prelu(walk: Walk, node: Node) -> Value:
    weight = walk.module(node).weight
    value = walk.known(node.args[0])
    if weight.numel() == 1:
        return value
    shape = (1, -1, *[1] * (len(value.shape) - 2))
    return joined(walk, [value, value_of([walk.entries(weight, 0).view(shape)], [1, len(weight), *shape[2:]])])


ACTIVATIONS = (
    *(nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Threshold),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Hardsigmoid, nn.Tanh, nn.Tanhshrink, nn.Hardtanh, nn.Softplus, nn.Softsign),
    *(nn.Hardswish, nn.Hardshrink, nn.Softshrink),
)
MODULES: dict[type, Rule] = table(
    (_linear, (nn.Linear,)),
    (_convolution, CONVOLUTIONS),
    (_transposed, TRANSPOSED),
    (_embedding, (nn.Embedding,)),
    (_batch_norm, NORMS),
    (_group_norm, (nn.GroupNorm,)),
    (_layer_norm, (nn.LayerNorm, nn.RMSNorm)),
    (_prelu, (nn.PReLU,)),
    (elementwise, ACTIVATIONS),
)
FUNCTIONS: dict[str, Rule] = table(
    (_linear, ("linear",)),
    (_convolution, ("conv1d", "conv2d", "conv3d")),
    (_transposed, ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")),
    (_embedding, ("embedding",)),
    (_batch_norm, ("batch_norm",)),
    (_group_norm, ("group_norm",)),
    (_layer_norm, ("layer_norm",)),
    (_rms_norm, ("rms_norm",)),
)
