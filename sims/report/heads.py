"""Show the accuracy of every site's head on every site's extractor, as tables and a plot."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedloom.sims.report.canvas import INK, PALETTE, frame_cells, name_ticks, new_panels, percent_axis, write_numbers
from fedloom.sims.report.results import MAX_DOMAINS, mean
from fedloom.sims.report.tables import Table, cut, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KEY = "recombination"  # the summary's key, with an entry per method
MAX_NUMBERS, MAX_FRAMES = 12, 26
ACROSS = 4


@dataclass(frozen=True)
class HeadMatrix:
    """A method's accuracy of every extractor with every head: [extractor's site, head's site] (None: not measured).

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
        here = [index for index, site in enumerate(self.sites) if site not in gone]
        cells = [[self.accuracy[row][column] for column in here] for row in here]
        return HeadMatrix(self.method, [self.sites[index] for index in here], cells, self.bytes, self.fedavg_bytes)

    def of(self, extractor: str, head: str) -> float | None:
        """Return the accuracy of one site's extractor with another's head; None if it was not measured."""
        if extractor not in self.sites or head not in self.sites:
            return None
        return self.accuracy[self.sites.index(extractor)][self.sites.index(head)]

    @property
    def own(self) -> float | None:
        """The mean accuracy of extractors with their own sites' heads."""
        return mean([self.accuracy[index][index] for index in range(len(self.sites))])

    @property
    def exchanged(self) -> float | None:
        """The mean accuracy of extractors with other sites' heads."""
        indices = range(len(self.sites))
        return mean([self.accuracy[row][column] for row in indices for column in indices if row != column])

    @property
    def share(self) -> float | None:
        """The method's bytes as a share of FedAvg's."""
        return self.bytes / self.fedavg_bytes if self.fedavg_bytes else None


def exchanges(summary: Mapping[str, Any]) -> list[HeadMatrix]:
    """Return the `HeadMatrix` of each method in a summary, the run's own first, without forgotten sites."""
    matrices = [HeadMatrix(method, matrix["sites"], matrix["accuracy"], matrix["bytes"], matrix["fedavg_bytes"])
             for method, matrix in (summary.get(KEY) or {}).items()]  # fmt: skip
    left = [matrix.without(summary.get("unlearned") or []) for matrix in matrices]
    return [matrix for matrix in left if matrix.sites]


def heads_table(matrices: Sequence[HeadMatrix]) -> Table:
    """Return a table with a row for each method: accuracy with own and exchanged heads, traffic compared with FedAvg."""
    rows = [[matrix.method, percent(matrix.own), percent(matrix.exchanged), _kilobytes(matrix.bytes),
             _kilobytes(matrix.fedavg_bytes), percent(matrix.share)] for matrix in matrices]  # fmt: skip
    columns = ["method", "own heads", "exchanged heads", "kB sent per site and round", "FedAvg's kB", "share of FedAvg's"]
    note = "Means over extractors, on the test examples of the extractor's site. exchanged heads: those of all other sites."
    return Table("Exchanged heads", columns, rows, note)


def matrix_table(matrix: HeadMatrix, homes: Mapping[str, str]) -> Table:
    """Return a table of accuracy: a row for each extractor and a column for each head, as many as fit."""
    shown = matrix.sites[:MAX_DOMAINS]
    rows, note = cut(
        [[_named(site, homes), *(_cell(matrix, site, head) for head in shown)] for site in matrix.sites], "extractors"
    )
    few = f"The first {len(shown)} of {len(matrix.sites)} heads are shown." if len(shown) < len(matrix.sites) else ""
    notes = ["Row: the extractor's site. Column: the head's site. * the site's own head.", note, few]
    title = f"{matrix.method}: exchanged {percent(matrix.exchanged)}, own {percent(matrix.own)}"
    return Table(title, ["extractor", *shown], rows, " ".join(filter(None, notes)))


def heads_figure(matrices: Sequence[HeadMatrix], homes: Mapping[str, str]) -> Figure | None:
    """Plot each method's matrix as a heat map, side by side, in the same colours; None without matrices."""
    if not matrices:
        return None
    most = max(len(matrix.sites) for matrix in matrices)
    across, down = min(ACROSS, len(matrices)), math.ceil(len(matrices) / ACROSS)
    side = min(4.2, max(1.9, 0.5 * most))  # inches
    size = max(6.0, across * side + 2.9), down * (side + 0.9) + 0.9
    figure, panels = new_panels(*size, down, across, len(matrices))
    for index, (panel, matrix) in enumerate(zip(panels.flat, matrices, strict=False)):
        _panel(panel, matrix, homes)
        if index % across and matrix.sites == matrices[index - 1].sites:
            panel.set_yticklabels([])
    bar = figure.colorbar(panels.flat[0].images[0], ax=panels, shrink=0.8, pad=0.02, aspect=20 * down)
    percent_axis(bar.ax.yaxis)
    bar.outline.set(visible=False)
    bar.ax.tick_params(length=0, labelsize=8.5)
    figure.suptitle("Accuracy of every head on every extractor", x=0.01, ha="left", fontsize=12, color=INK)
    legend = "row: extractor's site; column: head's site; framed: the same site\nin %, on the extractor site's test examples"
    figure.supxlabel(legend, x=0.01, ha="left", fontsize=8.5, color=INK)
    return figure


def _panel(axes: Axes, matrix: HeadMatrix, homes: Mapping[str, str]) -> None:
    """Draw one method's heat map."""
    grid = [[math.nan if cell is None else cell for cell in row] for row in matrix.accuracy]
    axes.imshow(grid, cmap="Blues", vmin=0.0, vmax=1.0, interpolation="nearest")
    name_ticks(axes, [_named(site, homes) for site in matrix.sites], list(matrix.sites), (MAX_FRAMES, MAX_FRAMES // 2))
    if len(matrix.sites) <= MAX_NUMBERS:
        write_numbers(axes, grid, 1.0, ".0f")
    frame_cells(axes, [(k, k) for k in range(len(matrix.sites)) if len(matrix.sites) <= MAX_FRAMES], PALETTE[4])
    axes.set_xlabel(f"{matrix.method}: exchanged {percent(matrix.exchanged)}", fontsize=10.5, color=INK)


def _cell(matrix: HeadMatrix, extractor: str, head: str) -> str:
    shown = percent(matrix.of(extractor, head))
    return f"* {shown}" if extractor == head else shown


def _named(site: str, homes: Mapping[str, str]) -> str:
    return f"{site} ({homes[site]})" if site in homes else site


def _kilobytes(number: int) -> str:
    return f"{number / 1e3:,.1f}"
