"""Pictures of layer selection: the range of given configurations, and a posterior that is fixed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedloom.sims.report.canvas import INK, LIGHT, PALETTE, name_axes, new_figure, percent_axis, save
from fedloom.sims.report.spread import mean_line, spread

Range = tuple[Sequence[float], float, Sequence[float]]  # means of given configurations, of all shared, seeds of LASEM


def ranges(series: Mapping[str, Range], path: Path) -> Path:
    """By base learner a box from the worst to the best configuration, a line where all is shared, and LASEM's mean."""
    figure, axes = new_figure(4.6, 3.2)
    for column, (static, everything, ours) in enumerate(series.values()):
        low, high, around = min(static), max(static), spread(ours)
        axes.bar(column, high - low, bottom=low, width=0.5, color=LIGHT, edgecolor=INK, linewidth=0.8)
        axes.plot([column - 0.25, column + 0.25], [everything] * 2, color=PALETTE[0], linewidth=2.2)
        axes.errorbar(column, around.mean, yerr=around.bar, color=PALETTE[1], marker="o", markersize=6, zorder=3)
    axes.set_xticks(range(len(series)), list(series))
    percent_axis(axes.yaxis)
    axes.set_ylabel("peak accuracy, mean over tasks", fontsize=9, color=INK)
    return save(figure, path)


def over(series: Mapping[float, Sequence[float]], ours: Sequence[float], path: Path) -> Path:
    """Accuracy over the posterior that one configuration has in all steps; LASEM's as a broken line."""
    figure, axes = new_figure(4.6, 3.0)
    mean_line(axes, series, color=PALETTE[0])
    axes.axhline(spread(ours).mean, color=PALETTE[1], linestyle="--", label="LASEM")
    percent_axis(axes.yaxis)
    name_axes(axes, "posterior of top-2, fixed", "peak accuracy, mean over tasks")
    axes.legend(fontsize=8, frameon=False)
    return save(figure, path)
