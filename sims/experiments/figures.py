"""The published figures: figures.yaml, their bands, and the tables in Markdown that are written from them."""

import contextlib
import dataclasses
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from fedloom.conf.errors import UserError, unknown
from fedloom.conf.formatting import count
from fedloom.sims.report.spread import Spread
from fedloom.sims.report.tables import Table

FILE = "figures.yaml"
WRITTEN = ("README.md", "sims/experiments/RESULTS.md", "sims/experiments/results/fusion.md")  # in a checkout
PERCENT, NUMBER = "percent", "number"
LEAST = {PERCENT: lambda mean: 0.5, NUMBER: lambda mean: 0.01 * abs(mean)}  # the smallest half of a band
MARKED = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
KINDS = {str: "a text", float: "a number", bool: "true or false", tuple: "a list"}


@dataclass(frozen=True)
class Figure:
    """A cell of a table: mean and standard deviation over seeds, in % for shares.

    `metric` is the path to the value, with " / " between its keys: in a run's summary.json ("accuracy / sum / union"), or
    in a reproduction's tables.md (table, row, column).
    """

    row: str
    column: str
    metric: str
    mean: float
    deviation: float


@dataclass(frozen=True)
class Measurement:
    """A command that a user types, with the figures that it measures.

    Attributes:
        table: The table of its figures.
        heading: The heading of the table's first column.
        command: `fedloom run ... --seeds 0,1,2` or `fedloom reproduce ... --seeds 3`.
        commit: The commit of the code.
        date: The day of the measurement.
        machine: The machine.
        minutes: How long the command takes on two cores.
        figures: The figures.
        data: Whether the command needs a data folder.
        unit: "percent" or "number".
        decimals: The decimals of mean and deviation.
    """

    table: str
    heading: str
    command: str
    commit: str
    date: str
    machine: str
    minutes: float
    figures: tuple[Figure, ...]
    data: bool = False
    unit: str = PERCENT
    decimals: int = 1

    @cached_property
    def words(self) -> list[str]:
        """The words of the command after `fedloom`."""
        return shlex.split(self.command)[1:]

    @cached_property
    def seeds(self) -> int:
        """The number of seeds; 0 if the command does not say it."""
        value = self.words[self.words.index("--seeds") + 1 :][:1] if "--seeds" in self.words else []
        return int(value[0]) if value and self.words[0] == "reproduce" else len(value and value[0].split(","))

    def published(self, figure: Figure) -> Spread:
        """Return the stored mean and deviation."""
        return Spread(self.seeds, figure.mean, figure.deviation)

    def tolerance(self, figure: Figure) -> float:
        """Return half of the band: two standard errors of a difference, or 0.5 points (1% of a number) if that is more.

        The difference is that of two means over this number of seeds, each with the stored deviation.
        """
        return max(2 * figure.deviation * math.sqrt(2 / self.seeds), LEAST[self.unit](figure.mean))

    def texts(self, figure: Figure) -> tuple[str, str]:
        """Return the stored mean and deviation, and the band, as text."""
        return self.published(figure).text(self.decimals), f"± {self.tolerance(figure):.{self.decimals}f}"

    def inside(self, figure: Figure, mean: float) -> bool:
        """Return whether a mean that is measured again is in the figure's band."""
        return abs(mean - figure.mean) <= self.tolerance(figure)


