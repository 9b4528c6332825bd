"""The rows as a picture: tasks per second and start-up, a dot for each engine in each case."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.sims.benchmarks.engine_cases import COMPILED, SUMS
from fedloom.sims.benchmarks.engine_measure import Row
from fedloom.sims.report.canvas import INK, PALETTE, new_panels, plain, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(("ray", "stock", "inline", "loop-1", "loop-2", SUMS, COMPILED), PALETTE, strict=False))
PANELS = (
    ("tasks_per_s", "tasks per second", "log"),
    ("startup_s", "seconds from launch to the end of round 1", "linear"),
)


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Write the PNG; returns its path."""
    cases = list(dict.fromkeys(row.case for row in rows))
    figure, (panels,) = new_panels(11, 1.6 + 0.5 * len(cases), 1, len(PANELS), sharey=True)
    for axes, (column, label, scale) in zip(panels, PANELS, strict=True):
        _dots(axes, rows, cases, column)
        axes.set_xscale(scale)
        axes.set_xlabel(label, color=INK)
    panels[1].set_xlim(left=0)
    panels[0].set_yticks(range(len(cases)), cases)
    panels[0].set_ylim(len(cases) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle("Engines side by side", x=0.01, ha="left", fontsize=12, color=INK)
    return save(figure, path)


def _dots(axes: Axes, rows: Sequence[Row], cases: list[str], column: str) -> None:
    for engine, colour in COLOURS.items():
        points = [(getattr(row, column), cases.index(row.case)) for row in rows if row.engine == engine]
        points = [(value, height) for value, height in points if value is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), s=60, color=colour, edgecolor="white", label=engine, zorder=2)
    plain(axes)
    axes.tick_params(which="minor", length=0)
