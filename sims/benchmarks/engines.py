"""`fedloom bench engines`: inline, ray and the stock simulation on the same messages, and training against plain loops."""

from __future__ import annotations

import contextlib
import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.conf import UserError
from fedloom.conf.machine import cores
from fedloom.sims.benchmarks.engine_cases import CASES, COMPILED, SUMS, Case, domains
from fedloom.sims.benchmarks.engine_measure import Row, measure
from fedloom.sims.benchmarks.measuring import VERDICTS
from fedloom.sims.report.canvas import INK, PALETTE, new_panels, plain, save
from fedloom.sims.report.report import Picture, write_page
from fedloom.sims.report.tables import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

QUICK_SECONDS = 228.0  # of all measurements; then the files are written
LEAST_SECONDS = 10.0  # a measurement needs more than this
LIMIT_SECONDS = 600.0
REPEATS = 5  # runs of training, of which the one with the median time counts
CAPTION = "Tasks per second (a logarithmic scale) and start-up of each engine in each case."
COLUMNS = {"s a round": "round_s", "min": "round_min_s", "max": "round_max_s", "tasks/s": "tasks_per_s",
           "start-up, s": "startup_s", "driver, MiB": "peak_rss_mb", "workers, MiB": "workers_rss_mb",
           "object store, MiB": "object_store_mb", "private, MiB": "private_mb", "rounds": "rounds"}  # fmt: skip
NOTE = (
    "s a round: the median without round 1; for training, of the run with the median time. Start-up: from launching the "
    "process to the end of round 1. Memory at its peak: driver is the process with the ServerApp; private is what this "
    "process alone has more than at its start; workers are all together, without shared memory."
)
COLOURS = dict(zip(("ray", "stock", "inline", "loop-1", "loop-2", SUMS, COMPILED), PALETTE, strict=False))
PANELS = {"tasks_per_s": ("tasks per second", "log"), "startup_s": ("seconds from launch to the end of round 1", "linear")}


@dataclass(frozen=True)
class Bar:
    """A limit for one column of an engine's row, or for its ratio to another engine's.

    Attributes:
        what: The limit as text.
        case: The case.
        column: The column.
        engine: The engine.
        over: The engine by whose value to divide; "": none.
        limit: The limit.
        at_least: Whether it is a lower limit.
    """

    what: str
    case: str
    column: str
    engine: str
    over: str
    limit: float
    at_least: bool = False

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """The pairs (case, engine) whose rows the bar reads."""
        return [(self.case, engine) for engine in (self.engine, self.over) if engine]

    def value(self, rows: Sequence[Row]) -> float | None:
        """Return the number or ratio from the rows; None if one is missing."""
        numbers = {(row.case, row.engine): getattr(row, self.column) for row in rows}
        value, *others = [numbers.get(pair) for pair in self.pairs]
        return None if value is None or None in others else value / others[0] if others else value

    def line(self, rows: Sequence[Row]) -> list[str]:
        """Return the bar's table line: what, the measured and the wanted number, the verdict."""
        value, wanted = self.value(rows), f"at {'least' if self.at_least else 'most'} {self.limit:g}"
        if value is None:
            return [self.what, "-", wanted, "not measured"]
        return [self.what, f"{value:.3g}", wanted, VERDICTS[value >= self.limit if self.at_least else value <= self.limit]]


BARS = (
    *(Bar(f"{case}: tasks/s, ray / stock", case, "tasks_per_s", "ray", "stock", times, at_least=True)
      for case, times in (("messages-1000", 25), ("messages-100-of-10000", 40), ("messages-1mb", 5))),
    Bar("training: s a round, inline / loop-1", "training", "round_s", "inline", "loop-1", 1.1),
    Bar("training: s a round, ray / loop-2", "training", "round_s", "ray", "loop-2", 1.15),
    Bar("training: s a round, ray compiled / ray", "training", "round_s", COMPILED, "ray", 1.0),
    Bar("training: s a round, ray with partial sums / loop-2", "training", "round_s", SUMS, "loop-2", 1.0),
    Bar("training: ray's first round, s after launch", "training", "startup_s", "ray", "", 9),
    Bar("messages-40mb: ray's private memory, MiB", "messages-40mb", "private_mb", "ray", "", 300),
)  # fmt: skip


def bench(quick: bool = False, out: Path = Path("runs/bench")) -> tuple[list[Table], list[dict[str, Any]]]:
    """Measure all cases, write engines.md, .json, .png and .html into `out`, and return the tables and rows.

    Args:
        quick: Stop within four minutes; the table names what is left out.

    Raises:
        UserError: `out` cannot be written.
    """
    with _writing(out):
        out.mkdir(parents=True, exist_ok=True)
    rows = medians(list(measured(quick)))
    tables = [cases_table(CASES), rows_table(rows, machine()), bars_table(rows)]
    with _writing(out):
        (out / "engines.md").write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
        (out / "engines.json").write_text(json.dumps({"rows": [asdict(row) for row in rows]}) + "\n", encoding="utf-8")
        picture = Picture(draw(rows, out / "engines.png"), CAPTION)
    write_page(out / "engines.html", "Fedloom: engines side by side", [("", [*tables, picture])])
    return tables, [asdict(row) for row in rows]


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"--out {out}: the folder cannot be written ({error.strerror})") from None


