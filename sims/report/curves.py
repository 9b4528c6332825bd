"""Plot the first metric over rounds, and return all metrics over rounds as rows."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.conf.metrics import ACCURACY, Facts, facts_of
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.run_folder.scores import SCORES, as_headline, headline, metric_of
from fedloom.sims.report.canvas import (
    CURVE,
    GREY,
    INK,
    PALETTE,
    bars_figure,
    name_curve,
    new_figure,
    score_of,
    short,
    value_axis,
    within_bounds,
)
from fedloom.sims.report.tables import clean

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

End = tuple[float, str, str]  # a curve's last value, label and colour
MOST_BARS = 24  # of domains; of more, the union, the best and the worst are drawn
SINGLE = 8  # the size of a curve's only marker
DEFAULT = facts_of(ACCURACY)
Records = Sequence[Mapping[str, Any]]  # lines of metrics.jsonl


def other_records(folder: Path, metrics: Records) -> dict[str, Records]:
    """Return the records of a run's other networks by name: of other architectures, and of baselines by mode.

    Baselines without an aggregate are measured at their sites.
    """
    names = dict.fromkeys(name for record in metrics for name in record.get("networks") or {})
    others: dict[str, Records] = {
        name: [{"round": record["round"], **as_headline(record, {"union": record["networks"][name]})}
               for record in metrics if name in (record.get("networks") or {})] for name in names
    }  # fmt: skip
    for path in sorted((folder / "baselines").glob("*")):
        run = RunFolder(path)
        suffix = " (own networks)" if run.summary().get("aggregate") == "" else ""
        others[path.name + suffix] = list(run.metrics().values())
    return {name: records for name, records in others.items() if records}


def curve_rows(name: str, metrics: Records, others: Mapping[str, Records]) -> Iterator[dict[str, Any]]:
    """Yield each validation value of the network `name` and of the `others` with its network, metric, domain and round."""
    for network, records in {name: metrics, **others}.items():
        for record in records:
            for metric, values in (record.get(SCORES) or {ACCURACY: record.get(ACCURACY) or {}}).items():
                for domain, value in values.items():
                    row = {"network": network, "metric": metric, "domain": domain}
                    yield {**row, "round": record["round"], "value": value}


def accuracy_figure(
    metrics: Records, baselines: Mapping[str, Records] | None = None, aggregated: bool = True,
    forgotten: Mapping[int, str] | None = None,
) -> Figure | None:  # fmt: skip
    """Plot the first metric on validation examples over rounds: a line per domain and, for several domains, their union.

    None if not measured. Dashed lines show `baselines`, by name, on the union. `aggregated`: the metric is that of one
    network, else that of the sites' own networks. `forgotten`: a dotted line after a round, with the forgotten sites' names.
    """
    names, others = list(dict.fromkeys(name for record in metrics for name in headline(record))), baselines or {}
    metric = metric_of({}, metrics)
    if not names:
        return None
    single = [name for name in names if name != "union"] if len(names) == 2 and "union" in names else []
    names = single or names
    whose = "the aggregated network" if aggregated else "the sites' own networks on their own domains"
    title = f"Validation {metric.title} of {whose}"
    if (round := only_round(metrics, others)) is not None:
        return _bars(metrics, names, others, metric, f"{title} after round {round}")
    figure, axes = new_figure(6.5, 4.2)
    ends: list[End] = []
    many = len(names) - 1 > len(PALETTE)
    names.sort(key=lambda name: (name == "union") == many)  # the union's thick line: below a few lines, above many
    for index, name in enumerate(names):
        thick = name == "union" or bool(single)
        colour = INK if thick else GREY if many else PALETTE[(index - 1) % len(PALETTE)]
        ends += _curve(axes, metrics, name, name, colour, bold=thick, faint=many and not thick)
    ends = _worth_a_label(ends, metric) if many else ends
    for index, (name, records) in enumerate(others.items(), 0 if many else len(names) - 1):
        ends += _curve(axes, records, "union", name, PALETTE[index % len(PALETTE)], broken=True)
    value_axis(axes.yaxis, metric)
    within_bounds(axes.yaxis, metric)
    label_ends(axes, ends, metric=metric)
    whole_rounds(axes, [record["round"] for records in (metrics, *others.values()) for record in records])
    broken = f" (dashed lines: baselines and other architectures{'' if single else ', on the union'})"
    axes.set_xlabel("round" + (broken if others else ""))
    axes.set_ylabel(f"validation {metric.title}")
    for round, sites in (forgotten or {}).items():
        if round < max(record["round"] for record in metrics):
            axes.axvline(round + 0.5, color=GREY, linestyle=":", linewidth=1.2, zorder=1)
            axes.annotate(f"without {sites}", (round + 0.5, 0.01), (4, 0), axes.get_xaxis_transform(), "offset points",
                          fontsize=8, color=GREY, parse_math=False)  # fmt: skip
    axes.set_title(title, loc="left", fontsize=12, color=INK)
    return figure


def only_round(metrics: Records, others: Mapping[str, Records]) -> int | None:
    """Return the only round that is measured; None for several or none."""
    rounds = {record["round"] for records in (metrics, *others.values()) for record in records if headline(record)}
    return rounds.pop() if len(rounds) == 1 else None


def _bars(metrics: Records, names: Sequence[str], others: Mapping[str, Records], metric: Facts, title: str) -> Figure:
    """Draw the values of the only round as bars: the union first, baselines and other architectures grey and last."""
    scores = next(filter(None, map(headline, metrics)))
    own = sorted((name for name in names if name in scores), key=lambda name: name != "union")
    bars: list[tuple[float, str, Any]] = [(scores[name], name, INK if name == "union" else PALETTE[0]) for name in own]
    bars = _worth_a_label(bars, metric)[::-1] if len(bars) > MOST_BARS else bars
    grey = [(score_of(found, "union"), name, (GREY, 0.6))
            for name, records in others.items() for found in map(headline, records) if found]  # fmt: skip
    note = f" (grey: baselines and other architectures{', on the union' if 'union' in names else ''})" if grey else ""
    return bars_figure(title, f"validation {metric.title}{note}", [*bars, *grey], metric)


def _curve(axes: Axes, records: Records, key: str, label: str, colour: str, **style: bool) -> list[End]:
    """Draw the values on `key`. Return the curve's right end, for its label; nothing without values."""
    points = [(record["round"], score_of(headline(record), key)) for record in records]
    points = [(round, score) for round, score in points if not math.isnan(score)]
    if not points:
        return []
    line = _line(axes, points, colour, **style)
    if not style.get("faint"):
        name_curve(label, line)
    return [(points[-1][1], label, colour)]


