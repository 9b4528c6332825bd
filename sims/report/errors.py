"""Show what networks confuse: all metrics, metrics by class, the confusion matrix, and predicted against true numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedloom.conf.metrics import facts_of
from fedloom.server.run_folder.scores import SCORES
from fedloom.sims.report.canvas import INK, PALETTE, name_ticks, new_figure, new_panels, short
from fedloom.sims.report.results import accuracies
from fedloom.sims.report.sites import MAX_NAME_IN_TABLE, MAX_NAME_ON_AXIS, at_home
from fedloom.sims.report.tables import Table, cut, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS, ACROSS = 6, 3  # of sites in a picture
MOST_CLASSES, MOST_NUMBERS = 40, 15  # of a drawn matrix; with numbers in its cells
PER_CLASS = {"balanced_accuracy": "recall"}  # what a metric is for a single class
PAIR_DIGITS = 13  # as in clients.evaluation.metrics.sums


def metrics_table(summary: Mapping[str, Any]) -> list[Table]:
    """Return, as a list, a table of all configured metrics of each network on all domains; no table for accuracy alone."""
    scores = summary.get(SCORES) or {}
    if len(scores) < 2:
        return []
    networks = [name for name in accuracies(summary) if any(name in table for table in scores.values())]
    rows = [[name, *(facts_of(metric).text(table.get(name, {}).get("union")) for metric, table in scores.items())]
            for name in networks]  # fmt: skip
    kept, note = cut(rows, "networks")
    return [
        Table("All metrics, on all domains together", ["network", *(facts_of(name).title for name in scores)], kept, note)
    ]


def by_class_table(summary: Mapping[str, Any]) -> list[Table]:
    """Return [table] of the metrics by class, over all measured sites, of the first network that has them; else []."""
    name, union = next(
        ((name, result["union"]) for name, result in at_home(summary).items() if result.get("union")), ("", {})
    )
    by_class: Mapping[str, Mapping[str, float]] = union.get("by_class") or {}
    metrics = {name: values for name, values in by_class.items() if PER_CLASS.get(name) not in by_class}
    if not metrics:
        return []
    numbers, names = sorted({number for values in metrics.values() for number in values}, key=int), names_of(summary)
    rows = [
        [shortened(names.get(number, number), MAX_NAME_IN_TABLE),
         *(facts_of(metric).text(values.get(number)) for metric, values in metrics.items())] for number in numbers
    ]  # fmt: skip
    kept, note = cut(rows, "classes")
    titles = [facts_of(PER_CLASS.get(metric, metric)).title.removeprefix("macro ") for metric in metrics]
    return [Table(f"Metrics by class: {name}, all measured sites", ["class", *titles], kept, note)]


def confusion_table(summary: Mapping[str, Any]) -> list[Table]:
    """Return [table] of the confusion matrix, over all measured sites, of the first network that has one; else []."""
    name, matrix = next(((name, union["confusion"]) for name, union in _unions(summary) if "confusion" in union), ("", []))
    names = names_of(summary)
    labels = [shortened(names.get(str(number), str(number)), MAX_NAME_ON_AXIS) for number in range(len(matrix))]
    if not matrix or len(matrix) > MOST_NUMBERS:
        return []
    rows = [[label, *row] for label, row in zip(labels, matrix, strict=True)]
    note = "Row: the true class. Column: the predicted class. Numbers of test examples."
    return [Table(f"Confusion matrix: {name}, all measured sites", ["true", *labels], rows, note)]


def confusion_figure(summary: Mapping[str, Any]) -> Figure | None:
    """Plot the confusion matrix over all sites and those of single sites, as shares of each true class; None without."""
    panels = _panels(summary, "confusion")
    if not panels or len(panels[0][1]) > MOST_CLASSES:
        return None
    size = 3.4 if len(panels[0][1]) <= MOST_NUMBERS else 5.0
    figure, axes = _grid(len(panels), size)
    for panel, (title, matrix) in zip(axes, panels, strict=True):
        _confusion_panel(panel, title, matrix, names_of(summary))
    figure.suptitle("Confusion matrix (rows: true classes)", x=0.01, ha="left", fontsize=12, color=INK)
    return figure


def against_figure(summary: Mapping[str, Any]) -> Figure | None:
    """Plot predicted against true numbers over all sites and at single sites, as dots. None without such targets."""
    panels = _panels(summary, "against")
    if not panels:
        return None
    figure, axes = _grid(len(panels), 3.4)
    for panel, (title, table) in zip(axes, panels, strict=True):
        _against_panel(panel, title, table)
    figure.suptitle("Predicted against true numbers, rounded", x=0.01, ha="left", fontsize=12, color=INK)
    return figure


def names_of(summary: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the names of classes by number, as far as they are known."""
    return summary.get("class_names") or {}


