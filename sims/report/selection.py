"""Show which layers sites share, and the accuracy of their networks, as tables and a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedloom.sims.report.canvas import INK, new_panels, percent_axis, short
from fedloom.sims.report.results import mean
from fedloom.sims.report.tables import Table, cut, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

KEY = "layer_selection"  # the summary's key, with an entry per mode
ACROSS, MAX_NAMES = 6, 40  # panels in a row; sites with a label
Series = Sequence[float | None]  # a value per round; None where nothing was measured


@dataclass(frozen=True)
class Chosen:
    """The layers that one site shares, and its accuracy.

    Attributes:
        site: The site's name.
        configuration: A digit for each group of layers, from the input on; 1: shared.
        shared: For each round, the probability that each group is shared.
        accuracy: For each round, the accuracy with the shared parameters of that round.
        rounds: The rounds in which the site trained.
    """

    site: str
    configuration: str
    shared: Sequence[Series]
    accuracy: Series
    rounds: Sequence[int]

    @property
    def last(self) -> float | None:
        """The last measured accuracy, with the final shared parameters."""
        return next((accuracy for accuracy in reversed(self.accuracy) if accuracy is not None), None)

    @property
    def peak(self) -> float | None:
        """The best accuracy in the rounds in which the site trained."""
        start, end = (self.rounds[0] - 1, self.rounds[-1]) if self.rounds else (0, len(self.accuracy))
        return max((accuracy for accuracy in self.accuracy[start:end] if accuracy is not None), default=None)

    @property
    def kept(self) -> float | None:
        """The forgetting ratio: final divided by peak accuracy; 1: nothing was forgotten."""
        return self.last / self.peak if self.last is not None and self.peak else None

    def share(self, group: int) -> float | None:
        """Return the last probability that the group with this index is shared."""
        return next((row[group] for row in reversed(self.shared) if row[group] is not None), None)


@dataclass(frozen=True)
class Selection:
    """The layers that the sites of a method share.

    Attributes:
        method: The method's name.
        groups: The names of the layers in each group.
        sites: The result of each site.
        bytes: The bytes that a site sends in a round.
        fedavg_bytes: The bytes that it would send with FedAvg.
    """

    method: str
    groups: Sequence[Sequence[str]]
    sites: Sequence[Chosen]
    bytes: int
    fedavg_bytes: int


def selections(summary: Mapping[str, Any]) -> list[Selection]:
    """Return the `Selection` of each method in a summary, the run's own first, without forgotten sites."""
    gone, methods = summary.get("unlearned") or [], []
    for method, one in (summary.get(KEY) or {}).items():
        keys = ("sites", "configuration", "shared", "accuracy", "own")
        sites = [Chosen(*cells) for cells in zip(*(one[key] for key in keys), strict=True) if cells[0] not in gone]
        methods.append(Selection(method, one["groups"], sites, one["bytes"], one["fedavg_bytes"]))
    return [one for one in methods if one.sites]


def methods_table(found: Sequence[Selection]) -> Table:
    """Return a table with a row for each method: means over its sites."""
    rows = [[one.method, percent(mean([site.last for site in one.sites])), percent(mean([site.peak for site in one.sites])),
             _ratio(mean([site.kept for site in one.sites])),
             *(percent(mean([site.share(group) for site in one.sites])) for group in range(len(one.groups))),
             f"{one.bytes / 1e3:,.0f}", f"{one.fedavg_bytes / 1e3:,.0f}"] for one in found]  # fmt: skip
    groups = [f"shared: {_named(group)}" for group in found[0].groups]
    columns = ["layers", "own task", "peak", "final / peak", *groups, "kB sent per site and round", "FedAvg's kB"]
    note = (
        "Means over sites, on the test examples of their own tasks. peak: the best while the site trained; shared: the "
        "probability that the layers are shared."
    )
    return Table("Layer selection", columns, rows, note)


def sites_table(selection: Selection) -> Table:
    """Return a table of one method with a row for each site."""
    rows, note = cut([[site.site, site.configuration, percent(site.last), percent(site.peak), _ratio(site.kept)]
                      for site in selection.sites], "sites")  # fmt: skip
    legend = f"layers, from the input on: {', '.join(map(_named, selection.groups))}; 1: shared, 0: the site's own."
    return Table(f"{selection.method}: what sites chose", ["site", "layers", "own task", "peak", "final / peak"], rows,
                 " ".join(filter(None, [legend, note])))  # fmt: skip


def selection_figure(found: Sequence[Selection]) -> Figure | None:
    """Plot the probability that each group is shared, for the first method that learned it; None if no method did.

    Each site is a row; rounds run from left to right.
    """
    learned = next((selection for selection in found if any(_learned(site) for site in selection.sites)), None)
    if learned is None:
        return None
    across = min(ACROSS, len(learned.groups))
    down = math.ceil(len(learned.groups) / ACROSS)
    height = min(5.0, max(1.6, 0.28 * len(learned.sites)))
    size = 1.8 * across + 2.6, down * (height + 0.6) + 0.9
    figure, panels = new_panels(*size, down, across, len(learned.groups))
    image = None
    for number, axes in enumerate(panels.flat[: len(learned.groups)]):
        image = _group_panel(axes, learned, number, named=number % across == 0)
    if image is not None:
        bar = figure.colorbar(image, ax=panels, shrink=0.8, pad=0.02)
        percent_axis(bar.ax.yaxis)
        bar.outline.set(visible=False)  # type: ignore[operator]
    figure.suptitle("Probability that layers are shared, by round", x=0.01, ha="left", fontsize=12, color=INK)
    figure.supxlabel("round; white: the site's own, or not trained yet", x=0.01, ha="left", fontsize=8.5, color=INK)
    return figure


def _group_panel(axes: Axes, learned: Selection, number: int, named: bool) -> AxesImage:
    """Draw the heat map of one group. `named`: label the sites at its left."""
    grid: Any = [[math.nan if row[number] is None else row[number] for row in site.shared] for site in learned.sites]
    rounds, step = len(grid[0]), math.ceil(len(grid) / MAX_NAMES)
    image = axes.imshow(grid, cmap="Blues", vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest",
                        extent=(0.5, rounds + 0.5, len(grid) - 0.5, -0.5))  # fmt: skip
    names = [short(site.site) for site in learned.sites[::step]] if named else []
    axes.set_yticks(range(0, len(grid), step) if names else [], names)
    axes.set_xticks(sorted({1, (rounds + 1) // 2, rounds}))
    axes.grid(False)
    axes.spines[:].set_visible(False)
    axes.set_title(_named(learned.groups[number]), fontsize=9.5, color=INK)
    axes.tick_params(length=0, labelsize=8.5)
    return image


def _learned(site: Chosen) -> bool:
    """Return whether some probability of the site is neither 0 nor 1."""
    return any(probability is not None and 0.0 < probability < 1.0 for row in site.shared for probability in row)


def _named(group: Sequence[str]) -> str:
    """Return a group's name, from the names of its layers without their common parts."""
    names = [name.removeprefix("extractor.").removesuffix(".0") for name in group]
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _ratio(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"
