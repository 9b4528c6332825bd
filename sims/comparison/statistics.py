"""Means over seeds, and differences of two methods over the seeds that both have."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

CONFIDENCE = 0.95
ALIKE = 1e-12  # deviation of differences that are the same: they tell nothing of how far others may lie


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (of a sample: n - 1; NaN for one value) of n values."""

    n: int
    mean: float
    deviation: float


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(len(values), statistics.fmean(values), deviation)


@dataclass(frozen=True)
class Difference:
    """The mean of n paired differences, and its confidence interval (NaN for one pair, or where all are the same)."""

    n: int
    mean: float
    low: float
    high: float


def paired(one: Mapping[int, float], other: Mapping[int, float], confidence: float = CONFIDENCE) -> Difference | None:
    """one - other over the seeds that both have, None if there are none.

    The interval is that of the paired t-test: mean ± t(n - 1) * s / sqrt(n), s the differences' standard deviation, t
    Student's quantile. It takes the differences as normally distributed.
    """
    found = spread([one[seed] - other[seed] for seed in one if seed in other] or [math.nan])
    if math.isnan(found.mean):
        return None
    if found.n == 1 or found.deviation < ALIKE:
        return Difference(found.n, found.mean, math.nan, math.nan)
    reach = float(stdtrit(found.n - 1, 0.5 + confidence / 2)) * found.deviation / math.sqrt(found.n)
    return Difference(found.n, found.mean, found.mean - reach, found.mean + reach)
