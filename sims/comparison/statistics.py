"""Compute the paired difference of two methods over their common seeds."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from scipy.special import stdtrit

from fedloom.sims.report.spread import spread

CONFIDENCE = 0.95
ALIKE = 1e-12  # a smaller deviation means equal differences, which give no interval


@dataclass(frozen=True)
class Difference:
    """The mean of n paired differences and its confidence interval (NaN for one pair, or if all are equal)."""

    n: int
    mean: float
    low: float
    high: float


def paired(one: Mapping[int, float], other: Mapping[int, float], confidence: float = CONFIDENCE) -> Difference | None:
    """Return the mean of one - other over the common seeds, with its interval; None without common seeds.

    The interval is that of the paired t-test, mean ± t(n - 1) * s / sqrt(n), with the standard deviation s of the
    differences and Student's quantile t. It assumes normally distributed differences.
    """
    differences = spread([one[seed] - other[seed] for seed in one if seed in other] or [math.nan])
    if math.isnan(differences.mean):
        return None
    if differences.n == 1 or differences.deviation < ALIKE:
        return Difference(differences.n, differences.mean, math.nan, math.nan)
    reach = float(stdtrit(differences.n - 1, 0.5 + confidence / 2)) * differences.deviation / math.sqrt(differences.n)
    return Difference(differences.n, differences.mean, differences.mean - reach, differences.mean + reach)
