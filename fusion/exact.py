"""Exact sums of states in int64 fixed point, so that addition is associative, commutative and invertible.

sum aggregation, Sec. 3: N* = N_1 + ... + N_n and forgetting N* - N_k. In float32, (S + phi) - phi differs from S in a
third of the entries. In units of 2**-bits it equals S bit for bit, in any order of arrival.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedloom.fusion.flat import copy_of, flat_of
from fedloom.fusion.state import State, flat

INT64_MAX = 2**63 - 1


class ExactSumError(ValueError):
    """A tensor that cannot be added exactly. The message has its name and the reason."""


class SumOverflowError(ExactSumError):
    """A state that does not fit into a sum with the others in it. In another order, another state might not fit."""


def quantise(state: Mapping[str, Tensor], bits: int) -> State:
    """Return the state as int64 multiples of 2**-bits, rounded to nearest (ties to even), with the same shapes.

    The error of an entry is at most 2**-(bits + 1). Raise ExactSumError if an entry is not finite, or |w| >= 2**(62 -
    bits).
    """
    whole = flat_of(state)
    scaled = (flat(state) if whole is None else whole.vector.to(torch.float64, copy=True)).mul_(2.0**bits)
    if len(scaled):
        low, high = torch.aminmax(scaled)
        if not max(-float(low), float(high)) < 2.0**62:
            check_range(state, bits)
    integers = scaled.round_().to(torch.int64)
    if whole is not None:
        return whole.layout.state(integers)
    parts = integers.split([tensor.numel() for tensor in state.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(state.items(), parts, strict=True)}


def check_range(state: Mapping[str, Tensor], bits: int) -> None:
    """Raise ExactSumError, with the tensor's name, unless `quantise` can convert the state."""
    for name, tensor in state.items():
        largest = float(tensor.double().abs().max()) if tensor.numel() else 0.0
        if not math.isfinite(largest):
            raise ExactSumError(f"tensor '{name}' has entries that are not finite")
        if largest >= 2.0 ** (62 - bits):
            raise ExactSumError(f"tensor '{name}' has an entry of size {largest:.3g}, beyond 2**{62 - bits}")


def exact(state: Mapping[str, Tensor], bits: int) -> State:
    """Return a state as integers in units of 2**-bits: quantise its floats; its integers are in these units already."""
    if (whole := flat_of(state)) is not None:
        return quantise(whole, bits) if whole.vector.dtype.is_floating_point else whole
    floats = quantise({name: tensor for name, tensor in state.items() if tensor.dtype.is_floating_point}, bits)
    return {name: floats.get(name, tensor) for name, tensor in state.items()}


def dequantise(state: Mapping[str, Tensor], bits: int, divisor: int = 1) -> State:
    """Return int64 multiples of 2**-bits, over `divisor`, as float32 (one rounding in float64, one to float32)."""
    scale = 2.0**-bits / divisor
    if (whole := flat_of(state)) is not None:
        return whole.layout.state((whole.vector.double() * scale).float())
    return {name: (tensor.double() * scale).float() for name, tensor in state.items()}


