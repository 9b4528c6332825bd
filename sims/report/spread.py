"""Compute means over seeds and their standard deviations, as text and in plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (of a sample: n - 1; NaN for one value) of n values."""

    n: int
    mean: float
    deviation: float

    @property
    def bar(self) -> float:
        """The deviation as the length of an error bar: 0 for one value."""
        return self.deviation if self.n > 1 else 0.0

    def text(self, digits: int) -> str:
        """Return mean ± deviation with `digits` decimals; for one value, only the mean."""
        deviation = f" ± {self.deviation:.{digits}f}" if self.n > 1 else ""
        return f"{self.mean:.{digits}f}{deviation}"


def spread(values: Sequence[float]) -> Spread:
    """Return the mean and standard deviation of at least one value."""
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return Spread(len(values), statistics.fmean(values), deviation)


def mean_and_spread(values: Sequence[float], share: bool = True) -> str:
    """Return values as text, mean ± standard deviation: shares in % as 83.5 ± 0.7, other numbers with four digits."""
    if share:
        return spread([100 * value for value in values]).text(1)
    found = spread(values)
    return f"{found.mean:.4g}" + (f" ± {found.deviation:.2g}" if found.n > 1 else "")


def mean_line(axes: Axes, series: Mapping[Any, Sequence[float]], **style: Any) -> None:
    """Draw a line through the means, with error bars of one standard deviation. `series`: the values at each x."""
    spreads = [spread(values) for values in series.values()]
    axes.errorbar(list(series), [each.mean for each in spreads], yerr=[each.bar for each in spreads], marker="o",
                  markersize=4, **style)  # fmt: skip
