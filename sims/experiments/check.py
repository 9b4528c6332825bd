"""Measure published figures again, by their own commands in an empty folder, and compare them with their bands."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedloom.conf.errors import FailedError
from fedloom.conf.formatting import count
from fedloom.sims.experiments.figures import PERCENT, Figure, Measurement
from fedloom.sims.experiments.study import at
from fedloom.sims.report.spread import Spread, spread
from fedloom.sims.report.tables import Table

TITLE = re.compile(r"\*\*(.*), \d+ seeds?\*\*")
CELL = re.compile(r"(?<!\\)\|")
INSIDE, OUTSIDE, FAILED, SKIPPED = "inside", "OUTSIDE", "FAILED", "skipped"


def check(every: Sequence[Measurement], minutes: float, *, quiet: bool = False) -> tuple[Table, bool]:
    """Measure again what takes at most `minutes` and has its data; return a table, and whether no figure is outside.

    Unless `quiet`, each command is printed to stderr when it starts, and its verdicts when it ends.
    """
    rows, counts = list[list[str]](), Counter[str]()
    for each in every:
        why = _obstacle(each, minutes)
        if not quiet and not why:
            print(each.command, file=sys.stderr, flush=True)
        began = time.monotonic()
        found, verdicts = _checked(each, why)
        if not quiet and not why:
            print(f"  {_text(verdicts)} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True)
        rows += found
        counts += verdicts
    head = ["figure", "published", "band", "again", "verdict"]
    return Table("Figures, measured again", head, rows, _text(counts)), not counts.keys() & {OUTSIDE, FAILED}


def _checked(each: Measurement, why: str) -> tuple[list[list[str]], Counter[str]]:
    """Return the rows of a measurement's figures, and the number of each verdict. `why`: the reason to skip it."""
    try:
        again = {} if why else measured_again(each)
    except FailedError as error:
        again, why = {}, f"{FAILED}: {error}"
    if why:
        row = [f"{each.table}: {count(len(each.figures), 'figure')}", "-", "-", "-", why]
        return [row], Counter({why.partition(":")[0]: len(each.figures)})
    rows, verdicts = list[list[str]](), Counter[str]()
    for figure, new in again.items():
        verdict = INSIDE if each.inside(figure, new.mean) else OUTSIDE
        rows.append([f"{each.table}: {figure.row}, {figure.column}", *each.texts(figure), new.text(each.decimals), verdict])
        verdicts[verdict] += 1
    return rows, verdicts


def _text(counts: Counter[str]) -> str:
    return ", ".join(f"{number} {verdict}" for verdict, number in counts.items())


def _obstacle(each: Measurement, minutes: float) -> str:
    """Return why a measurement is skipped; empty if it is not."""
    if each.data and not Path(os.environ.get("FEDLOOM_DATA") or "data").is_dir():
        return f"{SKIPPED}: needs a data folder (FEDLOOM_DATA)"
    if each.minutes > minutes:
        return f"{SKIPPED}: takes {each.minutes:g} minutes"
    return ""


def measured_again(each: Measurement) -> dict[Figure, Spread]:
    """Run the command in an empty folder, and return each figure's mean and deviation. Raises FailedError if it fails."""
    data = Path(os.environ.get("FEDLOOM_DATA") or "data").absolute()
    options = ["--quiet", *(["--json"] if each.words[0] == "run" else [])]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-m", "fedloom.sims.cli", *each.words, *options], cwd=folder, capture_output=True, text=True,
            env={**os.environ, "FEDLOOM_DATA": str(data)}, check=False,
        )  # fmt: skip
        if done.returncode:
            raise FailedError((done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1])
        if each.words[0] == "run":
            results = [run["summary"] for run in json.loads(done.stdout.splitlines()[-1])["runs"]]
        else:
            results = _cells(next(Path(folder).rglob("tables.md")).read_text(encoding="utf-8"))
    return {figure: _value(results, figure, each) for figure in each.figures}


def _value(results: Any, figure: Figure, each: Measurement) -> Spread:
    """Return a figure's mean and deviation in the summaries of runs, or in the cells of a reproduction."""
    path = figure.metric.split(" / ")
    try:
        if isinstance(results, list):
            keys = [int(key) if key.isdecimal() else key for key in path]
            return spread([(100 if each.unit == PERCENT else 1) * at(summary, keys) for summary in results])
        mean, _, deviation = at(results, path).partition(" ± ")
        return Spread(each.seeds, float(mean), float(deviation or "nan"))
    except (AttributeError, LookupError, TypeError, ValueError):
        raise FailedError(f"the results have no number at '{figure.metric}'") from None


def _cells(text: str) -> dict[str, dict[str, dict[str, str]]]:
    """Return the cells of tables in Markdown: by title without the number of seeds, row and column."""
    tables, title, columns = dict[str, dict[str, dict[str, str]]](), "", list[str]()
    for line in text.splitlines():
        if match := TITLE.fullmatch(line):
            title, columns = _read(match[1]), []
        elif line.startswith("| "):
            row = [_read(cell) for cell in CELL.split(line)[1:-1]]
            if columns:
                tables.setdefault(title, {})[row[0]] = dict(zip(columns, row[1:], strict=True))
            columns = columns or row[1:]
    return tables


def _read(cell: str) -> str:
    """Return a text without the escapes of Markdown."""
    return re.sub(r"\\(.)", r"\1", cell.strip())
