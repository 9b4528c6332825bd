"""The rows as tables: what was measured, and the bars that it has to meet."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.sims.benchmarks.engine_cases import COMPILED, SUMS, Case, domains
from fedloom.sims.benchmarks.engine_measure import Row
from fedloom.sims.report.tables import Cell, Table

COLUMNS = (
    *("case", "engine", "s a round", "min", "max", "tasks/s", "start-up, s"),
    *("driver, MiB", "workers, MiB", "object store, MiB", "private, MiB", "rounds"),
)
NOTE = (
    "s a round: median without round 1 (of training: in the middle one of several runs, engines in turn). Start-up: from "
    "launching the process to the end of round 1. Memory at its peak: "
    "driver is the process with the ServerApp, private what is its alone beyond its start; workers all together."
)

Rows = Sequence[Row]


@dataclass(frozen=True)
class Bar:
    """A column of an engine in a case, divided by that of the engine `over` if there is one; at least or at most `limit`."""

    what: str
    case: str
    column: str
    engine: str
    over: str
    least: bool
    limit: float

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The cases and engines whose rows it reads."""
        return [(self.case, engine) for engine in (self.engine, self.over) if engine]

    def value(self, rows: Rows) -> float | None:
        """The number that the rows give; None where one is missing."""
        given = {(row.case, row.engine): getattr(row, self.column) for row in rows}
        numbers = [given[pair] for pair in self.pairs if given.get(pair) is not None]
        if len(numbers) < len(self.pairs):
            return None
        return numbers[0] / numbers[1] if self.over else numbers[0]

    def wanted(self) -> str:
        """The bar in words."""
        return f"at {'least' if self.least else 'most'} {self.limit:g}"

    def verdict(self, rows: Rows) -> str:
        """met, not met, or not measured."""
        value = self.value(rows)
        if value is None:
            return "not measured"
        return "met" if (value >= self.limit if self.least else value <= self.limit) else "not met"


def _faster(case: str, times: float) -> Bar:
    return Bar(f"{case}: tasks/s, ray / stock", case, "tasks_per_s", "ray", "stock", True, times)


BARS = (
    _faster("messages-1000", 25),
    _faster("messages-100-of-10000", 40),
    _faster("messages-1mb", 5),
    Bar("training: s a round, inline / loop-1", "training", "round_s", "inline", "loop-1", False, 1.1),
    Bar("training: s a round, ray / loop-2", "training", "round_s", "ray", "loop-2", False, 1.15),
    Bar("training: s a round, ray compiled / ray", "training", "round_s", COMPILED, "ray", False, 1.0),
    Bar("training: s a round, ray with partial sums / loop-2", "training", "round_s", SUMS, "loop-2", False, 1.0),
    Bar("training: ray's first round, s after launch", "training", "startup_s", "ray", "", False, 9),
    Bar("messages-40mb: ray's private memory, MiB", "messages-40mb", "private_mb", "ray", "", False, 300),
)


def rows_table(rows: Rows, machine: str) -> Table:
    """All rows; what was left out, and why, is in the line below."""
    cells: list[list[Cell]] = [
        [
            *(row.case, row.engine, _seconds(row.round_s), _seconds(row.round_min_s), _seconds(row.round_max_s)),
            *(_whole(row.tasks_per_s), _seconds(row.startup_s), _whole(row.peak_rss_mb), _whole(row.workers_rss_mb)),
            *(_whole(row.object_store_mb), _whole(row.private_mb), str(row.rounds)),
        ]
        for row in rows
    ]
    missing = [f"{row.case} {row.engine}: {row.note}." for row in rows if row.note]
    return Table(f"Engines ({machine})", COLUMNS, cells, " ".join([NOTE, *missing]))


def cases_table(cases: Sequence[Case]) -> Table:
    """What was run in each case."""
    cells = [
        [case.name, case.what if case.kind == "messages" else f"{case.what} ({', '.join(domains(case))})", str(case.window)]
        for case in cases
    ]
    return Table("Cases", ["case", "what a round is", "messages under way at once"], cells)


def bars_table(rows: Rows) -> Table:
    """Each bar with the number measured."""
    cells: list[list[Cell]] = [
        [bar.what, "-" if (value := bar.value(rows)) is None else f"{value:.3g}", bar.wanted(), bar.verdict(rows)]
        for bar in BARS
    ]
    return Table("Bars", ["what", "measured", "wanted", "verdict"], cells)


def _seconds(number: float | None) -> str:
    return "-" if number is None else f"{number:.3g}"


def _whole(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}" if number >= 10 else f"{number:.2g}"
