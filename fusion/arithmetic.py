"""Arithmetic on networks of one shape and one start: cumulative gradients, their assignment, weighted fusion.

arithmetic: a network trained from theta_0 to theta has the cumulative gradient g = theta - theta_0 (elsewhere called its
task vector, and what follows task arithmetic). Gradients of several tasks are assigned to a network, theta_n +
sum alpha_i g_i, or the networks themselves are fused, sum alpha_i theta_i.

All of it is done on integers (fusion.exact), so the order of terms does not matter and a term can be taken out again, bit
for bit. Weights are combined as the formula says. BatchNorm's running mean and variance, and counters, are not weights: a
combination has the terms' weighted mean of them, with the coefficients' sizes as weights, rounded where they are integers.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.conf.errors import UserError
from fedloom.fusion.exact import ExactSum, ExactSumError, dequantise
from fedloom.fusion.state import State, digest

GRADIENTS, WEIGHTS = "gradients", "weights"
LARGEST = 2.0**62  # size of an int64 entry
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

Alpha = float | Mapping[str, float]  # one number, or one for each layer, by its name


def is_statistic(name: str) -> bool:
    """Whether a tensor of this name is a running statistic of a norm, or its counter, and no weight."""
    return name.rpartition(".")[2] in STATISTICS


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name without the last part."""
    return name.rpartition(".")[0]


def alpha_for(alpha: Alpha, name: str) -> float:
    """The coefficient of a tensor. UserError for a layer without one, and for numbers that are not finite."""
    if not isinstance(alpha, int | float):
        if layer_of(name) not in alpha:
            raise UserError(f"no coefficient for the layer '{layer_of(name)}'; give one number, or one for each layer")
        alpha = alpha[layer_of(name)]
    if not math.isfinite(alpha):
        raise UserError(f"a coefficient is {alpha}; takes finite numbers")
    return float(alpha)


@dataclass(frozen=True)
class Gradient:
    """A cumulative gradient: int64 tensors in units of 2**-bits, and the digest of the start that it counts from."""

    change: State
    start: str
    bits: int


def check_shapes(one: Mapping[str, Tensor], other: Mapping[str, Tensor], who: str) -> None:
    """UserError, naming the tensor, unless both states have the same names and shapes; `who` is the other's name."""
    if odd := one.keys() ^ other.keys():
        raise UserError(f"{who}: tensor '{min(odd)}' is in one of the two networks only; takes networks of one shape")
    for name, tensor in one.items():
        if tensor.shape != other[name].shape:
            raise UserError(f"{who}: tensor '{name}' is {list(other[name].shape)}, takes {list(tensor.shape)}")


def cumulative_gradient(start: State, end: State, bits: int) -> Gradient:
    """g = theta - theta_0 of two quantised states (fusion.exact.quantise). UserError for networks of different shapes."""
    check_shapes(start, end, "cumulative gradient")
    return Gradient({name: tensor - start[name] for name, tensor in end.items()}, digest(start), bits)


def combine(
    start: State, gradients: Sequence[Gradient], alphas: Sequence[Alpha], how: str = GRADIENTS, *, force: bool = False
) -> State:
    """theta_n + sum alpha_i g_i (`how` GRADIENTS) or sum alpha_i theta_i (WEIGHTS), as int64 like the quantised `start`.

    `start` is theta_0, or with `force` and GRADIENTS any other network of its shape: the gradients are assigned to its
    weights (arithmetic, Eq. 6), its statistics stay. Raises UserError for gradients that count from another start (unless
    forced; never with WEIGHTS, since theta_i is not known then), other shapes, and a number of alphas that is not theirs.
    """
    if len(gradients) != len(alphas):
        raise UserError(f"{len(alphas)} coefficients for {len(gradients)} gradients; give one for each")
    here = digest(start)
    for place, gradient in enumerate(gradients):
        check_shapes(start, gradient.change, f"gradient {place + 1}")
        if gradient.start != here and not force:
            digests = f"digest {gradient.start[:12]}, this network's is {here[:12]}"
            raise UserError(f"gradient {place + 1} counts from another start ({digests}); force it if that is meant")
        if gradient.start != here and how == WEIGHTS:
            raise UserError(f"gradient {place + 1} counts from another start, from which weights do not follow; add states")
    bits = gradients[0].bits if gradients else 0
    found = composed(start, alphas, (gradient.change for gradient in gradients), how, bits)
    if any(gradient.start != here for gradient in gradients):  # the statistics of another network are its own
        found |= {name: tensor for name, tensor in start.items() if is_statistic(name)}
    return found


def composed(start: State, alphas: Sequence[Alpha], changes: Iterable[State], how: str, bits: int) -> State:
    """The combination of changes, which may be read one by one, with their alphas; all int64 in units of 2**-bits.

    Weights of theta_0 count once (GRADIENTS) or sum alpha times (WEIGHTS). UserError beyond the range of exact sums.
    """
    factors = {name: _factors(alphas, name, [1] * len(alphas)) for name in start}
    terms = ({name: _times(tensor, factors[name][place]) for name, tensor in change.items()}
             for place, change in enumerate(changes))  # fmt: skip
    return _added(start, {name: math.fsum(own) for name, own in factors.items()}, terms, how, bits)


