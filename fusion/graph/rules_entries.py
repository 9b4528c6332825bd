"""Rules that label the results of entry-wise operations and contractions: sums, products, norms, attention."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from fedloom.fusion.graph.labels import Value, value_of, varied
from fedloom.fusion.graph.walk import Refusal, Rule, Walk, argument


def joined(walk: Walk, operands: Sequence[Value]) -> Value:
    """Return the labels of operands after they are broadcast and combined entry by entry.

    Channels that meet are tied. Channels that meet values that do not move are pinned.
    """
    shape = tuple(torch.broadcast_shapes(*(operand.shape for operand in operands)))
    operands = [_widened(operand, len(shape)) for operand in operands]
    for operand in operands:
        for factor in operand.factors:
            for other in operands:
                if other is not operand and _meets_still(walk, factor, other):
                    walk.atoms.pin(factor)
    factors: list[Tensor] = []
    for operand in operands:
        factors = _merged(walk, factors, list(operand.factors))
    even = frozenset.intersection(*(operand.even for operand in operands))
    return value_of(factors, shape, even)


def _merged(walk: Walk, factors: list[Tensor], more: list[Tensor]) -> list[Tensor]:
    """Return the factors of two operands, joined where they meet; of several matches, the best one."""
    pairs = [(k, n) for k, one in enumerate(factors) for n, other in enumerate(more) if _meet(one, other)]
    rank = dict.fromkeys(pairs, False)
    if len(pairs) > 1:
        rank = {(k, n): walk.atoms.correspondence(factors[k], more[n]) == "many" for k, n in pairs}
    left, right, result = set[int](), set[int](), list(factors)
    for k, n in sorted(pairs, key=rank.__getitem__):
        if rank[k, n] and (k in left or n in right):
            walk.atoms.pin(result[k] if n in right else more[n])
        elif result[k] is not more[n]:
            result[k] = walk.atoms.link(result[k], more[n])
        left.add(k)
        right.add(n)
    return result + [other for n, other in enumerate(more) if n not in right]


def _widened(value: Value, ndim: int) -> Value:
    more = ndim - len(value.shape)
    if not more:
        return value
    factors = [factor[(None,) * more] for factor in value.factors]
    return value_of(factors, (1,) * more + value.shape, {dim + more for dim in value.even})


def _meet(one: Tensor, other: Tensor) -> bool:
    return bool(varied(one) & varied(other)) or not (varied(one) or varied(other))


def _meets_still(walk: Walk, factor: Tensor, other: Value) -> bool:
    """Return whether `other` has differing values without channels along this factor's channels."""
    covered = frozenset[int]().union(*(varied(each) for each in other.factors))
    return any(walk.atoms.slides(factor, dim) for dim in varied(factor) - other.even - covered)


def contracted(walk: Walk, value: Value, dims: Iterable[int], keep: bool = False) -> Value:
    """Return the labels after a sum, mean or maximum. Where channels are reduced, their groups remain.

    Args:
        walk: The walk through the network.
        value: The labels before the operation.
        dims: The reduced dimensions.
        keep: Whether they remain, with size 1.
    """
    gone = {dim % len(value.shape) for dim in dims}
    factors = []
    for factor in value.factors:
        if varied(factor) & gone:
            if varied(factor) <= gone or not walk.free(factor):
                continue
            factor = _groups(walk, factor, gone)
        else:
            factor = factor[tuple(slice(0, 1) if dim in gone else slice(None) for dim in range(factor.ndim))]
        factors.append(factor)
    shape = [1 if dim in gone else size for dim, size in enumerate(value.shape)]
    result = value_of(factors, shape, value.even - gone)
    return result if keep else squeezed(result, gone)


def _groups(walk: Walk, factor: Tensor, gone: set[int]) -> Tensor:
    """Return a group for each remaining position of a factor."""
    shape = [1 if dim in gone else size for dim, size in enumerate(factor.shape)]
    groups = walk.atoms.new(int(torch.tensor(shape).prod())).view(shape)
    walk.group(factor, groups.expand(factor.shape))
    return groups


