"""Differential privacy of what leaves a site: the change of a round is clipped, and noise is added, before anything is sent.

The discrete Gaussian mechanism (Canonne, Kamath and Steinke 2020), in units of 2**-scale_bits as the server's sums are, so
that no rounding of floating-point numbers undoes it. Neighbours are runs in which a site sends its change of a round, or
none (zero-out of a whole site). Under secure aggregation the noise is that of the sum: each site adds its part of it
(Kairouz, Liu and Steinke 2021), enough if no more sites drop out than the round bears.
Noise is drawn from the operating system's secrets, never from the run's seed.
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
from fedloom.conf.errors import UserError
from fedloom.conf.schema import PrivacyConfig
from fedloom.fusion.state import State

LEAST_PART = 2.0  # units, of a site's part: the sum of such parts differs from a discrete Gaussian by less than 1e-16
LEAST_DEVIATION = 0.02  # exp(-1 / (2 * 0.02**2)) is below 1e-500
MOST_DEVIATION = 2.0**50  # in units of 2**-scale_bits
MOST_DELTA = 1e-5  # with which a site's own limit is kept, whatever delta a run tells epsilon for


def private(changed: Changes, bits: int, privacy: PrivacyConfig, share: float = 1.0) -> dict[str, State]:
    """What a site sends in place of its records: begin + clip(moved) + noise, all records clipped together (L2 norm).

    int64, in units of 2**-bits. `share`: of the noise's variance, that this site adds. UserError for a part of the noise
    that is so small that the parts of all sites do not add up to a discrete Gaussian.
    """
    entries = sum(one.numel() for one in changed.tensors())
    room = privacy.clip * 2.0**bits - math.sqrt(entries)  # rounding moves every entry by less than one unit
    norm = math.hypot(*(float(one.double().norm()) for one in changed.tensors()))
    factor, deviation = min(1.0, max(0.0, room) / norm) if norm else 1.0, privacy.noise * privacy.clip * 2.0**bits
    part = deviation * math.sqrt(share)
    if share < 1.0 and part < LEAST_PART:
        raise UserError(f"privacy: a site's part of the noise is {part:.2g} units of 2**-{bits}, and {LEAST_PART:g} are "
                        "needed; set a larger federation.scale_bits, privacy.clip or privacy.noise")  # fmt: skip
    sizes = [one.numel() for state in changed.moved.values() for one in state.values()]
    drawn = iter(discrete_gaussian(part, entries).split(sizes))
    begin = changed.begin
    return {record: {name: begin[record][name] + (one.double() * factor).round().long() + next(drawn).view(one.shape)
                     for name, one in state.items()} for record, state in changed.moved.items()}  # fmt: skip


def discrete_gaussian(deviation: float, count: int) -> Tensor:
    """int64 [count], each k with a probability in proportion to exp(-k**2 / (2 deviation**2)).

    Canonne, Kamath and Steinke 2020, Alg. 1 to 3, for all entries at once, with probabilities of 53 bits.
    """
    if not 0 < deviation < MOST_DEVIATION:
        raise UserError(
            f"privacy.noise: noise of {deviation:g} units cannot be drawn; change privacy or federation.scale_bits"
        )
    if deviation < LEAST_DEVIATION:  # no number but 0 has a probability that could be drawn
        return torch.zeros(count, dtype=torch.int64)
    found, scale = np.empty(0, dtype=np.int64), int(deviation) + 1
    while len(found) < count:
        number = int(1.5 * (count - len(found))) + 64
        laplace = _discrete_laplace(scale, number)
        off = (np.abs(laplace).astype(np.float64) - deviation**2 / scale) ** 2 / (2 * deviation**2)
        found = np.concatenate([found, laplace[_uniform(len(laplace)) < np.exp(-off)]])
    return torch.from_numpy(found[:count])


def epsilon(times: Mapping[float, int], delta: float) -> float:
    """Epsilon of so many rounds with each noise multiplier, by dp-accounting's Renyi accountant."""
    return _epsilon(tuple(sorted(times.items())), delta)


def spend(job: Job) -> float:
    """Note one more round of this site, in whatever run; the epsilon of all of them. UserError if that is too much."""
    privacy, own = job.config.privacy, job.policy.epsilon

    def check(times: Mapping[float, int]) -> None:
        limits = [(epsilon(times, privacy.delta), privacy.epsilon)]
        limits += [(epsilon(times, min(privacy.delta, MOST_DELTA)), own)] if own else []
        for cost, limit in limits:
            if limit and cost > limit:
                raise UserError(f"privacy.epsilon: another round would cost {cost:.3g} in all, and the limit is {limit:g}")

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
    """About `count` draws, each k with a probability in proportion to exp(-|k| / scale) (Alg. 2)."""
    fine = (_words(count) % np.uint64(scale)).astype(np.int64)  # uniform up to a share of scale * 2**-64
    fine = fine[_uniform(count) < np.exp(-fine / scale)]
    coarse = np.floor(-np.log1p(-_uniform(len(fine)))).astype(np.int64)  # geometric: P(k) in proportion to exp(-k)
    size, minus = fine + scale * coarse, _words(len(fine)) % np.uint64(2) == 1
    keep = ~(minus & (size == 0))
    return np.where(minus, -size, size)[keep]


def _uniform(count: int) -> NDArray[np.float64]:
    """Multiples of 2**-53 in [0, 1)."""
    return (_words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _words(count: int) -> NDArray[np.uint64]:
    """Whole numbers of 64 bits that nobody can guess."""
    return np.frombuffer(stream(secret(), 8 * count), dtype=np.uint64)