def evenly(start: State, alpha: Alpha, total: ExactSum, how: str) -> State:
    """The same where all changes have one coefficient and their sum is known: it is multiplied once."""
    number = total.addends
    factors = {name: _factors([alpha], name, [number])[0] for name in start}
    term = {name: _times(tensor, factors[name]) for name, tensor in total.totals.items()}
    return _added(start, {name: factor * number for name, factor in factors.items()}, [term], how, total.bits)


def added(one: State, other: State) -> State:
    """The sum of two networks' integers. UserError beyond the range of exact sums."""
    return _summed([one, other], bits=0).totals


def _added(start: State, sums: Mapping[str, float], terms: Iterable[State], how: str, bits: int) -> State:
    """theta_0 and the terms; `sums`: of the coefficients, by tensor. UserError beyond the range of exact sums."""
    once = {name: how == GRADIENTS or is_statistic(name) for name in start}
    first = {name: tensor if once[name] else _times(tensor, sums[name]) for name, tensor in start.items()}
    return _summed(itertools.chain([first], terms), bits).totals


def _summed(terms: Iterable[State], bits: int) -> ExactSum:
    total = ExactSum(bits)
    try:
        for term in terms:
            total.add(term)
    except ExactSumError as error:
        raise UserError(f"the combination leaves the range of exact sums ({error}); take smaller coefficients") from None
    return total


def _factors(alphas: Sequence[Alpha], name: str, times: Sequence[int]) -> list[float]:
    """What each change of a tensor is multiplied by: alpha, or for statistics the shares of a weighted mean."""
    if not is_statistic(name):
        return [alpha_for(alpha, name) for alpha in alphas]
    return _shares([_size(alpha, name) for alpha in alphas], times)


def _size(alpha: Alpha, name: str) -> float:
    """How much a network counts in the mean of a statistic: by its layer's coefficient, or all its layers' mean."""
    if isinstance(alpha, Mapping) and layer_of(name) not in alpha:
        return math.fsum(abs(one) for one in alpha.values()) / max(len(alpha), 1)
    return abs(alpha_for(alpha, name))


def _shares(sizes: Sequence[float], times: Sequence[int]) -> list[float]:
    """Sizes as shares that add up to 1 if each counts so many times; all 0 if they are."""
    total = math.fsum(size * number for size, number in zip(sizes, times, strict=True))
    return [size / total if total else 0.0 for size in sizes]


def to_state(quantised: State, like: Mapping[str, Tensor], bits: int) -> State:
    """Integers in units of 2**-bits as a state with the dtypes of `like`: float32, counters rounded.

    Counters and variances are at least 0.
    """
    plain = dequantise({name: tensor for name, tensor in quantised.items() if like[name].is_floating_point()}, bits)
    counts = {name: (tensor.double() * 2.0**-bits).round().clamp(min=0).to(like[name].dtype) for name, tensor in
              quantised.items() if name not in plain}  # fmt: skip
    plain |= {name: tensor.clamp(min=0) for name, tensor in plain.items() if name.endswith("running_var")}
    return {name: plain[name] if name in plain else counts[name] for name in quantised}


def _times(tensor: Tensor, factor: float) -> Tensor:
    """int64 times a number, rounded to nearest; exact for 1 and 0. UserError beyond the range of exact sums."""
    if factor == 1.0:
        return tensor
    scaled = (tensor.double() * factor).round_()
    if scaled.numel() and float(scaled.abs().max()) >= LARGEST:
        raise UserError(f"the coefficient {factor:g} is too large: the combination leaves the range of exact sums")
    return scaled.to(torch.int64)


class Composer:
    """Many combinations of the same terms, written into one network in place: nothing is built, read or copied anew.

    The network's weights become views of one vector, a sum over the terms' vectors, and its running statistics views of
    another, their weighted mean; float32, unlike `combine`. Counters are not touched.
    """

    def __init__(
        self, network: nn.Module, start: Mapping[str, Tensor], ends: Sequence[Mapping[str, Tensor]], how: str
    ) -> None:
        """`start`: theta_0; `ends`: the networks trained from it, as float states. UserError for other shapes."""
        for place, end in enumerate(ends):
            check_shapes(start, end, f"network {place + 1}")
        statistics = {name: buffer for name, buffer in network.named_buffers() if buffer.is_floating_point()}
        weights = dict(network.named_parameters())
        self.network = network
        self.layers = list(dict.fromkeys(layer_of(name) for name in weights))
        self._parts = [_Vector(weights, start, ends, how), _Vector(statistics, start, ends, GRADIENTS)]

    def __call__(self, alphas: Sequence[Alpha]) -> nn.Module:
        """The network, its weights now the combination with these coefficients."""
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
    """Tensors of a network as views of one vector, and what it is a sum of."""

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
