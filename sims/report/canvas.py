"""Shared parts of all plots: figures with the Agg canvas, colours, percent axes, short labels."""

from __future__ import annotations

import contextlib
import math
import os
import re
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.conf.metrics import Facts
from fedloom.sims.report.tables import clean, shortened

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours for the colour-blind, and two more
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31")
KINDS = ("png", "svg", "pdf")  # of pictures in files
BEYOND = 0.015  # of an axis, beyond a metric's bounds; no tick is there
DPI = 160  # of PNG files
CURVE = "curve "  # begins the id in an SVG file of what belongs to a curve; its name follows
MOST_LABEL = 30  # characters of a bar's name
MISSING = re.compile(r"Glyph (\d+) .*missing from")  # matplotlib's warning
INK, GREY, LIGHT = "#222222", "#8A8A8A", "#DDDDDD"
Grid = list[list[float]]  # rows of a heat map: shares, NaN for an empty cell


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a Figure of `width` x `height` inches with one plain Axes."""
    figure = _blank(width, height)
    axes = figure.add_subplot()
    plain(axes)
    return figure, axes


def new_panels(width: float, height: float, down: int, across: int, used: int = 0, **shared: Any) -> tuple[Figure, Any]:
    """Return a figure with a grid of axes.

    Args:
        width: Inches.
        height: Inches.
        down: The number of rows.
        across: The number of columns.
        used: Only this number of axes are visible; 0: all.
    """
    figure = _blank(width, height)
    panels = figure.subplots(down, across, squeeze=False, **shared)
    for panel in list(panels.flat)[used:] if used else ():
        panel.set_visible(False)
    return figure, panels


def _blank(width: float, height: float) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def plain(axes: Axes) -> None:
    """Give the axes thin grey lines and no frame."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT)
    axes.grid(color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=10, labelcolor=INK)


def percent_axis(axis: Any, symbol: str = "%") -> None:
    """Label an axis of shares, from 0 to 1, in per cent."""
    axis.set_major_formatter(lambda share, _: f"{round(100 * share, 6):g}{symbol}")


def value_axis(axis: Any, metric: Facts, symbol: str = "%") -> None:
    """Label an axis of a metric's values: shares in per cent, other numbers as they are."""
    if metric.share:
        percent_axis(axis, symbol)


def within_bounds(axis: Any, metric: Facts) -> None:
    """End an axis of a metric's values at the largest and smallest possible value, with room for half a marker."""
    (low, high), bounds = axis.get_view_interval(), metric.bounds
    room = BEYOND * (min(high, bounds[1]) - max(low, bounds[0]))
    axis.axes.set(**{f"{axis.axis_name}lim": (max(low, bounds[0] - room), min(high, bounds[1] + room))})


def name_axes(axes: Axes, x: str, y: str) -> None:
    """Label both axes."""
    axes.set_xlabel(x, fontsize=9, color=INK)
    axes.set_ylabel(y, fontsize=9, color=INK)


def save(figure: Figure, path: Path, kinds: Iterable[str] = ()) -> Path:
    """Write a figure as PNG, and as these other KINDS next to it; create its folder, and return the path.

    Characters that the font lacks are drawn in another installed font, else as boxes.
    """
    from matplotlib import rc_context, rcParams

    path.parent.mkdir(parents=True, exist_ok=True)
    engine = figure.get_layout_engine()
    figure.set_layout_engine(None)  # else every file is drawn twice, and its parts are placed each time
    paths = dict.fromkeys([path, *(path.with_suffix(f".{kind}") for kind in kinds)])
    with rc_context({"pdf.fonttype": 42, "svg.hashsalt": "fedloom"}):  # TrueType, as journals need; the same ids each time
        steps = [partial(engine.execute, figure)] if engine else []
        for step in [*steps, *(partial(_write, figure, each) for each in paths)]:
            if lacking := _missing_after(step):
                rcParams["font.sans-serif"] = [*rcParams["font.sans-serif"], *_fonts_with(lacking)]
                _missing_after(step)
    return path


def _write(figure: Figure, path: Path) -> None:
    """Write a figure to a file. Readers see the old file or all of the new one."""
    new = path.with_name(f".{uuid.uuid4().hex[:12]}-{path.name}")
    try:
        figure.savefig(new)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def _missing_after(step: Callable[[], object]) -> set[int]:
    """Run a step that places the parts of a figure, or writes it. Return the code points that the current fonts lack."""
    with warnings.catch_warnings(record=True) as messages:
        warnings.simplefilter("always")
        step()
    lacking = {int(match[1]) for each in messages if (match := MISSING.match(str(each.message)))}
    for each in messages:
        if not MISSING.match(str(each.message)):
            warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
    return lacking


