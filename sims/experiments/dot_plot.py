"""One picture for all pairs of networks: accuracy at once and after fine-tuning, method by method."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.sims.report.canvas import GREY, INK, PALETTE, save

Found = Sequence[Mapping[str, Mapping[str, Any]]]  # of each seed: by method, {"accuracy": [one-shot, after fine-tuning ...]}


def draw(results: Mapping[str, Found], stages: Sequence[str], path: Path) -> Path:
    """A panel for each pair, a line for each method, a dot for each stage (mean over seeds, bar: standard deviation)."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    methods = list(dict.fromkeys(method for found in results.values() for method in found[0]))
    figure = Figure(
        figsize=(2.2 + 2.3 * len(results), 1.4 + 0.32 * len(methods)), dpi=140, layout=ConstrainedLayoutEngine(wspace=0.06)
    )
    panels = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axes, (name, found) in zip(panels, results.items(), strict=True):
        for row, method in enumerate(methods):
            _dots(axes, len(methods) - 1 - row, [one[method]["accuracy"] for one in found if method in one])
        axes.set_title(name, loc="left", fontsize=10, color=INK)
        axes.set_yticks(range(len(methods)), methods[::-1], fontsize=8.5)
        axes.tick_params(axis="both", length=0, labelsize=8.5)
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_visible(False)
    handles = [panels[0].scatter([], [], color=PALETTE[k], s=26, label=stage) for k, stage in enumerate(stages)]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(stages), frameon=False, fontsize=8.5)
    figure.supxlabel("test accuracy, %", fontsize=8.5, color=INK)
    path.parent.mkdir(parents=True, exist_ok=True)
    return save(figure, path)


def _dots(axes: Any, height: float, runs: Sequence[Sequence[float]]) -> None:
    for stage, values in enumerate(zip(*runs, strict=True)):
        mean = 100 * statistics.mean(values)
        spread = 100 * statistics.stdev(values) if len(values) > 1 else 0.0
        axes.errorbar(mean, height, xerr=spread, fmt="none", ecolor=GREY, elinewidth=1.0)
        axes.scatter(mean, height, color=PALETTE[stage], s=26, zorder=3)
