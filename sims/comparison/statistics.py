"""Differences of two methods over the seeds that both have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.special import stdtrit

from fedloom.sims.report.spread import spread

CONFIDENCE = 0.95
ALIKE = 1e-12  # deviation of differences that are the same: they tell nothing of how far others may lie


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
    apart = spread([one[seed] - other[seed] for seed in one if seed in other] or [math.nan])
    if math.isnan(apart.mean):
        return None
    if apart.n == 1 or apart.deviation < ALIKE:
        return Difference(apart.n, apart.mean, math.nan, math.nan)
    reach = float(stdtrit(apart.n - 1, 0.5 + confidence / 2)) * apart.deviation / math.sqrt(apart.n)
    return Difference(apart.n, apart.mean, apart.mean - reach, apart.mean + reach)