def _fonts_with(letters: set[int]) -> list[str]:
    """Return a few installed fonts that have these characters, as far as any font has them."""
    from matplotlib.font_manager import fontManager, get_font

    names: list[str] = []
    for entry in sorted(fontManager.ttflist, key=lambda entry: (entry.name, entry.style != "normal", entry.weight != 400)):
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # unreadable fonts
            if entry.name not in names and (has := letters & get_font(entry.fname).get_charmap().keys()):
                letters = letters - has
                names.append(entry.name)
        if not letters:
            break
    return names


def name_curve(name: str, *parts: Artist) -> None:
    """Name the parts of a curve, so that a page can hide it: its line, its band, its label."""
    for part in parts:
        part.set_gid(CURVE + clean(name))


def score_of(scores: Mapping[str, float], name: str) -> float:
    """Return the score on the domain `name`; NaN if it was not measured there."""
    return scores.get(name, math.nan)


def short(label: str, room: int = 24) -> str:
    """Shorten a label to `room` characters, without its middle. Escape dollars, which matplotlib reads as formulas."""
    return shortened(label, room).replace("$", r"\$")


def write_numbers(axes: Axes, grid: Grid, reach: float, form: str, unit: float = 100.0) -> None:
    """Write the values of a heat map's cells.

    Args:
        axes: The axes of the heat map.
        grid: The values.
        reach: The value of the darkest colour. Text on dark cells is white.
        form: The format of a number, such as ".1f".
        unit: The factor of the values; 100 for fractions shown in per cent.
    """
    for y, row in enumerate(grid):
        for x, value in enumerate(row):
            colour = "white" if abs(value) > 0.6 * reach else INK
            text = "-" if math.isnan(value) else format(unit * value, form)
            axes.text(x, y, text, ha="center", va="center", fontsize=8.5, color=colour)


def draw_bars(
    axes: Axes, names: Sequence[str], values: Sequence[float], colours: Sequence[Any], texts: Sequence[str],
    spreads: Sequence[float] = (),
) -> list[list[Artist]]:  # fmt: skip
    """Draw horizontal bars with texts at their ends, from the top down. Return the parts of each bar.

    `spreads`: on both sides of a bar's end, a line has this length.
    """
    drawn: list[list[Artist]] = [[bar] for bar in axes.barh(range(len(names)), values, height=0.62, color=colours)]
    axes.set_yticks(range(len(names)), [short(name, MOST_LABEL) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.axvline(0.0, color=GREY, linewidth=0.8)
    axes.margins(x=0.12)
    for place, (value, text) in enumerate(zip(values, texts, strict=True)):
        if math.isfinite(value):
            wide, sign = spreads[place] if spreads else 0.0, 1 if value >= 0 else -1
            if wide:
                drawn[place] += axes.plot([value - wide, value + wide], [place, place], color=GREY, linewidth=1.6, zorder=3)
            drawn[place].append(axes.annotate(
                text, (value + sign * wide, place), (4 * sign, 0), textcoords="offset points", va="center",
                ha="left" if value >= 0 else "right", fontsize=8.5, color=INK, annotation_clip=False))  # fmt: skip
    return drawn


def bars_figure(
    title: str, label: str, bars: Sequence[tuple[float, str, Any]], metric: Facts, spreads: Sequence[float] = ()
) -> Figure:
    """Draw values of a metric, of one round, as bars that a page can hide. `bars`: the value, name and colour of each."""
    figure, axes = new_figure(6.5, min(14.0, 1.5 + 0.34 * len(bars)))
    values, names, colours = zip(*bars, strict=True)
    for name, parts in zip(
        names, draw_bars(axes, names, values, colours, [metric.text(value) for value in values], spreads), strict=True
    ):
        name_curve(name, *parts)
    value_axis(axes.xaxis, metric)
    within_bounds(axes.xaxis, metric)
    axes.set_xlabel(label)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    return figure


def frame_cells(axes: Axes, places: list[tuple[int, int]], colour: str) -> None:
    """Draw frames around cells (column, row) of a heat map."""
    from matplotlib.patches import Rectangle

    for x, y in places:
        frame = Rectangle((x - 0.46, y - 0.44), 0.92, 0.88, fill=False, edgecolor=colour, linewidth=1.5, zorder=3)
        axes.add_patch(frame)


def name_ticks(axes: Axes, rows: list[str], names: list[str], rooms: tuple[int, int] = (65, 40)) -> None:
    """Write `rows` at the left and `names` on top of a heat map, at most `rooms` (left, top) of them."""
    for axis, labels, room in zip((axes.yaxis, axes.xaxis), (rows, names), rooms, strict=True):
        step = math.ceil(len(labels) / room)
        axis.set_ticks(range(0, len(labels), step), [short(label) for label in labels[::step]])
    axes.xaxis.tick_top()
    long = max(len(short(name)) for name in names) > 7
    axes.tick_params(axis="x", length=0, labelsize=8.5, labelrotation=35 if long else 0)
    for label in axes.get_xticklabels() if long else ():
        label.set(ha="left", rotation_mode="anchor")
    axes.tick_params(axis="y", length=0, labelsize=8.5)
    axes.spines[:].set_visible(False)
    axes.grid(False)
