"""Show the accuracy of every site's head on every site's extractor, as tables and a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedloom.sims.report.canvas import INK, PALETTE, frame_cells, name_ticks, new_panels, percent_axis, write_numbers
from fedloom.sims.report.tables import MAX_DOMAINS, Table, cut, mean, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEY = "recombination"  # the summary's key, with an entry per method
MAX_NUMBERS, MAX_FRAMES = 12, 26
ACROSS = 4


@dataclass(frozen=True)
class HeadMatrix:
    """A method's accuracies [extractor's site, head's site] (None: not measured).

    `bytes`: what a site sends in a round. `fedavg_bytes`: the same with FedAvg.
    """

    method: str
    sites: Sequence[str]
    accuracy: Sequence[Sequence[float | None]]
    bytes: int
    fedavg_bytes: int

    def __post_init__(self) -> None:
        if any(len(row) != len(self.sites) for row in self.accuracy) or len(self.accuracy) != len(self.sites):
            raise ValueError(f"{self.method}: takes as many rows and columns as sites")

    def without(self, gone: Sequence[str]) -> HeadMatrix:
        """Return the matrix without the rows and columns of these sites."""
        here = [place for place, site in enumerate(self.sites) if site not in gone]
        cells = [[self.accuracy[row][column] for column in here] for row in here]
        return HeadMatrix(self.method, [self.sites[place] for place in here], cells, self.bytes, self.fedavg_bytes)

    def of(self, extractor: str, head: str) -> float | None:
        """Return the accuracy of one site's extractor with another's head; None if it was not measured."""
        if extractor not in self.sites or head not in self.sites:
            return None
        return self.accuracy[self.sites.index(extractor)][self.sites.index(head)]

    @property
    def own(self) -> float | None:
        """The mean accuracy over sites with their own heads."""
        return mean([self.accuracy[place][place] for place in range(len(self.sites))])

    @property
    def exchanged(self) -> float | None:
        """The mean accuracy over all pairs of two different sites."""
        places = range(len(self.sites))
        return mean([self.accuracy[row][column] for row in places for column in places if row != column])

    @property
    def share(self) -> float | None:
        """The method's bytes as a share of FedAvg's."""
        return self.bytes / self.fedavg_bytes if self.fedavg_bytes else None


def exchanges(summary: Mapping[str, Any]) -> list[HeadMatrix]:
    """Return the matrix of each method, the run's own first, without forgotten sites."""
    found = [HeadMatrix(method, one["sites"], one["accuracy"], one["bytes"], one["fedavg_bytes"])
             for method, one in (summary.get(KEY) or {}).items()]  # fmt: skip
    left = [one.without(summary.get("unlearned") or []) for one in found]
    return [one for one in left if one.sites]


def heads_table(found: Sequence[HeadMatrix]) -> Table:
    """Return a row for each method: accuracy with own and with exchanged heads, and traffic compared with FedAvg."""
    rows = [[one.method, percent(one.own), percent(one.exchanged), _kilobytes(one.bytes), _kilobytes(one.fedavg_bytes),
             percent(one.share)] for one in found]  # fmt: skip
    columns = ["method", "own heads", "exchanged heads", "kB sent per site and round", "FedAvg's kB", "share of FedAvg's"]
    note = "Means over extractors, on the test images of the extractor's site. exchanged heads: those of all other sites."
    return Table("Exchanged heads", columns, rows, note)


def matrix_table(one: HeadMatrix, homes: Mapping[str, str]) -> Table:
    """Return a row for each extractor and a column for each head, as far as they fit."""
    shown = one.sites[:MAX_DOMAINS]
    rows, note = cut(
        [[_named(site, homes), *(_cell(one, site, head) for head in shown)] for site in one.sites], "extractors"
    )
    few = f"The first {len(shown)} of {len(one.sites)} heads are shown." if len(shown) < len(one.sites) else ""
    notes = ["Row: the extractor's site. Column: the head's site. * the site's own head.", note, few]
    title = f"{one.method}: exchanged {percent(one.exchanged)}, own {percent(one.own)}"
    return Table(title, ["extractor", *shown], rows, " ".join(filter(None, notes)))


def heads_figure(found: Sequence[HeadMatrix], homes: Mapping[str, str]) -> Figure | None:
    """Plot a heat map for each method, side by side, in the same colours; None if nothing was measured."""
    if not found:
        return None
    most = max(len(one.sites) for one in found)
    across, down = min(ACROSS, len(found)), math.ceil(len(found) / ACROSS)
    side = min(4.2, max(1.9, 0.5 * most))  # inches
    size = max(6.0, across * side + 2.9), down * (side + 0.9) + 0.9
    figure, panels = new_panels(*size, down, across, len(found))
    for place, (panel, one) in enumerate(zip(panels.flat, found, strict=False)):
        _panel(panel, one, homes)
        if place % across and one.sites == found[place - 1].sites:
            panel.set_yticklabels([])
    bar = figure.colorbar(panels.flat[0].images[0], ax=panels, shrink=0.8, pad=0.02, aspect=20 * down)
    percent_axis(bar.ax.yaxis)
    bar.outline.set(visible=False)
    bar.ax.tick_params(length=0, labelsize=8.5)
    figure.suptitle("Accuracy of every head on every extractor", x=0.01, ha="left", fontsize=12, color=INK)
    told = (
        "row: extractor's site; column: head's site; framed: the same site\nin %, on the test images of the extractor's site"
    )
    figure.supxlabel(told, x=0.01, ha="left", fontsize=8.5, color=INK)
    return figure


def _panel(axes: Axes, one: HeadMatrix, homes: Mapping[str, str]) -> None:
    """Draw one method's heat map."""
    grid = [[math.nan if cell is None else cell for cell in row] for row in one.accuracy]
    axes.imshow(grid, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    name_ticks(axes, [_named(site, homes) for site in one.sites], list(one.sites), (MAX_FRAMES, MAX_FRAMES // 2))
    if len(one.sites) <= MAX_NUMBERS:
        write_numbers(axes, grid, 1.0, ".0f")
    frame_cells(axes, [(k, k) for k in range(len(one.sites)) if len(one.sites) <= MAX_FRAMES], PALETTE[4])
    axes.set_xlabel(f"{one.method}: exchanged {percent(one.exchanged)}", fontsize=10.5, color=INK)


def _cell(one: HeadMatrix, extractor: str, head: str) -> str:
    shown = percent(one.of(extractor, head))
    return f"* {shown}" if extractor == head else shown


def _named(site: str, homes: Mapping[str, str]) -> str:
    return f"{site} ({homes[site]})" if site in homes else site


def _kilobytes(number: int) -> str:
    return f"{number / 1e3:,.1f}"