def _unions(summary: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    return [(name, result["union"]) for name, result in at_home(summary).items() if result.get("union")]


def _panels(summary: Mapping[str, Any], key: str) -> list[tuple[str, Sequence[Sequence[int]]]]:
    """Return the titles and tables of the first network that has them: all sites, then the first few sites."""
    for name, result in at_home(summary).items():
        if table := (result.get("union") or {}).get(key):
            sites = [(site, each[key]) for site, each in result["sites"].items() if each.get(key)]
            return [(f"{name}, all sites", table), *(sites[: MOST_PANELS - 1] if len(sites) > 1 else [])]
    return []


def _grid(number: int, size: float) -> tuple[Figure, list[Axes]]:
    if number == 1:
        figure, axes = new_figure(size + 1.6, size + 1.0)
        return figure, [axes]
    across, down = min(ACROSS, number), math.ceil(number / ACROSS)
    figure, panels = new_panels(across * size + 0.8, down * size + 0.8, down, across, number)
    return figure, list(panels.flat)[:number]


def _confusion_panel(axes: Axes, title: str, matrix: Sequence[Sequence[int]], names: Mapping[str, str]) -> None:
    shares = [[count / sum(row) if sum(row) else math.nan for count in row] for row in matrix]
    axes.grid(visible=False)
    axes.imshow(shares, cmap="Blues", vmin=0.0, vmax=1.0, aspect="equal", interpolation="nearest")
    labels = [short(names.get(str(number), str(number)), 14) for number in range(len(matrix))]
    name_ticks(axes, labels, labels)
    if len(matrix) <= MOST_NUMBERS:
        for y, row in enumerate(matrix):
            for x, count in enumerate(row):
                dark = not math.isnan(shares[y][x]) and shares[y][x] > 0.6
                axes.text(x, y, str(count) if count else "", ha="center", va="center", fontsize=7.5,
                          color="white" if dark else INK)  # fmt: skip
    axes.set_title(short(title, 36), loc="left", fontsize=10, color=INK)


def _against_panel(axes: Axes, title: str, table: Sequence[Sequence[int]]) -> None:
    keys, counts = [row[0] for row in table], [row[1] for row in table]
    true, predicted = _middles([key >> PAIR_DIGITS for key in keys]), _middles(keys)
    most = max(counts)
    axes.scatter(true, predicted, s=[max(4.0, 60.0 * count / most) for count in counts], color=PALETTE[0], alpha=0.6,
                 linewidth=0)  # fmt: skip
    ends = [min(*true, *predicted), max(*true, *predicted)]
    axes.plot(ends, ends, color=INK, linewidth=1, linestyle="--", zorder=1)
    axes.set_xlabel("true")
    axes.set_ylabel("predicted")
    axes.set_title(short(title, 36), loc="left", fontsize=10, color=INK)


def _middles(keys: Sequence[int]) -> list[float]:
    """Return the numbers in the middle of bins (clients.evaluation.metrics.sums.against)."""
    import torch

    from fedloom.clients.evaluation.metrics.sums import PAIRS, numbers_of

    return numbers_of(torch.tensor(list(keys)) % PAIRS).tolist()
