"""Compare runs, as tables, an HTML page and data frames."""

import base64
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedloom.conf.errors import UserError, for_python
from fedloom.conf.formatting import count
from fedloom.server.run_folder.layout import COMPARED
from fedloom.sims.comparison.curves import pictures
from fedloom.sims.comparison.entries import COSTS, entries_of
from fedloom.sims.comparison.groups import UNION, Group, grouped, refuse_nothing
from fedloom.sims.comparison.statistics import paired
from fedloom.sims.comparison.tables import (
    ONE_SEED,
    Pair,
    accuracy_rows,
    cost_table,
    difference_table,
    domains_of,
    pairs,
    runs_table,
    what_differs,
)
from fedloom.sims.report.canvas import KINDS
from fedloom.sims.report.compared import note_page
from fedloom.sims.report.page import Details, Part, write_page
from fedloom.sims.report.spread import mean_and_spread, spread
from fedloom.sims.report.tables import Table
from fedloom.sims.sweeps.names import text_of

if TYPE_CHECKING:
    import pandas

AS_WRITTEN = "This page does not change with its runs. If a run forgets a site later, write the page again."


@for_python
def compare(runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], by: str | Sequence[str] = ()) -> "Comparison":
    """Compare runs and their baselines; return a `Comparison` with tables, plots and notes.

    Args:
        runs: Results, folders of runs, or folders that contain runs.
        by: Keys such as `strategy.name`; each combination of their values is a row. Default: all that differs except seeds.

    Raises:
        UserError: There is nothing to compare.
    """
    paths = [runs] if isinstance(runs, str | os.PathLike) else list(runs)
    return compared([Path(path).expanduser() for path in paths], [by] if isinstance(by, str) and by else list(by))


def compared(folders: Sequence[Path], by: Sequence[str] = ()) -> "Comparison":
    """Compare runs as `compare` does. Errors name the options of the command line."""
    entries, notes = entries_of(folders)
    refuse_nothing(entries, notes)
    groups, differing, more = grouped(entries, by)
    return Comparison(tuple(groups), tuple(differing), (*notes, *more))


