"""Arithmetic on networks of one shape and one start: cumulative gradients, their assignment, weighted fusion.

arithmetic: a network trained from theta_0 to theta has the cumulative gradient g = theta - theta_0. Gradients of several
tasks are assigned to a network, theta_n + sum alpha_i g_i, or the networks themselves are fused, sum alpha_i theta_i.

All of it is done on integers (fusion.exact), so the order of terms does not matter and a term can be taken out again, bit
for bit. Weights are combined as the formula says. BatchNorm's running mean and variance, and counters, are not weights: a
combination has the terms' weighted mean of them, with the coefficients' sizes as weights, rounded where they are integers.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from conf.errors import UserError
from fusion.exact import ExactSum, State, dequantise, digest

GRADIENTS, WEIGHTS = "gradients", "weights"
STATISTICS = ("running_mean", "running_var", "num_batches_tracked")

Alpha = float | Mapping[str, float]  # one number, or one for each layer, by its name


def is_statistic(name: str) -> bool:
    """Whether a tensor of this name is a running statistic of a norm, or its counter, and no weight."""
    return name.rpartition(".")[2] in STATISTICS


def layer_of(name: str) -> str:
    """The layer that a tensor belongs to: its name without the last part."""
    return name.rpartition(".")[0]


def alpha_for(alpha: Alpha, name: str) -> float:
    """The coefficient of a tensor. UserError for a layer without one."""
    if isinstance(alpha, int | float):
        return float(alpha)
    if layer_of(name) not in alpha:
        raise UserError(f"no coefficient for the layer '{layer_of(name)}'; give one number, or one for each layer")
    return float(alpha[layer_of(name)])


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

    `start` is theta_0, or with `force` any other network of its shape: the gradients are assigned to it. Raises UserError
    for gradients that count from another start (unless forced), other shapes, and a number of alphas that is not theirs.
    """
    if len(gradients) != len(alphas):
        raise UserError(f"{len(alphas)} coefficients for {len(gradients)} gradients; give one for each")
    here = digest(start)
    for place, gradient in enumerate(gradients):
        check_shapes(start, gradient.change, f"gradient {place + 1}")
        if gradient.start != here and not force:
            digests = f"digest {gradient.start[:12]}, this network's is {here[:12]}"
            raise UserError(f"gradient {place + 1} counts from another start ({digests}); force it if that is meant")
    pairs = [(gradient.change, alpha) for gradient, alpha in zip(gradients, alphas, strict=True)]
    return composed(start, pairs, how, gradients[0].bits if gradients else 0)


def composed(start: State, terms: Iterable[tuple[State, Alpha]], how: str, bits: int) -> State:
    """The combination of (change, alpha) pairs, which may be read one by one; all int64 in units of 2**-bits.

    Weights of theta_0 count once (GRADIENTS) or sum alpha times (WEIGHTS).
    """
    total, sizes, factor = ExactSum(bits), dict.fromkeys(start, 0.0), dict.fromkeys(start, 0.0)
    for change, alpha in terms:
        scaled = {}
        for name, tensor in change.items():
            one = alpha_for(alpha, name)
            weight = abs(one) if is_statistic(name) else one
            sizes[name], factor[name] = sizes[name] + abs(one), factor[name] + one
            scaled[name] = _times(tensor, weight)
        total.add(scaled)
    found = {}
    for name, tensor in start.items():
        change = total.totals.get(name, torch.zeros_like(tensor))
        if is_statistic(name):
            found[name] = tensor + (_times(change, 1.0 / sizes[name]) if sizes[name] else torch.zeros_like(tensor))
        else:
            found[name] = change + (tensor if how == GRADIENTS else _times(tensor, factor[name]))
    return found


def to_state(quantised: State, like: Mapping[str, Tensor], bits: int) -> State:
    """Integers in units of 2**-bits as a state with the dtypes of `like`: float32, counters rounded and not negative."""
    plain = dequantise(quantised, bits)
    return {
        name: tensor if like[name].is_floating_point() else tensor.round().clamp(min=0).to(like[name].dtype)
        for name, tensor in plain.items()
    }


def _times(tensor: Tensor, factor: float) -> Tensor:
    """int64 times a number, rounded to nearest; exact for 1 and 0."""
    if factor == 1.0:
        return tensor
    return (tensor.double() * factor).round_().to(torch.int64)


class Composer:
    """Many combinations of the same terms, written into one network in place: nothing is built, read or copied anew.

    The network's weights become views of one vector, which is a sum over the terms' vectors (float32, unlike `combine`).
    Its statistics are not touched: measure with batch statistics, or recompute them.
    """

    def __init__(
        self, network: nn.Module, start: Mapping[str, Tensor], ends: Sequence[Mapping[str, Tensor]], how: str
    ) -> None:
        """`start`: theta_0; `ends`: the networks trained from it, as float states."""
        for place, end in enumerate(ends):
            check_shapes(start, end, f"network {place + 1}")
        named = dict(network.named_parameters())
        self.network = network
        self.layers = list(dict.fromkeys(layer_of(name) for name in named))
        flat = {name: torch.cat([state[name].detach().flatten().float() for name in named]) for name, state in
                {"start": start, **{str(place): end for place, end in enumerate(ends)}}.items()}  # fmt: skip
        device = next(network.parameters()).device
        base = flat.pop("start").to(device)
        terms = torch.stack(list(flat.values())).to(device)
        self._base = base if how == GRADIENTS else torch.zeros_like(base)
        self._terms = (terms - base if how == GRADIENTS else terms).T  # [weights, terms], each term contiguous
        self._vector = torch.empty_like(base)
        self._spans = self._adopt(named)

    def __call__(self, alphas: Sequence[Alpha]) -> nn.Module:
        """The network, its weights now the combination with these coefficients."""
        if all(isinstance(alpha, int | float) for alpha in alphas):
            self._write(slice(None), [float(alpha) for alpha in alphas])  # type: ignore[arg-type]
            return self.network
        for name, span in self._spans.items():
            self._write(span, [alpha_for(alpha, name) for alpha in alphas])
        return self.network

    def _write(self, span: slice, alphas: Sequence[float]) -> None:
        factors = torch.tensor(alphas, dtype=self._base.dtype, device=self._base.device)
        torch.addmv(self._base[span], self._terms[span], factors, out=self._vector[span])

    def _adopt(self, named: Mapping[str, nn.Parameter]) -> dict[str, slice]:
        """Make the parameters views of the vector; where each of them lies."""
        spans, begin = {}, 0
        for name, parameter in named.items():
            spans[name] = slice(begin, begin + parameter.numel())
            parameter.data = self._vector[spans[name]].view_as(parameter)
            begin += parameter.numel()
        return spans
