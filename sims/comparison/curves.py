"""Plot the rows of a comparison: the first metric over rounds and over traffic, as means over seeds with a band."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.sims.comparison.entries import Entry
from fedloom.sims.comparison.groups import Group
from fedloom.sims.report.canvas import INK, PALETTE, bars_figure, name_curve, new_figure, save, value_axis, within_bounds
from fedloom.sims.report.curves import SINGLE, End, label_ends, whole_rounds
from fedloom.sims.report.page import Picture
from fedloom.sims.report.spread import spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CURVES = 2 * len(PALETTE)
MARKED = 25  # longer curves have no markers
MAX_LABEL = 30  # characters of a curve's label
Place = Callable[[Entry], dict[int, float]]  # the x value of each round

CAPTION = (
    "{metric} on held-out validation examples of all domains together: mean over seeds. {band}: one standard deviation."
)


def pictures(groups: Sequence[Group], folder: Path, kinds: Iterable[str] = ()) -> list[Picture]:
    """Draw the first metric over rounds, and over traffic if that differs, as PNGs in `folder`; return the pictures.

    `kinds`: of files besides PNG. With `svg` among them, a page has boxes that hide curves.
    """
    few = f" The first {MOST_CURVES} of {len(groups)} rows are drawn." if len(groups) > MOST_CURVES else ""
    drawn = [group for group in groups[:MOST_CURVES] if group.rounds]
    if not drawn:
        return []
    metric = drawn[0].metric
    rounds = save(figure_of(drawn, _round, "round"), folder / "rounds.png", kinds)
    drawings = [Picture(rounds, CAPTION.format(metric=metric.caption, band="Line" if _one_round(drawn) else "Band") + few)]
    if len({max(_travelled(group.entries[0]).values(), default=0.0) for group in drawn}) > 1:
        bytes = save(figure_of(drawn, _travelled, "MB to and from sites"), folder / "bytes.png", kinds)
        drawings.append(Picture(bytes, f"The same {metric.title} over the total traffic.{few}"))
    return drawings


def figure_of(groups: Sequence[Group], position: Place, label: str) -> Figure:
    """Plot each group's mean over `position` (x axis, named `label`), with a band for several seeds."""
    if label == "round" and _one_round(groups):
        return _bars(groups)
    figure, axes = new_figure(7.2, 4.4)
    ends: list[End] = []
    for number, group in enumerate(groups):
        points = mean_curve(group, position)
        xs, means, deviations = ([point[part] for point in points] for part in range(3))
        colour, style = PALETTE[number % len(PALETTE)], "--" if number >= len(PALETTE) else "-"
        marker = "o" if len(points) <= MARKED else None
        (line,) = axes.plot(xs, means, color=colour, linestyle=style, linewidth=1.8, marker=marker,
                            markersize=SINGLE if len(points) == 1 else 3, zorder=3)  # fmt: skip
        low, high = ([mean + sign * s for mean, s in zip(means, deviations, strict=True)] for sign in (-1, 1))
        if len(points) == 1:
            band = axes.vlines(xs, low, high, color=colour, alpha=0.5, linewidth=1.6)  # a band of one point has no width
        else:
            band = axes.fill_between(xs, low, high, color=colour, alpha=0.15, linewidth=0, zorder=1)
        name_curve(group.label, line, band)
        ends.append((means[-1], group.label, colour))
    metric = groups[0].metric
    value_axis(axes.yaxis, metric)
    within_bounds(axes.yaxis, metric)
    if label == "round":
        whole_rounds(axes, [round for group in groups for entry in group.entries for round in entry.curve])
    axes.set_xlabel(label)
    axes.set_ylabel(f"validation {metric.title}, all domains")
    axes.set_title(f"Validation {metric.title}", loc="left", fontsize=12, color=INK)
    label_ends(axes, ends, room=MAX_LABEL, metric=metric)
    return figure


def _one_round(groups: Sequence[Group]) -> bool:
    """Return whether all groups have the same single round."""
    return len({round for group in groups for round in group.rounds}) == 1


def _bars(groups: Sequence[Group]) -> Figure:
    """Draw each group's mean in its only round as a bar, with a line of one standard deviation to both sides."""
    points, metric = [mean_curve(group, _round)[0] for group in groups], groups[0].metric
    bars = [(mean, group.label, PALETTE[number % len(PALETTE)])
            for number, (group, (_, mean, _)) in enumerate(zip(groups, points, strict=True))]  # fmt: skip
    title = f"Validation {metric.title} after round {points[0][0]:.0f}"
    return bars_figure(title, f"validation {metric.title}, all domains", bars, metric, [spread for *_, spread in points])


def mean_curve(group: Group, position: Place) -> list[tuple[float, float, float]]:
    """Return (x, mean, standard deviation) for each of the group's rounds. `position`: x by round."""
    entries = [entry for entry in group.entries if entry.curve]
    points = []
    for round in group.rounds:
        scores = spread([entry.curve[round] for entry in entries])
        where = spread([position(entry)[round] for entry in entries]).mean
        points.append((where, scores.mean, 0.0 if math.isnan(scores.deviation) else scores.deviation))
    return points


def _round(entry: Entry) -> dict[int, float]:
    return {round: float(round) for round in entry.curve}


def _travelled(entry: Entry) -> dict[int, float]:
    """Return the total MB up to each round."""
    sent, received = entry.bytes(0), entry.bytes(1)
    total, by_round = 0, {}
    for round in sorted(sent):
        total += sent[round] + received[round]
        by_round[round] = total / 1e6
    return by_round