def squeezed(value: Value, dims: Iterable[int]) -> Value:
    """Return the labels without the dimensions `dims` of size 1."""
    gone = {dim % len(value.shape) for dim in dims}
    remaining = [dim for dim in range(len(value.shape)) if dim not in gone]
    factors = [factor.reshape([factor.shape[dim] for dim in remaining]) for factor in value.factors]
    return value_of(
        factors, [value.shape[dim] for dim in remaining], {remaining.index(dim) for dim in value.even if dim in remaining}
    )


def after_norm(walk: Walk, value: Value, dims: Iterable[int]) -> Value:
    """Return the labels after a norm over `dims`. Group, in `walk`, the channels that it normalises together."""
    gone = {dim % len(value.shape) for dim in dims}
    for factor in value.factors:
        if varied(factor) & gone and not varied(factor) <= gone and walk.free(factor):
            _groups(walk, factor, gone)
    return Value(value.factors, value.shape, value.even - gone)


def operands_of(walk: Walk, node: Node) -> list[Value]:
    """Return the labels of all tensors among a node's arguments."""
    operands = []
    for source in (*node.args, *node.kwargs.values()):
        value = walk.of(source) if isinstance(source, Node | Tensor) else None
        if value is not None:
            operands.append(value)
    return operands


def elementwise(walk: Walk, node: Node) -> Value:
    """Return the labels of an entry-wise operation on one or several tensors, and numbers."""
    return joined(walk, operands_of(walk, node))


def add(walk: Walk, node: Node) -> Value:
    """Return the labels of a node that adds or subtracts.

    Also record the node as a possible end of a residual block, if it adds two tensors of the same shape.
    """
    operands = [
        operand for operand in (*node.args, *node.kwargs.values()) if isinstance(operand, Node) and operand in walk.sources
    ]
    if len(set(operands)) == 2 and walk.shape(operands[0]) == walk.shape(operands[1]):
        walk.sums.append(node)
    return elementwise(walk, node)


def dims_of(walk: Walk, node: Node, ndim: int, position: int = 1, name: str = "dim") -> list[int]:
    """Return the dimensions in a node's argument `name`; default: all."""
    selected = argument(node, position, name)
    selected = walk.trace.constants.get(selected, selected) if isinstance(selected, Node) else selected
    dims = (
        range(ndim)
        if selected is None or selected == () or selected == []
        else [selected]
        if isinstance(selected, int)
        else selected
    )
    return [dim % ndim for dim in dims]


def reduction(walk: Walk, node: Node) -> Value:
    """Return the labels of a mean, sum, maximum or similar reduction."""
    value = walk.known(node.args[0])
    dims = dims_of(walk, node, len(value.shape))
    return contracted(walk, value, dims, bool(argument(node, 2, "keepdim", False)))


def softmax(walk: Walk, node: Node) -> Value:
    """Return the labels of a softmax over positions, or over the classes at the end."""
    value = walk.known(node.args[0])
    dim = walk.module(node).dim if node.op == "call_module" else argument(node, 1, "dim")
    if not isinstance(dim, int):
        raise Refusal(f"{walk.what(node)} over dimension {dim}; use a number; try to set the dimension")
    dim %= len(value.shape)
    walk.softmax += [(node, factor) for factor in value.factors if dim in varied(factor)]
    return after_norm(walk, value, [dim])


def normalized(walk: Walk, node: Node) -> Value:
    """Return the labels of F.normalize: a division by a norm over a dimension."""
    value = walk.known(node.args[0])
    return after_norm(walk, value, [argument(node, 2, "dim", 1)])


def product(walk: Walk, one: Value, other: Value) -> Value:
    """Return the labels of a matrix product [..., m, k] @ [..., k, n]."""
    if min(len(one.shape), len(other.shape)) < 2:
        raise Refusal(f"a matrix product of {list(one.shape)} and {list(other.shape)}; use matrices; try unsqueeze")
    left, right = unsqueezed(one, len(one.shape)), unsqueezed(other, len(other.shape) - 2)
    return contracted(walk, joined(walk, [left, right]), [-2])


def unsqueezed(value: Value, dim: int) -> Value:
    """Return the labels with a new dimension of size 1 before `dim`."""
    shape = [*value.shape[:dim], 1, *value.shape[dim:]]
    return value_of([factor.unsqueeze(dim) for factor in value.factors], shape, {d + (d >= dim) for d in value.even})


