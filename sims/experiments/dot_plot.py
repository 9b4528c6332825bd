"""One picture for all pairs of networks: accuracy at once and after fine-tuning, method by method."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedloom.sims.report.canvas import GREY, INK, PALETTE, new_panels, save
from fedloom.sims.report.spread import spread

Seeds = Sequence[Mapping[str, Mapping[str, Any]]]  # of each seed: by method, {"accuracy": [one-shot, after fine-tuning ...]}


def draw(results: Mapping[str, Seeds], stages: Sequence[str], path: Path) -> Path:
    """A panel for each pair, a line for each method, a dot for each stage (mean over seeds, bar: standard deviation)."""
    methods = list(dict.fromkeys(method for seeds in results.values() for method in seeds[0]))
    size = 2.2 + 2.3 * len(results), 1.4 + 0.32 * len(methods)
    figure, (panels,) = new_panels(*size, 1, len(results), sharey=True)
    figure.get_layout_engine().set(wspace=0.06)  # pyright: ignore
    for axes, (name, seeds) in zip(panels, results.items(), strict=True):
        for row, method in enumerate(methods):
            _dots(axes, len(methods) - 1 - row, [seed[method]["accuracy"] for seed in seeds if method in seed])
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
    return save(figure, path)


def _dots(axes: Any, height: float, runs: Sequence[Sequence[float]]) -> None:
    for stage, values in enumerate(zip(*runs, strict=True)):
        around = spread([100 * value for value in values])
        axes.errorbar(around.mean, height, xerr=around.bar, fmt="none", ecolor=GREY, elinewidth=1.0)
        axes.scatter(around.mean, height, color=PALETTE[stage], s=26, zorder=3)
