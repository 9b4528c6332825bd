"""What all pictures share: a Figure with the Agg canvas, colours, axes in per cent, short labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sims.report.tables import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours for the colour-blind, and two more
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A5195", "#8C6D31")
INK, GREY, LIGHT = "#222222", "#8A8A8A", "#DDDDDD"


def new_figure(width: float, height: float, empty: bool = False) -> tuple[Figure, Axes]:
    """A Figure with the Agg canvas and, unless `empty`, one plain Axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    plain(axes)
    if empty:
        axes.remove()
    return figure, axes


def plain(axes: Axes) -> None:
    """Thin grey lines, no frame."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(LIGHT)
    axes.grid(color=LIGHT, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=9, labelcolor=INK)


def percent_axis(axis: Any, symbol: str = "%") -> None:
    """Shares as per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, symbol=symbol))


def save(figure: Figure, path: Path) -> Path:
    """Writes the PNG; its path."""
    figure.savefig(path)
    return path


def score_of(scores: Mapping[str, float], name: str) -> float:
    """The accuracy of that name, NaN where there is none."""
    return scores.get(name, math.nan)


def short(label: str, room: int = 24) -> str:
    """At most `room` letters, the middle left out; dollars are escaped (matplotlib would read formulas)."""
    text = clean(label)
    if len(text) > room:
        text = f"{text[: room // 2]}…{text[-(room // 2 - 1) :]}"
    return text.replace("$", r"\$")
