"""Accuracy over the two coefficients as heat maps: a column for each task, a row for each way of combining."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedloom.sims.report.canvas import INK, new_panels, save

Maps = Mapping[str, Mapping[str, np.ndarray]]  # by way of combining and task
Pairs = Mapping[str, Sequence[Sequence[float]]]  # by way of combining


def draw(maps: Maps, steps: Sequence[float], chosen: Pairs, path: Path) -> Path:
    """`maps`: [alpha, beta] accuracies (fractions of 1), alpha and beta in `steps`; `chosen`: pairs to mark."""
    rows, columns = len(maps), max(len(row) for row in maps.values())
    figure, panels = new_panels(1.2 + 3.3 * columns, 0.6 + 3.0 * rows, rows, columns)
    edge = (steps[1] - steps[0]) / 2
    extent = (steps[0] - edge, steps[-1] + edge, steps[0] - edge, steps[-1] + edge)
    for row, (way, tasks) in enumerate(maps.items()):
        for column, (task, values) in enumerate(tasks.items()):
            axes = panels[row][column]
            picture = axes.imshow(100 * values, origin="lower", extent=extent, cmap="viridis", vmin=0)
            figure.colorbar(picture, ax=axes, shrink=0.85).ax.tick_params(labelsize=7.5, length=0)
            for alpha, beta in chosen.get(way, ()):
                axes.plot(beta, alpha, marker="o", markersize=7, markerfacecolor="none", markeredgecolor="white")
            axes.set_title(f"{way}: accuracy on {task}, %", loc="left", fontsize=9, color=INK)
            axes.set_xlabel("β (second task)", fontsize=8.5)
            axes.set_ylabel("α (first task)", fontsize=8.5)
            axes.tick_params(length=0, labelsize=7.5)
            axes.spines[:].set_visible(False)
    return save(figure, path)
