"""Arithmetic on networks with one architecture and one start: task vectors, their assignment, weighted fusion.

arithmetic: a network trained from theta_0 to theta has the cumulative gradient g = theta - theta_0 (a task vector in
task arithmetic). Gradients of several tasks can be assigned to a network, theta_n + sum alpha_i g_i. Or the networks
can be fused, sum alpha_i theta_i.

Everything is computed on integers (fusion.exact). So the order of terms does not matter, and a term can be removed
again, bit for bit. Weights follow the formula. BatchNorm's running mean, variance and counters are not weights: a
combination gets their weighted mean, with the sizes of the coefficients as weights, rounded for integers.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.exact import ExactSum, ExactSumError, dequantise
from fedloom.fusion.state import State

GRADIENTS, WEIGHTS = "gradients", "weights"
MAX_ENTRY = 2.0**62  # limit of an int64 entry
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

Alpha = float | Mapping[str, float]  # one number, or one for each layer by name


def is_statistic(name: str) -> bool:
    """Return whether a tensor of this name is a running statistic or counter of a norm, not a weight."""
    return name.rpartition(".")[2] in STATISTICS


def layer_of(name: str) -> str:
    """Return the layer of a tensor: its name without the last part."""
    return name.rpartition(".")[0]


def alpha_for(alpha: Alpha, name: str) -> float:
    """Return the coefficient of the tensor `name` in `alpha`. Raise UserError if its layer has none, or a non-finite one."""
    if not isinstance(alpha, int | float):
        if layer_of(name) not in alpha:
            raise UserError(f"no coefficient for the layer '{layer_of(name)}'; use one number, or one for each layer")
        alpha = alpha[layer_of(name)]
    if not math.isfinite(alpha):
        raise UserError(f"a coefficient is {alpha}; use finite numbers")
    return float(alpha)


def check_shapes(one: Mapping[str, Tensor], other: Mapping[str, Tensor], who: str) -> None:
    """Raise UserError, with the tensor's name, unless both states have equal names and shapes. `who` starts the message."""
    if odd := one.keys() ^ other.keys():
        raise UserError(f"{who}: tensor '{min(odd)}' is in one of the two networks only; use networks of one shape")
    for name, tensor in one.items():
        if tensor.shape != other[name].shape:
            raise UserError(f"{who}: tensor '{name}' is {list(other[name].shape)}, takes {list(tensor.shape)}")


def composed(start: State, alphas: Sequence[Alpha], changes: Iterable[State], how: str, bits: int) -> State:
    """Combine changes with a network: theta_0 plus the sum of alpha_i times change i.

    Weights of theta_0 count once (GRADIENTS) or sum alpha times (WEIGHTS).

    Args:
        start: theta_0, int64 in units of 2**-bits.
        alphas: The coefficient of each change.
        changes: theta_i - theta_0, int64, read one by one.
        how: GRADIENTS or WEIGHTS.
        bits: One unit is 2**-bits.

    Returns:
        The combination, int64.

    Raises:
        UserError: The result is beyond the range of exact sums.
    """
    factors = {name: _factors(alphas, name, [1] * len(alphas)) for name in start}
    terms = ({name: _times(tensor, factors[name][index]) for name, tensor in change.items()}
             for index, change in enumerate(changes))  # fmt: skip
    return _added(start, {name: math.fsum(own) for name, own in factors.items()}, terms, how, bits)


def evenly(start: State, alpha: Alpha, total: ExactSum, how: str) -> State:
    """Combine changes that have the same coefficient, from their sum; otherwise as `composed`.

    Args:
        start: theta_0, int64.
        alpha: The coefficient of all changes.
        total: The sum of the changes.
        how: GRADIENTS or WEIGHTS.
    """
    number = total.addends
    factors = {name: _factors([alpha], name, [number])[0] for name in start}
    term = {name: _times(tensor, factors[name]) for name, tensor in total.totals.items()}
    return _added(start, {name: factor * number for name, factor in factors.items()}, [term], how, total.bits)


def added(one: State, other: State) -> State:
    """Return the sum of two quantised states. Raise UserError beyond the range of exact sums."""
    return _summed([one, other], bits=0).totals


def _added(start: State, sums: Mapping[str, float], terms: Iterable[State], how: str, bits: int) -> State:
    """Add the terms to theta_0. `sums` are the sums of the coefficients by tensor."""
    once = {name: how == GRADIENTS or is_statistic(name) for name in start}
    first = {name: tensor if once[name] else _times(tensor, sums[name]) for name, tensor in start.items()}
    return _summed(itertools.chain([first], terms), bits).totals


def _summed(terms: Iterable[State], bits: int) -> ExactSum:
    total = ExactSum(bits)
    try:
        for term in terms:
            total.add(term)
    except ExactSumError as error:
        raise UserError(f"the combination leaves the range of exact sums ({error}); use smaller coefficients") from None
    return total


