"""Differential privacy: clip a site's change of a round and add noise, before anything is sent.

The discrete Gaussian mechanism (Canonne, Kamath and Steinke 2020) in units of 2**-scale_bits, like the server's sums.
So floating-point rounding cannot undo the noise. Neighbours are runs in which a site sends its change of a round, or
none (zero-out of a whole site). Under secure aggregation the noise is that of the sum: each site adds its part
(Kairouz, Liu and Steinke 2021). That is enough if no more sites drop out than the round allows. Noise is drawn from
the operating system's random source, never from the run's seed.
"""

import functools
import math
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedloom.clients.job import Job
from fedloom.clients.privacy.changes import Changes
from fedloom.clients.privacy.secure_aggregation.primitives import secret, stream
from fedloom.clients.protocol.failures import SpentError
from fedloom.conf.errors import UserError
from fedloom.conf.schema import PrivacyConfig
from fedloom.fusion.state import State

LEAST_PART = 2.0  # units of a site's part: the sum of such parts differs from a discrete Gaussian by less than 1e-16
LEAST_DEVIATION = 0.02  # exp(-1 / (2 * 0.02**2)) is below 1e-500
MOST_DEVIATION = 2.0**50  # in units of 2**-scale_bits
MOST_DELTA = 1e-5  # for a site's own limit, whatever delta a run reports


def private(changed: Changes, bits: int, privacy: PrivacyConfig, share: float = 1.0) -> dict[str, State]:
    """Return the records with differential privacy: begin + clip(moved) + noise, all clipped together (L2 norm).

    `bits`: results are int64, in units of 2**-bits. `share`: the share of the noise's variance that this site adds.
    Raise UserError if the site's part of the noise is so small that all parts do not sum to a discrete Gaussian.
    """
    entries = sum(tensor.numel() for tensor in changed.tensors())
    room = privacy.clip * 2.0**bits - math.sqrt(entries)  # rounding moves every entry by less than one unit
    norm = math.hypot(*(float(tensor.double().norm()) for tensor in changed.tensors()))
    factor, deviation = min(1.0, max(0.0, room) / norm) if norm else 1.0, privacy.noise * privacy.clip * 2.0**bits
    part = deviation * math.sqrt(share)
    if share < 1.0 and part < LEAST_PART:
        raise UserError(f"privacy: a site's part of the noise is {part:.2g} units of 2**-{bits}, but {LEAST_PART:g} are "
                        "needed; set a larger federation.scale_bits, privacy.clip or privacy.noise")  # fmt: skip
    sizes = [tensor.numel() for state in changed.moved.values() for tensor in state.values()]
    drawn = iter(discrete_gaussian(part, entries).split(sizes))
    begin = changed.begin
    return {record: {name: begin[record][name] + (tensor.double() * factor).round().long() + next(drawn).view(tensor.shape)
                     for name, tensor in state.items()} for record, state in changed.moved.items()}  # fmt: skip


def discrete_gaussian(deviation: float, count: int) -> Tensor:
    """Draw int64 [count] from the discrete Gaussian: k has a probability proportional to exp(-k**2 / (2 deviation**2)).

    Canonne, Kamath and Steinke 2020, Alg. 1 to 3, for all entries at once, with probabilities of 53 bits.
    """
    if not 0 < deviation < MOST_DEVIATION:
        raise UserError(
            f"privacy.noise: noise of {deviation:g} units cannot be drawn; change privacy or federation.scale_bits"
        )
    if deviation < LEAST_DEVIATION:  # no number except 0 has a probability that could be drawn
        return torch.zeros(count, dtype=torch.int64)
    draws, scale = np.empty(0, dtype=np.int64), int(deviation) + 1
    while len(draws) < count:
        number = int(1.5 * (count - len(draws))) + 64
        laplace = _discrete_laplace(scale, number)
        off = (np.abs(laplace).astype(np.float64) - deviation**2 / scale) ** 2 / (2 * deviation**2)
        draws = np.concatenate([draws, laplace[_uniform(len(laplace)) < np.exp(-off)]])
    return torch.from_numpy(draws[:count])


def epsilon(times: Mapping[float, int], delta: float) -> float:
    """Return the epsilon of `times`, the number of rounds by noise multiplier, by dp-accounting's Renyi accountant."""
    return _epsilon(tuple(sorted(times.items())), delta)


def spend(job: Job) -> float:
    """Charge one more round to this site. Returns the epsilon of its rounds in all runs. Raise SpentError above a limit."""
    privacy, own = job.config.privacy, job.policy.epsilon

    def check(times: Mapping[float, int]) -> None:
        limits = [("privacy.epsilon", epsilon(times, privacy.delta), privacy.epsilon)]
        limits += [("site.yaml: epsilon", epsilon(times, min(privacy.delta, MOST_DELTA)), own)] if own else []
        for key, cost, limit in limits:
            if limit and cost > limit:
                spent = f"another round would cost {cost:.3g} in total, over all runs, above the limit {limit:g}"
                raise SpentError(f"{key}: {spent}", key)

    return epsilon(job.memory.spend(privacy.noise, check), privacy.delta)


@functools.lru_cache
def _epsilon(times: tuple[tuple[float, int], ...], delta: float) -> float:
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant()
    for noise, count in times:
        accountant.compose(dp_accounting.GaussianDpEvent(noise), count)
    return float(accountant.get_epsilon(delta))


def _discrete_laplace(scale: int, count: int) -> NDArray[np.int64]:
    """Return about `count` draws, each k with a probability proportional to exp(-|k| / scale) (Alg. 2)."""
    fine = (_secret_integers(count) % np.uint64(scale)).astype(np.int64)  # uniform up to a share of scale * 2**-64
    fine = fine[_uniform(count) < np.exp(-fine / scale)]
    coarse = np.floor(-np.log1p(-_uniform(len(fine)))).astype(np.int64)  # geometric: P(k) proportional to exp(-k)
    size, minus = fine + scale * coarse, _secret_integers(len(fine)) % np.uint64(2) == 1
    keep = ~(minus & (size == 0))
    return np.where(minus, -size, size)[keep]


def _uniform(count: int) -> NDArray[np.float64]:
    """Return multiples of 2**-53 in [0, 1)."""
    return (_secret_integers(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _secret_integers(count: int) -> NDArray[np.uint64]:
    """Return secret random integers of 64 bits."""
    return np.frombuffer(stream(secret(), 8 * count), dtype=np.uint64)
