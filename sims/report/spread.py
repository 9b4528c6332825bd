"""Means over seeds with their standard deviations."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (of a sample: n - 1; NaN for one value) of n values."""

    n: int
    mean: float
    deviation: float

    @property
    def bar(self) -> float:
        """The deviation as the length of a bar: 0 for one value."""
        return self.deviation if self.n > 1 else 0.0

    def text(self, digits: int) -> str:
        """Mean ± deviation with so many digits; of one value the mean alone."""
        around = f" ± {self.deviation:.{digits}f}" if self.n > 1 else ""
        return f"{self.mean:.{digits}f}{around}"


def spread(values: Sequence[float]) -> Spread:
    """Of at least one value."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(len(values), statistics.fmean(values), deviation)


def mean_and_spread(fractions: Sequence[float]) -> str:
    """Accuracies as text, in %: mean ± standard deviation; 83.5 ± 0.7."""
    return spread([100 * fraction for fraction in fractions]).text(1)