def _factors(alphas: Sequence[Alpha], name: str, times: Sequence[int]) -> list[float]:
    """Return the factor of each change of a tensor: alpha, or for statistics the share in a weighted mean."""
    if not is_statistic(name):
        return [alpha_for(alpha, name) for alpha in alphas]
    return _shares([_size(alpha, name) for alpha in alphas], times)


def _size(alpha: Alpha, name: str) -> float:
    """Return a network's weight in the mean of a statistic: its layer's coefficient, or the mean over its layers."""
    if isinstance(alpha, Mapping) and layer_of(name) not in alpha:
        return math.fsum(abs(coefficient) for coefficient in alpha.values()) / max(len(alpha), 1)
    return abs(alpha_for(alpha, name))


def _shares(sizes: Sequence[float], times: Sequence[int]) -> list[float]:
    """Return sizes as shares that sum to 1 if each counts `times` times; all 0 if all sizes are 0."""
    total = math.fsum(size * number for size, number in zip(sizes, times, strict=True))
    return [size / total if total else 0.0 for size in sizes]


def to_state(quantised: State, like: Mapping[str, Tensor], bits: int) -> State:
    """Return a quantised state (units of 2**-bits) as float32; tensors that are integers in `like` get their dtype there.

    Counters are rounded. Counters and variances are at least 0.
    """
    plain = dequantise({name: tensor for name, tensor in quantised.items() if like[name].is_floating_point()}, bits)
    counts = {name: (tensor.double() * 2.0**-bits).round().clamp(min=0).to(like[name].dtype) for name, tensor in
              quantised.items() if name not in plain}  # fmt: skip
    plain |= {name: tensor.clamp(min=0) for name, tensor in plain.items() if name.endswith("running_var")}
    return {name: plain[name] if name in plain else counts[name] for name in quantised}


def _times(tensor: Tensor, factor: float) -> Tensor:
    """Return int64 times a number, rounded to nearest; exact for 0 and 1. Raise UserError beyond the exact range."""
    if factor == 1.0:
        return tensor
    scaled = (tensor.double() * factor).round_()
    if scaled.numel() and float(scaled.abs().max()) >= MAX_ENTRY:
        raise UserError(f"the coefficient {factor:g} is too large: the combination leaves the range of exact sums")
    return scaled.to(torch.int64)


class Composer:
    """A network that is overwritten in place with weighted sums of other networks, with new coefficients at each call.

    The network's weights become views of one vector, a sum over the terms' vectors. Its running statistics become
    views of another, their weighted mean. Unlike `composed` it computes in float32, and leaves counters unchanged.
    """

    def __init__(
        self, network: nn.Module, start: Mapping[str, Tensor], ends: Sequence[Mapping[str, Tensor]], how: str
    ) -> None:
        """Prepare the vectors. `start` is theta_0, `ends` are the networks trained from it, as float states.

        Raise UserError if the shapes differ.
        """
        for index, end in enumerate(ends):
            check_shapes(start, end, f"network {index + 1}")
        statistics = {name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point()}
        weights = dict(network.named_parameters())
        self.network = network
        self.layers = list(dict.fromkeys(layer_of(name) for name in weights))
        self._parts = [_Vector(weights, start, ends, how), _Vector(statistics, start, ends, GRADIENTS)]

    def __call__(self, alphas: Sequence[Alpha]) -> nn.Module:
        """Write the sum with these coefficients, one for each of `ends`, into the network. Return the network."""
        weights, statistics = self._parts
        once = [1] * len(alphas)
        if all(isinstance(alpha, int | float) for alpha in alphas):
            same = [alpha_for(alpha, "") for alpha in alphas]
            weights.write(slice(None), same)
            statistics.write(slice(None), _shares([abs(alpha) for alpha in same], once))
            return self.network
        for part in self._parts:
            for name, span in part.spans.items():
                part.write(span, _factors(alphas, name, once))
        return self.network


class _Vector:
    """Tensors of a network as views of one vector, with the terms of its sum."""

    def __init__(
        self, named: Mapping[str, Tensor], start: Mapping[str, Tensor], ends: Sequence[Mapping[str, Tensor]], how: str
    ) -> None:
        device = next(iter(named.values())).device if named else "cpu"
        base, *terms = (_flat(state, named).to(device) for state in (start, *ends))
        stacked = torch.stack(terms)
        self._base = base if how == GRADIENTS else torch.zeros_like(base)
        self._terms = (stacked - base if how == GRADIENTS else stacked).T  # [entries, terms], each term contiguous
        self._vector = torch.empty_like(base)
        self.spans: dict[str, slice] = {}
        begin = 0
        for name, tensor in named.items():
            self.spans[name] = slice(begin, begin + tensor.numel())
            tensor.data = self._vector[self.spans[name]].view_as(tensor)
            begin += tensor.numel()

    def write(self, span: slice, alphas: Sequence[float]) -> None:
        """Write the combination into a part of the vector."""
        factors = torch.tensor(alphas, dtype=self._base.dtype, device=self._base.device)
        torch.addmv(self._base[span], self._terms[span], factors, out=self._vector[span])


def _flat(state: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    return torch.cat([torch.empty(0), *(state[name].detach().flatten().float().cpu() for name in names)])
