"""The tables of the papers as printed: `cells("cla_ot", "1").shown("cifar10", "fused")`.

There is one YAML file for each paper. The numbers are the papers', the titles and notes are ours. A cell that contradicts
another cell of its paper is marked as doubtful, with the reason.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

import yaml

from fedloom.conf.errors import UserError, unknown

PAPERS = ("sum_aggregation", "arithmetic", "cla_ot", "components", "lasem")
SCALES = {"percent": 1.0, "fraction": 100.0, "number": 1.0, "map": 1.0}  # from a cell to what is shown; a map is a text

Name = str | int | float  # of a row or column
Value = float | str | None


@dataclass(frozen=True)
class Cells:
    """A table of a paper: `rows` of values, one for each of `columns`; None where the paper has no value.

    `unit` is "percent", "fraction", "number" or "map" (layers from 1, such as "1-2-5"). `spread` has standard deviations,
    for some rows. `doubtful` has reasons by (row, column).
    """

    title: str
    columns: tuple[Name, ...]
    rows: Mapping[Name, tuple[Value, ...]]
    unit: str = "percent"
    note: str = ""
    spread: Mapping[Name, tuple[float | None, ...]] = field(default_factory=dict)
    doubtful: Mapping[tuple[Name, Name], str] = field(default_factory=dict)

    def value(self, row: Name, column: Name) -> Value:
        """Return the value as printed; None if the paper has no such cell."""
        return self._found(self.rows, row, column)

    def number(self, row: Name, column: Name) -> float | None:
        """Return the number, in % for accuracies; None if the paper has no number."""
        value = self.value(row, column)
        return None if value is None or isinstance(value, str) else SCALES[self.unit] * value

    def shown(self, row: Name, column: Name) -> str:
        """Return the cell as text: "92.5 ± 2.6", with a "?" if it is doubtful; "-" for an empty one."""
        value, spread = self.value(row, column), self._found(self.spread, row, column)
        if value is None:
            return "-"
        mark = " ?" if (row, column) in self.doubtful else ""
        if isinstance(value, str):
            return value + mark
        if self.unit == "number":
            return f"{value:g}{mark}"
        scale = SCALES[self.unit]
        return f"{scale * value:.1f}" + (f" ± {scale * spread:.1f}" if isinstance(spread, float | int) else "") + mark

    def _found(self, rows: Mapping[Name, tuple[Any, ...]], row: Name, column: Name) -> Any:
        return rows[row][self.columns.index(column)] if row in rows and column in self.columns else None


def cells(paper: str, table: str) -> Cells:
    """Return a paper's table. Raises UserError for an unknown paper or table."""
    tables = _read(paper)["tables"]
    if table not in tables:
        raise UserError(f"paper '{paper}': no table '{table}'; there are {', '.join(tables)}")
    section = tables[table]
    rows, spread = ({row: tuple(values) for row, values in section.get(part, {}).items()} for part in ("rows", "spread"))
    doubtful = {(row, column): why for row, column, why in section.get("doubtful", [])}
    unit, note = section.get("unit", "percent"), section.get("note", "")
    return Cells(section["title"], tuple(section["columns"]), rows, unit, note, spread, doubtful)


def tables_of(paper: str) -> list[str]:
    """Return the names of a paper's tables."""
    return list(_read(paper)["tables"])


def classes_of(paper: str, task: str) -> dict[str, int]:
    """Return the classes of a paper's task by name, with their numbers in the data set. Raises UserError if it has none."""
    named = _read(paper).get("classes", {})
    if task not in named:
        raise unknown("task", task, list(named))
    return dict(named[task])


def source_of(paper: str) -> str:
    """Return a paper's title and authors."""
    return str(_read(paper)["source"])


@lru_cache(maxsize=len(PAPERS))
def _read(paper: str) -> dict[str, Any]:
    if paper not in PAPERS:
        raise unknown("paper", paper, list(PAPERS))
    text = (files(__name__) / f"{paper}.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
