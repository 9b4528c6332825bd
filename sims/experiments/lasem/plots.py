"""Pictures of layer selection: the range of given configurations, and a posterior that is fixed."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedloom.sims.report.canvas import INK, LIGHT, PALETTE, new_figure, percent_axis, save

Range = tuple[Sequence[float], float, Sequence[float]]  # means of given configurations, of all shared, seeds of LASEM


def ranges(series: Mapping[str, Range], path: Path) -> Path:
    """By base learner a box from the worst to the best configuration, a line where all is shared, and LASEM's mean."""
    figure, axes = new_figure(4.6, 3.2)
    for place, (static, everything, ours) in enumerate(series.values()):
        low, high = min(static), max(static)
        axes.bar(place, high - low, bottom=low, width=0.5, color=LIGHT, edgecolor=INK, linewidth=0.8)
        axes.plot([place - 0.25, place + 0.25], [everything] * 2, color=PALETTE[0], linewidth=2.2)
        spread = statistics.stdev(ours) if len(ours) > 1 else 0.0
        axes.errorbar(place, statistics.fmean(ours), yerr=spread, color=PALETTE[1], marker="o", markersize=6, zorder=3)
    axes.set_xticks(range(len(series)), list(series))
    percent_axis(axes.yaxis)
    axes.set_ylabel("peak accuracy, mean over tasks", fontsize=9, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    return save(figure, path)


def over(series: Mapping[float, Sequence[float]], ours: Sequence[float], path: Path) -> Path:
    """Accuracy over the posterior that one configuration has in all steps; LASEM's as a broken line."""
    figure, axes = new_figure(4.6, 3.0)
    means = [statistics.fmean(values) for values in series.values()]
    spreads = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in series.values()]
    axes.errorbar(list(series), means, yerr=spreads, color=PALETTE[0], marker="o", markersize=4)
    axes.axhline(statistics.fmean(ours), color=PALETTE[1], linestyle="--", label="LASEM")
    percent_axis(axes.yaxis)
    axes.set_xlabel("posterior of top-2, fixed", fontsize=9, color=INK)
    axes.set_ylabel("peak accuracy, mean over tasks", fontsize=9, color=INK)
    axes.legend(fontsize=8, frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    return save(figure, path)
