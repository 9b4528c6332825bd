"""The pictures of all reproductions: dots by method, curves, heat maps, correlations of channels, ranges."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.sims.report.canvas import GREY, INK, LIGHT, PALETTE, name_axes, new_figure, new_panels, percent_axis, save
from fedloom.sims.report.spread import mean_line, spread

Seeds = Sequence[Mapping[str, Sequence[float]]]  # of each seed: by method, the accuracy at every stage
Range = tuple[Sequence[float], float, Sequence[float]]  # fixed configurations' means, the mean of "all", LASEM by seed


def dots(results: Mapping[str, Seeds], stages: Sequence[str], path: Path) -> Path:
    """Draw a panel for each pair of networks, a line for each method, and a dot with a bar for each stage."""
    methods = list(dict.fromkeys(method for seeds in results.values() for method in seeds[0]))
    size = 2.2 + 2.3 * len(results), 1.4 + 0.32 * len(methods)
    figure, (panels,) = new_panels(*size, 1, len(results), sharey=True)
    figure.get_layout_engine().set(wspace=0.06)  # pyright: ignore
    for axes, (name, seeds) in zip(panels, results.items(), strict=True):
        for row, method in enumerate(methods):
            runs = [seed[method] for seed in seeds if method in seed]
            for stage, values in enumerate(zip(*runs, strict=True)):
                around, height = spread([100 * value for value in values]), len(methods) - 1 - row
                axes.errorbar(around.mean, height, xerr=around.bar, fmt="none", ecolor=GREY, elinewidth=1.0)
                axes.scatter(around.mean, height, color=PALETTE[stage], s=26, zorder=3)
        axes.set_title(name, loc="left", fontsize=10, color=INK)
        axes.set_yticks(range(len(methods)), methods[::-1], fontsize=8.5)
        axes.tick_params(axis="both", length=0, labelsize=8.5)
        axes.grid(axis="x", color="#DDDDDD", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[:].set_visible(False)
    handles = [panels[0].scatter([], [], color=PALETTE[k], s=26, label=stage) for k, stage in enumerate(stages)]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(stages), frameon=False, fontsize=8.5)
    figure.supxlabel("test accuracy, %", fontsize=8.5, color=INK)
    return save(figure, path)


def curves(series: Mapping[str, Mapping[Any, Sequence[float]]], labels: tuple[str, str], path: Path,
           flat: Mapping[str, float] | None = None, limits: tuple[float, float] | None = None) -> Path:  # fmt: skip
    """Draw a line for each series, with bars for deviations over seeds.

    Args:
        series: By name and x value, the results of all seeds.
        labels: The labels of the axes.
        path: The file to write.
        flat: By name, values that are drawn as broken horizontal lines.
        limits: The limits of the y axis.
    """
    figure, axes = new_figure(5.6, 3.2)
    for number, (name, points) in enumerate(series.items()):
        mean_line(axes, points, color=PALETTE[number], label=name)
    for number, (name, height) in enumerate((flat or {}).items()):
        axes.axhline(height, color=INK, linewidth=0.9, linestyle=("--", "-.", ":")[number], label=name)
    percent_axis(axes.yaxis)
    if limits:
        axes.set_ylim(*limits)
    name_axes(axes, *labels)
    axes.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save(figure, path)


def blocks(series: Mapping[str, Sequence[float]], path: Path) -> Path:
    """Draw the sorted correlations of channels as a row of cells for each name."""
    figure, axes = new_figure(5.6, 0.9 + 0.3 * len(series))
    widest = max(len(values) for values in series.values())
    grid = [[*values, *[float("nan")] * (widest - len(values))] for values in series.values()]
    image = axes.imshow(grid, aspect="auto", cmap="RdBu_r", vmin=-1.0, vmax=1.0)
    axes.set_yticks(range(len(series)), list(series), fontsize=8.5)
    axes.set_xlabel("channels, sorted", fontsize=9, color=INK)
    axes.grid(False)
    figure.colorbar(image, ax=axes, label="correlation")
    return save(figure, path)


def heat_maps(maps: Mapping[str, Mapping[str, np.ndarray]], steps: Sequence[float],
              marks: Mapping[str, Sequence[Sequence[float]]], path: Path) -> Path:  # fmt: skip
    """Draw a grid of heat maps of accuracies.

    Args:
        maps: By way of combining (row) and task (column), accuracies [alpha, beta].
        steps: The values of alpha and of beta.
        marks: By way of combining, points to mark with circles.
        path: The file to write.
    """
    rows, columns = len(maps), max(len(row) for row in maps.values())
    figure, panels = new_panels(1.2 + 3.3 * columns, 0.6 + 3.0 * rows, rows, columns)
    low, high = steps[0] - (edge := (steps[1] - steps[0]) / 2), steps[-1] + edge
    for row, (way, tasks) in enumerate(maps.items()):
        for column, (task, values) in enumerate(tasks.items()):
            axes = panels[row][column]
            picture = axes.imshow(100 * values, origin="lower", extent=(low, high, low, high), cmap="viridis", vmin=0)
            figure.colorbar(picture, ax=axes, shrink=0.85).ax.tick_params(labelsize=7.5, length=0)
            for alpha, beta in marks.get(way, ()):
                axes.plot(beta, alpha, marker="o", markersize=7, markerfacecolor="none", markeredgecolor="white")
            axes.set_title(f"{way}: accuracy on {task}, %", loc="left", fontsize=9, color=INK)
            name_axes(axes, "β (second task)", "α (first task)")
            axes.tick_params(length=0, labelsize=7.5)
            axes.spines[:].set_visible(False)
    return save(figure, path)


def ranges(series: Mapping[str, Range], path: Path) -> Path:
    """Draw, by base learner, a box from the worst to the best fixed configuration, a line for "all", and LASEM's mean."""
    figure, axes = new_figure(4.6, 3.2)
    for column, (fixed, everything, lasem) in enumerate(series.values()):
        low, high, around = min(fixed), max(fixed), spread(lasem)
        axes.bar(column, high - low, bottom=low, width=0.5, color=LIGHT, edgecolor=INK, linewidth=0.8)
        axes.plot([column - 0.25, column + 0.25], [everything] * 2, color=PALETTE[0], linewidth=2.2)
        axes.errorbar(column, around.mean, yerr=around.bar, color=PALETTE[1], marker="o", markersize=6, zorder=3)
    axes.set_xticks(range(len(series)), list(series))
    percent_axis(axes.yaxis)
    axes.set_ylabel("peak accuracy, mean over tasks", fontsize=9, color=INK)
    return save(figure, path)