def measured(quick: bool) -> Iterator[Row]:
    """Measure each case on each engine in a fresh process, one after the other, and yield its row."""
    end = time.monotonic() + QUICK_SECONDS
    for case, engine in plan(CASES, 1 if quick else REPEATS):
        left = end - time.monotonic() if quick else LIMIT_SECONDS
        if left < LEAST_SECONDS:
            row = Row(case.name, engine, note="left out: no time for it with --quick")
        else:
            row = measure(case, engine, case.rounds_of(engine, quick), min(left, LIMIT_SECONDS))
        _print(row)
        yield row


def plan(cases: Sequence[Case], repeats: int) -> list[tuple[Case, str]]:
    """Return the order of measurements: first those that bars read, and among them the stock simulation, the slowest, last.

    Training without the stock simulation is measured `repeats` times, one engine after the other.
    """
    wanted = {pair for bar in BARS for pair in bar.pairs}
    pairs = _pairs(cases)
    again = [pair for pair in pairs if pair[0].kind == "training" and pair[1] != "stock"] * (repeats - 1)
    return sorted([*pairs, *again], key=lambda pair: ((pair[0].name, pair[1]) not in wanted, pair[1] == "stock"))


def _pairs(cases: Sequence[Case]) -> list[tuple[Case, str]]:
    return [(case, engine) for case in cases for engine in case.engines]


def medians(rows: Sequence[Row]) -> list[Row]:
    """Return the row with the median time for each case and engine, in the order of CASES."""
    result = []
    for case, engine in _pairs(CASES):
        group = [row for row in rows if (row.case, row.engine) == (case.name, engine)]
        group = sorted([row for row in group if row.round_s] or group, key=lambda row: row.round_s or 0.0)
        result += group[len(group) // 2 :][:1]
    return result


def machine() -> str:
    """Return this machine's cores and architecture, and the Python version, as text."""
    return f"{cores()} cores, {platform.machine()}, Python {platform.python_version()}"


def cases_table(cases: Sequence[Case]) -> Table:
    """Return a table that describes the cases."""
    lines = [
        [case.name, case.what if case.kind == "messages" else f"{case.what} ({', '.join(domains(case))})", str(case.window)]
        for case in cases
    ]
    return Table("Cases", ["case", "what a round is", "messages in progress at once"], lines)


def rows_table(rows: Sequence[Row], machine: str) -> Table:
    """Return the table of all rows. Its note names what is missing, and why."""
    lines = [[row.case, row.engine, *(_number(getattr(row, key)) for key in COLUMNS.values())] for row in rows]
    missing = [f"{row.case} {row.engine}: {row.note}." for row in rows if row.note]
    return Table(f"Engines ({machine})", ["case", "engine", *COLUMNS], lines, " ".join([NOTE, *missing]))


def bars_table(rows: Sequence[Row]) -> Table:
    """Return the table of all bars: measured and wanted numbers, verdicts."""
    return Table("Bars", ["what", "measured", "wanted", "verdict"], [bar.line(rows) for bar in BARS])


def draw(rows: Sequence[Row], path: Path) -> Path:
    """Draw tasks per second and start-up, a dot for each engine in each case; write the PNG and return its path."""
    cases = list(dict.fromkeys(row.case for row in rows))
    figure, (panels,) = new_panels(11, 1.6 + 0.5 * len(cases), 1, len(PANELS), sharey=True)
    for axes, (column, (label, scale)) in zip(panels, PANELS.items(), strict=True):
        _dots(axes, rows, cases, column)
        axes.set_xscale(scale)
        axes.set_xlabel(label, color=INK)
    panels[1].set_xlim(left=0)
    panels[0].set_yticks(range(len(cases)), cases)
    panels[0].set_ylim(len(cases) - 0.5, -0.5)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False, fontsize=9)
    figure.suptitle("Engines side by side", x=0.01, ha="left", fontsize=12, color=INK)
    return save(figure, path)


def _dots(axes: Axes, rows: Sequence[Row], cases: list[str], column: str) -> None:
    for engine, colour in COLOURS.items():
        points = [(getattr(row, column), cases.index(row.case)) for row in rows if row.engine == engine]
        points = [(value, height) for value, height in points if value is not None]
        if points:
            axes.scatter(*zip(*points, strict=True), s=60, color=colour, edgecolor="white", label=engine, zorder=2)
    plain(axes)
    axes.tick_params(which="minor", length=0)


def _print(row: Row) -> None:
    """Print a line for a row that has just been measured."""
    speed = f"{_number(row.round_s)} s a round, {_number(row.tasks_per_s)} tasks/s" if row.round_s else "no rounds"
    start = f", first round after {row.startup_s:.1f} s" if row.startup_s else ""
    note = f" ({row.note})" if row.note else ""
    print(f"{row.case} {row.engine}: {speed}{start}{note}", file=sys.stderr, flush=True)


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:,.0f}" if number >= 10 else f"{number:.3g}"