def _line(
    axes: Axes,
    points: list[tuple[int, float]],
    colour: str,
    *,
    bold: bool = False,
    faint: bool = False,
    broken: bool = False,
) -> Line2D:
    rounds, scores = zip(*points, strict=True)
    marker = "o" if len(points) <= 25 else None
    (line,) = axes.plot(
        rounds,
        scores,
        color=colour,
        linestyle="--" if broken else "-",
        linewidth=2.6 if bold else 1.0 if faint else 1.7,
        alpha=0.5 if faint else 1.0,
        marker=marker,
        markersize=SINGLE if len(points) == 1 else 4 if bold else 3,
        zorder=2,
    )
    return line


def _worth_a_label(ends: list[End], metric: Facts) -> list[End]:
    """Return the ends of the union, the best and the worst curve."""
    others = sorted((end for end in ends if end[1] != "union"), key=lambda end: (metric.worth(end[0]), *end[1:]))
    if not others:
        return ends
    worst, best = others[0], others[-1]
    marked = [(best[0], f"best: {best[1]}", best[2]), (worst[0], f"worst: {worst[1]}", worst[2])]
    return [*marked, *(end for end in ends if end[1] == "union")]


def label_ends(axes: Axes, ends: list[End], room: int = 24, metric: Facts = DEFAULT) -> None:
    """Label curves at their right `ends`, in at most `room` characters each, without overlaps."""
    if not ends:
        return
    low, high = axes.get_ylim()
    gap = (high - low) * 0.052
    ends = sorted(ends)
    heights = [score for score, _, _ in ends]
    for i in range(1, len(heights)):
        heights[i] = max(heights[i], heights[i - 1] + gap)
    heights[-1] = min(heights[-1], high)
    for i in reversed(range(len(heights) - 1)):
        heights[i] = min(heights[i], heights[i + 1] - gap)
    for height, (score, name, colour) in zip(heights, ends, strict=True):
        text = axes.annotate(
            f"{short(name, room)} {metric.text(score)}",
            (1.02, height),
            xycoords=axes.get_yaxis_transform(),
            color=colour,
            fontsize=10,
            fontweight="bold" if name == "union" else "normal",
            va="center",
            annotation_clip=False,
        )
        if any(line.get_gid() == CURVE + clean(name) for line in axes.lines):
            name_curve(name, text)


def whole_rounds(axes: Axes, rounds: list[int]) -> None:
    """Put the ticks of the x axis only at whole numbers. `rounds`: all plotted rounds."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=[1, 2, 5, 10]))
    if len(set(rounds)) == 1:
        axes.set_xlim(rounds[0] - 1, rounds[0] + 1)
