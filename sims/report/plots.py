"""Draw the plots of a run: accuracy over rounds, the effect of forgetting, every network on every domain.

Each plot has its own Figure with the Agg canvas. matplotlib is imported only when a plot is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.conf.metrics import Facts
from fedloom.server.run_folder.scores import metric_of
from fedloom.sims.report.canvas import (
    GREY,
    INK,
    KINDS,
    PALETTE,
    Grid,
    draw_bars,
    frame_cells,
    name_ticks,
    new_figure,
    new_panels,
    plain,
    save,
    score_of,
    short,
    value_axis,
    within_bounds,
    write_numbers,
)
from fedloom.sims.report.curves import Records, accuracy_figure
from fedloom.sims.report.errors import against_figure, confusion_figure
from fedloom.sims.report.heads import exchanges, heads_figure
from fedloom.sims.report.results import accuracies, before_forgetting, columns_of, has_aggregate, homes
from fedloom.sims.report.selection import selection_figure, selections
from fedloom.sims.report.sites import classes_figure, spread_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

MAX_PANELS = 6
MAX_DOTS = 14
MAX_NUMBERS = 24
MAX_FRAMES = 65
LEAST_CHANGE = 0.05  # of the darkest colour


def draw_all(
    folder: Path,
    metrics: list[dict[str, Any]],
    summary: dict[str, Any],
    baselines: Mapping[str, Records] | None = None,
    kinds: Iterable[str] = (),
    forgotten: Mapping[int, str] | None = None,
) -> list[Path]:
    """Draw all plots that the results allow into `folder`/plots; delete others. Return their paths, `accuracy.png` first.

    `baselines`: the metrics of each baseline, by name. `kinds`: of files besides PNG; curves have an SVG file in any case.
    `forgotten`: the sites that were forgotten after a round, by the round.
    """
    target = folder / "plots"
    target.mkdir(parents=True, exist_ok=True)
    figures = {
        "accuracy.png": accuracy_figure(metrics, baselines, has_aggregate(summary), forgotten),
        "forgetting.png": forgetting_figure(summary),
        "sites.png": sites_figure(summary),
        "per_site.png": spread_figure(summary),
        "confusion.png": confusion_figure(summary),
        "against.png": against_figure(summary),
        "classes.png": classes_figure(summary),
        "layers.png": selection_figure(selections(summary)),
        "heads.png": heads_figure(exchanges(summary), homes(summary)),
    }
    for name in (name for name, figure in figures.items() if figure is None):
        for kind in KINDS:  # of an earlier report, such as the classes of a site that is forgotten now
            (target / name).with_suffix(f".{kind}").unlink(missing_ok=True)
    also = {"accuracy.png": {*kinds, "svg"}}  # pages can hide its curves
    return [save(figure, target / name, also.get(name, kinds)) for name, figure in figures.items() if figure is not None]


def forgetting_figure(summary: Mapping[str, Any]) -> Figure | None:
    """Plot the first metric per domain before and after forgetting each site; None without such results."""
    forgotten, before = summary.get("forgotten") or {}, before_forgetting(summary)
    if not forgotten or not before:
        return None
    columns, metric = columns_of(summary), metric_of(summary)
    if len(forgotten) <= MAX_PANELS and len(columns) <= MAX_DOTS:
        return _forgetting_panels(forgotten, before, columns, homes(summary), metric)
    changes = [[score_of(scores, name) - score_of(before, name) for name in columns] for scores in forgotten.values()]
    title = "Change after forgetting a site"
    return _heat_map(changes, list(forgotten), columns, homes(summary), title, metric, change=True)


def sites_figure(summary: Mapping[str, Any]) -> Figure | None:
    """Plot the first metric of every network on every domain as a heat map; None if not measured, or for a single number."""
    scores, columns = accuracies(summary), columns_of(summary)
    if len(scores) * len(columns) < 2:
        return None
    grid = [[score_of(row, name) for name in columns] for row in scores.values()]
    metric = metric_of(summary)
    return _heat_map(grid, list(scores), columns, homes(summary), f"Test {metric.title} of every network", metric)


def _forgetting_panels(
    forgotten: Mapping[str, Mapping[str, float]], before: Mapping[str, float], names: list[str], held: Mapping[str, str],
    metric: Facts,
) -> Figure:  # fmt: skip
    """Draw a panel per forgotten site: for each domain a hollow dot before, a filled dot after, and a line between."""
    across = min(3, len(forgotten))
    down = math.ceil(len(forgotten) / across)
    height = down * (0.9 + 0.34 * len(names)) + 0.9
    figure, panels = new_panels(max(5.0, 1.6 + 3.3 * across), height, down, across, len(forgotten), sharey=True)
    for panel, (site, after) in zip(panels.flat, forgotten.items(), strict=False):
        for index, name in enumerate(names):
            colour = PALETTE[1] if name == held.get(site) else INK if name == "union" else PALETTE[0]
            _dots(panel, index, score_of(before, name), score_of(after, name), colour)
        panel.set_yticks(range(len(names)), [short(name) for name in names])
        panel.set_ylim(len(names) - 0.4, -0.6)
        if metric.share:
            panel.set_xlim(-0.04, 1.04)
            panel.set_xticks([0, 0.25, 0.5, 0.75, 1])
        else:
            panel.set_xlim(*_range([score_of(scores, name) for scores in (before, *forgotten.values()) for name in names]))
            panel.locator_params(axis="x", nbins=4)
        value_axis(panel.xaxis, metric)
        within_bounds(panel.xaxis, metric)
        panel.set_title(f"without {short(site)}", loc="left", fontsize=10, color=INK)
        plain(panel)
    _legend(figure, names)
    figure.suptitle(f"Test {metric.title} before and after forgetting a site", x=0.01, ha="left", fontsize=12, color=INK)
    return figure


def _range(values: Sequence[float]) -> tuple[float, float]:
    """Return the limits of an axis for all panels. They are so wide that a change of a hundredth looks small."""
    known = [value for value in values if math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=1.0)
    margin = max(0.06 * (high - low), 0.05 * max(abs(low), abs(high))) or 1.0
    return low - margin, high + margin


def _dots(axes: Axes, height: int, before: float, after: float, colour: str) -> None:
    axes.plot([before, after], [height, height], color=colour, linewidth=2, alpha=0.45, zorder=1)
    axes.scatter([before], [height], s=52, facecolor="white", edgecolor=colour, linewidth=1.5, zorder=2)
    axes.scatter([after], [height], s=26, color=colour, zorder=3)


def _legend(figure: Figure, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    def dot(colour: str, inside: str, label: str) -> Line2D:
        return Line2D([], [], linestyle="", marker="o", color=colour, markerfacecolor=inside, label=label)

    entries = [
        dot(GREY, "white", "before"),
        dot(GREY, GREY, "after"),
        dot(PALETTE[1], PALETTE[1], "the forgotten site's domain"),
        *([dot(PALETTE[0], PALETTE[0], "other domains")] if len({*names} - {"union"}) > 1 else []),
        *([dot(INK, INK, "union")] if "union" in names else []),
    ]
    figure.legend(handles=entries, loc="outside lower left", ncols=5, frameon=False, fontsize=8.5, handletextpad=0.1)


def alignment_figure(
    cost: NDArray,
    rows: list[str],
    columns: list[str],
    pairs: Mapping[int, int],
    groups: Sequence[int],
    shown: Sequence[str],
    path: Path,
) -> Path:
    """Draw the costs between layers as a heat map into the PNG `path`; return it.

    `pairs` (row: column) are framed. `shown`: the names of both networks.
    """
    figure, axes = new_figure(max(6.0, 2.6 + 0.5 * len(columns)), max(3.0, 1.7 + 0.34 * len(rows)))
    picture = axes.imshow(cost, cmap="Blues", vmin=0.0, aspect="auto", interpolation="nearest")
    name_ticks(axes, rows, columns)
    axes.set_ylabel(f"layers of {short(shown[0])}", fontsize=9, color=INK)
    axes.set_title(f"layers of {short(shown[1])}", fontsize=9, color=INK)
    frame_cells(axes, [(column, row) for row, column in pairs.items()], PALETTE[1])
    for row in range(1, len(rows)):
        if groups[row] != groups[row - 1]:
            axes.axhline(row - 0.5, color=GREY, linewidth=0.8)
    bar = figure.colorbar(picture, ax=axes, pad=0.02)
    bar.outline.set(visible=False)
    figure.suptitle("Cost between layers", x=0.01, ha="left", fontsize=12, color=INK)
    figure.supxlabel(
        "framed: the chosen map; lines: borders of groups that the map may not cross",
        x=0.01,
        ha="left",
        fontsize=8.5,
        color=INK,
    )
    return save(figure, path)


def _heat_map(
    grid: Grid, rows: list[str], names: list[str], held: Mapping[str, str], title: str, metric: Facts, change: bool = False
) -> Figure:
    """Draw `grid` as a heat map, with numbers if they fit. Frames mark each site's own domain. `change`: has both signs."""
    if len(rows) == 1:
        return _bars(grid[0], rows[0], names, f"{title}: {rows[0]}" if change else title, metric, change)
    numbers = len(rows) <= MAX_NUMBERS and len(names) <= MAX_NUMBERS
    width = min(16.0, 2.6 + (0.74 if numbers else 0.4) * len(names))
    figure, axes = new_figure(max(6.0, width), min(14.0, 1.7 + (0.34 if numbers else 0.2) * len(rows)))
    changes = [abs(value) for row in grid for value in row if not math.isnan(value)]
    reach = (max(changes, default=0.0) or 1.0) if change or not metric.share else 1.0
    if change and metric.share:
        reach = max(reach, LEAST_CHANGE)  # small changes look small
    low, colours = (-reach, "RdBu") if change else (0.0, "Blues")
    picture = axes.imshow(grid, cmap=colours, vmin=low, vmax=reach, aspect="auto", interpolation="nearest")
    name_ticks(axes, rows, names)
    if numbers:
        sign, form, unit = "+" if change else "", ".1f" if metric.share else ".3g", 100.0 if metric.share else 1.0
        write_numbers(axes, grid, reach, f"{sign}{form}", unit)
    if len(rows) <= MAX_FRAMES:
        places = [(names.index(held[row]), y) for y, row in enumerate(rows) if held.get(row) in names]
        frame_cells(axes, places, INK if change else PALETTE[4])
    bar = figure.colorbar(picture, ax=axes, shrink=min(1.0, 6 / figure.get_figheight()), pad=0.02)
    value_axis(bar.ax.yaxis, metric, "" if change else "%")
    bar.outline.set(visible=False)
    bar.ax.tick_params(length=0, labelsize=8.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    points, percent = (", in percentage points", " in %") if metric.share else ("", "")
    legend = f"test {metric.title} after - before{points}" if change else f"test {metric.title}{percent}"
    framed = "; framed: the site's own domain" if len(rows) <= MAX_FRAMES else ""
    figure.supxlabel(legend + framed, x=0.01, ha="left", fontsize=8.5, color=INK)
    return figure


def _bars(values: Sequence[float], row: str, names: list[str], title: str, metric: Facts, change: bool) -> Figure:
    """Draw the values of a single network or site as horizontal bars, with numbers. `change`: they have both signs."""
    figure, axes = new_figure(6.0, min(14.0, 1.4 + 0.34 * len(names)))
    texts = [f"{value * (100 if metric.share else 1):+.3g}" if change else metric.text(value) for value in values]
    draw_bars(axes, names, values, [INK if name == "union" else PALETTE[0] for name in names], texts)
    value_axis(axes.xaxis, metric, "" if change else "%")
    if not change:
        within_bounds(axes.xaxis, metric)
    points = ", in percentage points" if metric.share else ""
    axes.set_xlabel(f"test {metric.title} after - before{points}" if change else f"test {metric.title} of {short(row)}")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    return figure
