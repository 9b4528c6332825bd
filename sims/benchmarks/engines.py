"""Engines side by side: inline, ray and the stock simulation on the same messages, and training beside plain loops."""

import json
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fedloom.conf import UserError
from fedloom.conf.machine import cores
from fedloom.sims.benchmarks.engine_cases import CASES, Case
from fedloom.sims.benchmarks.engine_measure import Row, measure
from fedloom.sims.benchmarks.engine_plot import draw
from fedloom.sims.benchmarks.engine_tables import BARS, bars_table, cases_table, rows_table
from fedloom.sims.report.report import Picture, write_page
from fedloom.sims.report.tables import Table

QUICK_SECONDS = 228.0  # of all measurements; then the files are written
LEAST_SECONDS = 10.0  # less than that measures nothing
LIMIT_SECONDS = 600.0
REPEATS = 5  # of the runs that ratios of training are taken from, engines in turn
CAPTION = "Tasks per second (a logarithmic scale) and start-up of each engine in each case."


def bench(quick: bool = False, out: Path = Path("runs/bench")) -> tuple[list[Table], list[dict[str, Any]]]:
    """Measure all cases; writes engines.md, .json, .png and .html into `out`. Returns the tables and the rows.

    `quick`: within four minutes; what does not fit is left out, and the table says so. Raises UserError if `out` cannot be
    written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be made ({error.strerror})") from None
    rows = in_order(middle(list(measured(quick))))
    tables = [cases_table(CASES), rows_table(rows, machine()), bars_table(rows)]
    try:
        (out / "engines.md").write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
        (out / "engines.json").write_text(json.dumps({"rows": [asdict(row) for row in rows]}) + "\n", encoding="utf-8")
        picture = Picture(draw(rows, out / "engines.png"), CAPTION)
    except OSError as error:
        raise UserError(f"--out {out}: cannot be written ({error.strerror})") from None
    write_page(out / "engines.html", "Fedloom: engines side by side", [("", [*tables, picture])])
    return tables, [asdict(row) for row in rows]


def measured(quick: bool) -> Iterator[Row]:
    """A row for each case and engine, each measured in a fresh process, one after the other."""
    end = time.monotonic() + QUICK_SECONDS
    for case, engine in plan(CASES, 1 if quick else REPEATS):
        left = end - time.monotonic() if quick else LIMIT_SECONDS
        if left < LEAST_SECONDS:
            row = Row(case.name, engine, note="left out: no time for it with --quick")
        else:
            row = measure(case, engine, case.rounds_of(engine, quick), min(left, LIMIT_SECONDS))
        _tell(row)
        yield row


def plan(cases: Sequence[Case], repeats: int) -> list[tuple[Case, str]]:
    """What is measured in which order: first what a bar asks for, last stock (the slowest; training before messages).

    Training without stock is measured `repeats` times, one engine after the other.
    """
    wanted = {pair for bar in BARS for pair in bar.pairs}
    pairs = [(case, engine) for case in cases for engine in case.engines]
    first = [pair for pair in pairs if (pair[0].name, pair[1]) in wanted]
    again = [pair for pair in pairs if pair[0].kind == "training" and pair[1] != "stock"] * (repeats - 1)
    rest = [pair for pair in pairs if pair not in first]
    stock = [pair for pair in reversed(rest) if pair[1] == "stock"]
    return [*first, *again, *(pair for pair in rest if pair[1] != "stock"), *stock]


def middle(rows: Sequence[Row]) -> list[Row]:
    """Of the rows of one case and engine the one with the median time."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.case, row.engine), []).append(row)
    measured = ([row for row in group if row.round_s] or group for group in groups.values())
    return [sorted(group, key=lambda row: row.round_s or 0.0)[len(group) // 2] for group in measured]


def in_order(rows: Sequence[Row]) -> list[Row]:
    """Case by case, as they are listed."""
    names = [(case.name, engine) for case in CASES for engine in case.engines]
    return sorted(rows, key=lambda row: names.index((row.case, row.engine)))


def machine() -> str:
    """The machine in a few words."""
    return f"{cores()} cores, {platform.machine()}, Python {platform.python_version()}"


def _tell(row: Row) -> None:
    speed = (
        f"{row.round_s:.3g} s a round, {row.tasks_per_s:,.0f} tasks/s" if row.round_s and row.tasks_per_s else "no rounds"
    )
    start = f", first round after {row.startup_s:.1f} s" if row.startup_s else ""
    note = f" ({row.note})" if row.note else ""
    print(f"{row.case} {row.engine}: {speed}{start}{note}", file=sys.stderr, flush=True)