def measurements() -> list[Measurement]:
    """Read the file. Raises UserError, which names the table, the figure and the key, for a bad one."""
    text = (Path(__file__).parent / FILE).read_text(encoding="utf-8")
    try:
        tables = yaml.safe_load(text)
        every = [_measurement(name, table, entry) for name, table in tables.items() for entry in table["measured"]]
    except (yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{FILE}: every table needs `heading` and a list `measured` ({why})") from None
    cells = Counter((each.table, figure.row, figure.column) for each in every for figure in each.figures)
    for (table, row, column), times in cells.items():
        if times > 1:
            raise UserError(f"{FILE}, {table}: '{row}, {column}' is there {times} times; a cell takes one figure")
    return every


def selected(names: Sequence[str], every: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements of these tables; without names, all. Raises UserError for an unknown name."""
    for name in names:
        if name not in (known := {each.table for each in every}):
            raise unknown("table", name, known)
    return [each for each in every if not names or each.table in names]


def shown(every: Iterable[Measurement]) -> Table:
    """Return all figures as a table for the terminal."""
    rows = [
        [each.table, f"{figure.row}, {figure.column}", *each.texts(figure),
         each.seeds, each.date, each.commit, each.minutes, each.command]
        for each in every for figure in each.figures
    ]  # fmt: skip
    head = ["table", "figure", "mean ± deviation", "band", "seeds", "date", "commit", "minutes", "command"]
    return Table("Published figures", head, rows)


def rendered(name: str, every: Sequence[Measurement]) -> str:
    """Return a table in Markdown, with seeds, machine, date and commit below."""
    own = selected([name], every)
    cells = {(f.row, f.column): each.published(f).text(each.decimals) for each in own for f in each.figures}
    rows, columns = (list(dict.fromkeys(key[index] for key in cells)) for index in (0, 1))
    table = Table(
        "", [own[0].heading, *columns], [[row, *(cells.get((row, column), "-") for column in columns)] for row in rows]
    )
    facts = {f"{count(each.seeds, 'seed')}: {each.machine}, {each.date}, commit {each.commit}": None for each in own}
    return f"{table.markdown()}\nMean ± deviation over {'; '.join(facts)} (`fedloom results {name}`).\n"


def with_figures(text: str, every: Sequence[Measurement]) -> str:
    """Return a Markdown text with each marked table written from the figures. Raises UserError for a mark without an end."""
    if text.count("<!-- figures:") != len(MARKED.findall(text)):
        raise UserError("a mark `<!-- figures: NAME -->` needs its own `<!-- end -->`, each on a line of its own")
    return MARKED.sub(lambda match: f"{match[1]}{rendered(match[2], every)}{match[3]}", text)


def write(home: Path) -> list[Path]:
    """Write the marked tables of a checkout, and return the files that have changed. Raises UserError elsewhere."""
    every, changed = measurements(), []
    for path in (home / name for name in WRITTEN):
        if not path.is_file():
            raise UserError(f"--write: {path} does not exist; use it in a checkout of Fedloom")
        if (new := with_figures(old := path.read_text(encoding="utf-8"), every)) != old:
            path.write_text(new, encoding="utf-8")
            changed.append(path)
    return changed


def _measurement(name: str, table: Mapping[str, Any], entry: Any) -> Measurement:
    """Return a measurement with its figures, all checked."""
    if not isinstance(entry, Mapping):
        raise UserError(f"{FILE}, {name}: each entry of `measured` must have keys, not {entry!r}")
    values = {**entry, "table": name, "heading": table["heading"], "date": str(entry.get("date", ""))}
    where = f"{FILE}, {name}, '{entry.get('command', '?')}'"
    if isinstance(rows := values.get("figures"), list):
        values["figures"] = tuple(_figure(row, f"{where}, figure {number}") for number, row in enumerate(rows, 1))
    made = _built(Measurement, values, where)
    if made.unit not in LEAST:
        raise UserError(f"{where}: unit must be {' or '.join(LEAST)}, not '{made.unit}'")
    with contextlib.suppress(ValueError):  # quotes that do not end, seeds that are not a number
        if made.command.startswith(("fedloom run ", "fedloom reproduce ")) and made.seeds >= 2:
            return made
    raise UserError(f"{where}: command must be `fedloom run` or `fedloom reproduce` with --seeds, at least two")


def _figure(row: Any, where: str) -> Figure:
    names = [field.name for field in dataclasses.fields(Figure)]
    if not isinstance(row, list) or len(row) != len(names):
        raise UserError(f"{where}: takes [{', '.join(names)}], not {row!r}")
    return _built(Figure, dict(zip(names, row, strict=True)), where)


def _built(kind: type, values: Any, where: str) -> Any:
    """Return a dataclass with these values. Raises UserError for a missing, unknown or wrong one."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if odd := sorted(map(str, values.keys() - fields.keys())):
        raise unknown(f"key of {where}:", odd[0], fields)
    for name, field in fields.items():
        if name not in values and field.default is dataclasses.MISSING:
            raise UserError(f"{where}: {name} is missing")
        value = values.get(name, field.default)
        wanted = next((base for base in KINDS if field.type == base or str(field.type).startswith(base.__name__)), int)
        good = isinstance(value, wanted) or (wanted is float and isinstance(value, int))
        if not good or (isinstance(value, bool) and wanted is not bool) or value == "":
            raise UserError(f"{where}: {name} must be {KINDS.get(wanted, 'a whole number')}, not {value!r}")
        if wanted in (int, float) and not (math.isfinite(value) and (value >= 0 or name == "mean")):
            raise UserError(f"{where}: {name} must be finite and at least 0, not {value!r}")
    return kind(**values)