@dataclass(frozen=True)
class Comparison:
    """Groups of runs, a row each. `differing`: the keys in which rows differ. `notes`: warnings, and runs left out."""

    groups: Sequence[Group]
    differing: Sequence[str]
    notes: Sequence[str]

    def __repr__(self) -> str:
        runs = count(sum(len(group.entries) for group in self.groups), "run")
        return f"Comparison({count(len(self.groups), 'row')}, {runs}, {count(len(self.notes), 'note')})"

    @property
    def differences(self) -> list[Pair]:
        """Paired differences on the union of all domains, over common seeds, with confidence intervals."""
        return pairs(self.groups)

    def tables(self) -> list[Table]:
        """Return tables of accuracy, of paired differences (with at least two common seeds), and of cost."""
        clear = [pair for pair in self.differences if pair.difference.n > 1]
        return [accuracy_rows(self.groups), *([difference_table(clear)] if clear else []), cost_table(self.groups)]

    def text(self) -> str:
        """Return the tables and the notes as plain text."""
        return "\n".join([*(table.plain() for table in self.tables()), *(f"note: {note}" for note in self.notes)])

    def table(self) -> "pandas.DataFrame":
        """Return a data frame, a row for each group: seeds, mean and deviation of test accuracy by domain, mean cost.

        `attrs["notes"]` has the notes.
        """
        import pandas

        table = pandas.DataFrame([_row(group, domains_of(self.groups)) for group in self.groups]).set_index("row")
        table.attrs["notes"] = list(self.notes)
        return table

    def runs(self) -> "pandas.DataFrame":
        """Return a data frame, a row for each run and baseline: group, seed, differing keys, test accuracies, cost.

        Defaults are filled in. None: the method does not have this option.
        """
        import pandas

        return pandas.DataFrame(self._runs())

    def _runs(self) -> list[dict[str, Any]]:
        names = [*domains_of(self.groups), UNION]
        return [
            {"row": group.label, "run": str(entry.folder), "seed": entry.config.seed, "baseline": entry.baseline}
            | {key: entry.everything.get(key) for key in dict.fromkeys([*self.differing, *group.values])}
            | {name: entry.accuracy.get(name) for name in names}
            | {"rounds": len(entry.metrics), **entry.cost}
            for group in self.groups
            for entry in group.entries
        ]

    def __str__(self) -> str:
        return self.text()

    def as_json(self) -> dict[str, Any]:
        """Return rows, differences, runs and notes as plain values; NaN becomes None."""
        rows = [{**_row(group, domains_of(self.groups)), "values": dict(group.values)} for group in self.groups]
        pairs = [{"one": pair.one, "other": pair.other, **asdict(pair.difference)} for pair in self.differences]
        return {"rows": _plain(rows), "differences": _plain(pairs), "runs": _plain(self._runs()), "notes": list(self.notes)}

    def write_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write `runs()` to a CSV file, and return its path. Raise UserError if it cannot be written."""
        return _written(path, self.runs().to_csv(index=False))

    def write_markdown(self, path: str | os.PathLike[str]) -> Path:
        """Write `tables()` to a Markdown file, and return its path. Raise UserError if it cannot be written."""
        return _written(path, "\n".join(table.markdown() for table in self.tables()))

    def write_latex(self, path: str | os.PathLike[str]) -> Path:
        """Write `tables()` to a file for LaTeX's \\input, and return its path. Raise UserError if it cannot be written."""
        return _written(path, "\n".join(table.latex() for table in self.tables()))

    def write_pictures(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the curves as PNG, SVG and PDF files to a folder, and return the paths of all files."""
        try:
            drawn = pictures(self.groups, Path(folder).expanduser(), KINDS)
            return [picture.path.with_suffix(f".{kind}") for picture in drawn for kind in KINDS]
        except OSError as error:
            raise UserError(f"{folder}: cannot be written ({error.strerror or error})") from None

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Write a self-contained HTML page, and return its path. Raise UserError if it cannot be written.

        The file `compared.json` next to it names the runs that it shows.
        """
        with tempfile.TemporaryDirectory(prefix="fedloom-") as folder:
            sections = self._sections(Path(folder))
            page = write_page(Path(path).expanduser(), "Fedloom: comparison of runs", sections, sorts=True)
        entries = [entry for group in self.groups for entry in group.entries]
        try:
            note_page(page, [entry.folder.parent.parent if entry.baseline else entry.folder for entry in entries])
        except OSError as error:
            raise UserError(f"{page.with_name(COMPARED)}: cannot be written ({error.strerror or error})") from None
        return page

    @property
    def html(self) -> str:
        """The HTML page of `write` as text."""
        with tempfile.TemporaryDirectory(prefix="fedloom-") as folder:
            return self.write(Path(folder) / "page.html").read_text(encoding="utf-8")

    def _sections(self, folder: Path) -> list[tuple[str, Sequence[Part]]]:
        accuracy, *others = self.tables()
        differs: list[Part] = [what_differs(self.groups, self.differing)] if self.differing else []
        sections: list[tuple[str, Sequence[Part]]] = [
            ("", [headline(self.groups), *(f"Note: {note}" for note in self.notes), AS_WRITTEN]),
            (self.groups[0].metric.caption, [accuracy, *pictures(self.groups, folder, ["svg"])]),
            ("Differences and cost", others),
            ("Compared runs", [*differs, runs_table(self.groups), Details("Common configuration", self._common())]),
        ]
        return sections

    def _common(self) -> str:
        """Return the configuration values that all rows share, a line each."""
        first = self.groups[0].entries[0]
        return "\n".join(f"{key}: {text_of(value)}" for key, value in first.keys.items() if key not in self.differing)

    def _repr_html_(self) -> str:
        """Return the tables, the notes and the first plot, for a notebook."""
        with tempfile.TemporaryDirectory(prefix="fedloom-") as folder:
            drawn = [base64.b64encode(picture.path.read_bytes()).decode() for picture in pictures(self.groups, Path(folder))]
        images = [f'<img src="data:image/png;base64,{data}">' for data in drawn[:1]]
        notes = [f"<p>Note: {escape(note)}</p>" for note in self.notes]
        return "".join([*(table.html() for table in self.tables()), *notes, *images])


def headline(groups: Sequence[Group]) -> str:
    """Return a sentence or two on the row with the best first metric, and on rows that are not clearly worse."""
    seeds = sorted({seed for group in groups for seed in group.seeds})
    metric = groups[0].metric
    none = [-math.inf if metric.higher_is_better else math.inf]
    best = max(groups, key=lambda group: metric.worth(spread(list(group.scores().values()) or none).mean))
    end, unit = "highest" if metric.higher_is_better else "lowest", " %" if metric.share else ""
    many = f"{len(groups)} row{'s' * (len(groups) > 1)}, {len(seeds)} seed{'s' * (len(seeds) > 1)}"
    reached = mean_and_spread(list(best.scores().values()), metric.share) if best.scores() else "-"
    if len(seeds) == 1 and len(groups) > 1:
        return f"{many}: {best.label} has the {end} test {metric.title}, {reached}{unit}. {ONE_SEED}."
    text = f"{many}: {best.label} has the {end} mean test {metric.title}, {reached}{unit}."
    unclear = [group.label for group in groups if group is not best and not _ahead(best, group)]
    rest = " and others" if len(unclear) > 3 else ""
    more = f" With these seeds, the difference from {', '.join(unclear[:3])}{rest} is not statistically clear."
    return f"{text}{more if unclear else ''}"


def _written(path: str | os.PathLike[str], text: str) -> Path:
    path = Path(path).expanduser()
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror or error})") from None
    return path


def _ahead(one: Group, other: Group) -> bool:
    """Return whether the interval of the paired difference is on the better side of 0."""
    difference = paired(one.scores(), other.scores())
    if difference is None:
        return False
    return difference.low > 0 if one.metric.higher_is_better else difference.high < 0


def _row(group: Group, domains: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"row": group.label, "seeds": sorted(group.seeds), "runs": len(group.entries)}
    for name in [*domains, UNION]:
        scores = spread(list(group.scores(name).values()) or [math.nan])
        row |= {f"{name} mean": scores.mean, f"{name} std": scores.deviation}
    return row | {what: group.cost(what).mean for what in COSTS}


def _plain(value: Any) -> Any:
    """Return the value for JSON, with None in place of NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
