"""Pictures of the details: accuracy over something that grows, and correlations of channels."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedloom.sims.report.canvas import INK, PALETTE, name_axes, new_figure, percent_axis, save
from fedloom.sims.report.spread import mean_line


def curves(series: Mapping[str, Mapping[str, Sequence[float]]], label: str, path: Path) -> Path:
    """By name, and by place on the axis, accuracies of seeds: a line through means, bars of standard deviations."""
    figure, axes = new_figure(5.6, 3.2)
    for number, (name, points) in enumerate(series.items()):
        mean_line(axes, points, color=PALETTE[number], label=name)
    percent_axis(axes.yaxis)
    axes.set_ylim(0.0, 1.0)
    name_axes(axes, label, "exchanged: test accuracy")
    axes.legend(fontsize=8, frameon=False)
    return save(figure, path)


def blocks(series: Mapping[str, Sequence[float]], path: Path) -> Path:
    """By name the correlations of channels, sorted: a row of cells each."""
    figure, axes = new_figure(5.6, 0.9 + 0.3 * len(series))
    widest = max(len(values) for values in series.values())
    grid = [[*values, *[float("nan")] * (widest - len(values))] for values in series.values()]
    image = axes.imshow(grid, aspect="auto", cmap="RdBu_r", vmin=-1.0, vmax=1.0)
    axes.set_yticks(range(len(series)), list(series), fontsize=8.5)
    axes.set_xlabel("channels, sorted", fontsize=9, color=INK)
    axes.grid(False)
    figure.colorbar(image, ax=axes, label="correlation")
    return save(figure, path)