def permuted_value(value: Value, order: Sequence[int]) -> Value:
    """Return the labels with their dimensions in this order."""
    shape = [value.shape[dim] for dim in order]
    even = {index for index, dim in enumerate(order) if dim in value.even}
    return value_of([factor.permute(list(order)) for factor in value.factors], shape, even)


def matmul(walk: Walk, node: Node) -> Value:
    """Return the labels of a product of two tensors. Record that a tensor of the state reads the contracted channels."""
    one, other = (walk.known(operand) for operand in node.args[:2])
    for operand, dim in ((node.args[0], -1), (node.args[1], -2)):
        if isinstance(operand, Node) and operand.op == "get_attr":
            tensor = walk.tensor(operand)
            walk.reads.add((id(tensor), dim % tensor.ndim))
    return product(walk, one, other)


def attention(walk: Walk, node: Node) -> Value:
    """Return the labels of F.scaled_dot_product_attention: softmax(q k^T + mask) v."""
    q, k, v = (walk.known(argument(node, index, name)) for index, name in enumerate(("query", "key", "value")))
    if argument(node, 7, "enable_gqa", False):
        raise Refusal("attention with fewer heads of keys than of queries; use equal numbers; try to repeat the keys")
    turned = [*range(len(k.shape) - 2), len(k.shape) - 1, len(k.shape) - 2]
    scores = product(walk, q, permuted_value(k, turned))
    mask = walk.of(argument(node, 3, "attn_mask"))
    scores = scores if mask is None else joined(walk, [scores, mask])
    return product(walk, scores, v)


def einsum(walk: Walk, node: Node) -> Value:
    """Return the labels of einsum: operands with indices in one order, multiplied, summed over indices not in the result."""
    equation, *sources = node.args
    if not isinstance(equation, str) or "." in equation:
        raise Refusal(f"einsum '{equation}'; use indices without '...'; try to write them out")
    terms, _, result = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if "->" not in equation:
        letters = terms.replace(",", "")
        result = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    order = "".join(dict.fromkeys(result + terms.replace(",", "")))
    operands = [_spread(walk.known(one), term, order) for one, term in zip(sources, inputs, strict=True)]
    return contracted(walk, joined(walk, operands), range(len(result), len(order)))


def _spread(value: Value, term: str, order: str) -> Value:
    """Return [indices of term] as [order], with size 1 for missing indices."""
    if len(set(term)) < len(term):
        raise Refusal(f"einsum over a diagonal ('{term}'); use each index once; try diagonal()")
    value = permuted_value(value, [term.index(letter) for letter in order if letter in term])
    for dim, letter in enumerate(order):
        if letter not in term:
            value = unsqueezed(value, dim)
    return value


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def table(*rows: tuple[Rule, Iterable[Any]]) -> dict[Any, Rule]:
    """Return {key: rule} from (rule, keys) rows."""
    return {key: rule for rule, keys in rows for key in keys}


FUNCTIONS: dict[str, Rule] = table(
    (add, ("add", "sub")),
    (reduction, _names("mean sum amax amin norm logsumexp var std")),
    (softmax, ("softmax", "log_softmax")),
    (normalized, ("normalize",)),
    (matmul, ("matmul", "bmm")),
    (attention, ("scaled_dot_product_attention",)),
    (einsum, ("einsum",)),
    (elementwise, _names("mul truediv div pow maximum minimum where masked_fill lerp addcmul neg abs exp log square sqrt")),
    (elementwise, _names("rsqrt reciprocal clamp clip sin cos erf sign floor round relu relu6 leaky_relu rrelu elu selu")),
    (elementwise, _names("celu gelu silu mish threshold sigmoid logsigmoid hardsigmoid tanh tanhshrink hardtanh")),
    (
        elementwise,
        _names("softplus softsign hardswish hardshrink softshrink dropout dropout1d dropout2d dropout3d alpha_dropout"),
    ),
    (elementwise, _names("feature_alpha_dropout stochastic_depth contiguous clone detach float double half to type")),
    (elementwise, _names("type_as gt lt ge le eq ne logical_not nan_to_num")),
)