@dataclass
class ExactSum:
    """A running sum of quantised states with the same names and shapes, in units of 2**-bits.

    `totals` are int64 tensors; `addends` is the number of states in the sum. Quantise a state once and store the
    result: a state must be subtracted as the same integers that were added. Integers wrap around modulo 2**64, so
    anything added can be subtracted, and the sum is right whenever it is in range. `modular`: additions also wrap
    around, because the states are masked (secure aggregation) or were checked before.
    """

    bits: int = 32
    totals: State = field(default_factory=dict)
    addends: int = 0
    modular: bool = False
    _bound: int = field(default=0, repr=False)  # no entry of the sum is larger

    def add(self, quantised: Mapping[str, Tensor], times: int = 1) -> None:
        """Add `times` copies of a quantised state. Raise ExactSumError for other names or shapes, and on overflow."""
        self._accumulate(quantised, times)

    def subtract(self, quantised: Mapping[str, Tensor], times: int = 1) -> None:
        """Subtract a quantised state: the exact inverse of `add`. Raise ExactSumError for other names or shapes."""
        if self.addends < times:
            raise ExactSumError(f"cannot subtract {times} from a sum of {self.addends}")
        self._accumulate(quantised, -times)

    def replace(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor], before: int = 1, times: int = 1) -> None:
        """Subtract `old` `before` times, and add `new` `times` times. On an ExactSumError the sum stays unchanged.

        A state that counts 0 times may be empty.
        """
        if times:
            self._check(new)
        if before:
            self._accumulate(old, -before)
        try:
            if times:
                self._accumulate(new, times)
        except ExactSumError:
            if before:
                self._accumulate(old, before, checked=False)
            raise

    def undo(self, old: Mapping[str, Tensor], new: Mapping[str, Tensor], before: int = 1, times: int = 1) -> None:
        """Undo `replace` with these arguments."""
        if times:
            self._accumulate(new, -times)
        if before:
            self._accumulate(old, before, checked=False)

    def merge(self, totals: Mapping[str, Tensor], addends: int) -> None:
        """Add `totals`, a sum (or difference of sums) of `addends` states. Raise ExactSumError as `add` does."""
        self._accumulate(totals, 1)
        self.addends += addends - 1

    def total(self) -> State:
        """Return the sum as float32."""
        return dequantise(self.totals, self.bits)

    def mean(self) -> State:
        """Return the sum divided by the number of addends, as float32. Raise ExactSumError if the sum is empty."""
        if self.addends < 1:
            raise ExactSumError("the mean of no states is not defined")
        return dequantise(self.totals, self.bits, self.addends)

    def copy(self) -> "ExactSum":
        """Return an independent copy."""
        return ExactSum(self.bits, copy_of(self.totals), self.addends, self.modular, self._bound)

    def _accumulate(self, quantised: Mapping[str, Tensor], times: int, checked: bool = True) -> None:
        self._check(quantised)
        bound = self._bound_after(quantised, times, checked and times > 0)  # before the first change
        totals, whole = flat_of(self.totals), flat_of(quantised)
        if not self.totals:
            self.totals = (
                {name: tensor * times for name, tensor in quantised.items()}
                if whole is None
                else whole.layout.state(whole.vector * times)
            )
        elif totals is not None and whole is not None and totals.layout == whole.layout:
            totals.vector.add_(whole.vector, alpha=times)
        else:
            for name, tensor in quantised.items():
                self.totals[name].add_(tensor, alpha=times)
        self._bound = bound
        self.addends += times

    def _check(self, quantised: Mapping[str, Tensor]) -> None:
        for name, tensor in quantised.items():
            if tensor.dtype != torch.int64:
                raise ExactSumError(f"tensor '{name}' is {tensor.dtype}, not int64: quantise it first")
        if not self.totals:
            return
        if odd := self.totals.keys() ^ quantised.keys():
            raise ExactSumError(f"tensor '{min(odd)}' is on one side only")
        for name, tensor in quantised.items():
            if tensor.shape != self.totals[name].shape:
                raise ExactSumError(
                    f"tensor '{name}' has shape {list(tensor.shape)}, the sum has {list(self.totals[name].shape)}"
                )

    def _bound_after(self, quantised: Mapping[str, Tensor], times: int, checked: bool) -> int:
        """Return an upper bound of the largest entry after the addition. Compute the exact maxima only near the limit."""
        if self.modular:
            return 0
        whole = flat_of(quantised)
        tensors = [whole.vector] if whole is not None else list(quantised.values())
        bound = self._bound + abs(times) * max((_largest(tensor) for tensor in tensors), default=0)
        if not checked or bound <= INT64_MAX:
            return bound
        bound = 0
        for name, tensor in quantised.items():
            here, alone = _largest(self.totals[name]) if name in self.totals else 0, abs(times) * _largest(tensor)
            bound = max(bound, here + alone)
            if bound > INT64_MAX:
                kind = ExactSumError if alone > INT64_MAX else SumOverflowError
                raise kind(f"tensor '{name}' would overflow the exact sum: use fewer scale_bits than {self.bits}")
        return bound


def _largest(tensor: Tensor) -> int:
    """Return the largest absolute value of an int64 tensor as a Python int, which also holds 2**63."""
    if tensor.numel() == 0:
        return 0
    low, high = torch.aminmax(tensor)
    return max(abs(int(low)), abs(int(high)))
