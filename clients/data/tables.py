"""Tables: CSV and Parquet files with one example per row.

`table:PATH?target=COLUMN&features=A,B&categories=C,D:no|yes&missing=mean`. Without `features`, all columns are used but the
target and those in `without`. Columns of text, and those in `categories`, become one column of 0 and 1 per value. If sites
have separate files, list the values of all sites (`D:no|yes`), so that their columns agree, or hash them into 16 (`D:#16`).
With `missing=mean`, gaps get the column's mean, those of categories the value `missing`; rows without a target are not read.
Names are URL-quoted: `%2C` is a comma.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from fedloom.clients.data.arrays import Labelled
from fedloom.clients.data.contents import of_arrays
from fedloom.clients.data.form import FEATURES
from fedloom.clients.data.found import Contents, Encoding, asking, fitting, query_of, unquoted
from fedloom.clients.data.table_columns import (
    GAP,
    MISSING,
    buckets,
    check_commas,
    complete,
    filled,
    numbers_of,
    parts_of,
    spoiled,
    stripped,
    targets_of,
    values_of,
)
from fedloom.conf.errors import UserError, listed, nearest, plain
from fedloom.conf.plugins import error_summary

TARGETS = ("target", "label", "class", "y", "outcome")  # names of a target column, lower-case
SUFFIXES = {".csv", ".csv.gz", ".tsv", ".parquet"}
MOST_BUCKETS = 1024  # of hashed values


def read_table(path: Path, domain: str) -> Contents:
    """Read table:PATH. Raises UserError for columns that are missing, of the wrong kind or with missing values."""
    query = query_of(domain)
    with fitting(domain):
        whole, unnamed = _loaded(path, _categories(query.get("categories", "")))
        wanted, features, categories = _asked(whole, query)
        check_commas(whole, [name for name in (*features, *wanted) if name not in categories])
        missing = query.get("missing", MISSING[0])
        table, dropped = complete(whole, features, wanted, categories, missing)
        values = values_of(table, features, categories)
        numbers = whole.dropna(subset=wanted)[[name for name in features if name not in values]]
        means = numbers.mean().to_dict() if missing == "mean" else {}
        columns, names, notes = numbers_of(table, features, values)
        example = Labelled(columns, targets_of(table, wanted), kind=FEATURES, task=query.get("task", ""), columns=names)
        if len(wanted) > 1:
            example = Labelled(columns, example.targets, tuple(wanted), FEATURES, example.task, names)
    content = of_arrays({"all": example}, domain)
    groups = {name: table[name].to_numpy() for name in table.columns}
    notes = (*content.notes, *notes)
    notes += (dropped,) if dropped else ()
    notes += spoiled(whole, [name for name in values if name not in categories])
    notes += (f"{unnamed} columns without a name are not read",) if unnamed else ()
    if not query.get("target"):
        notes += (
            f"the target is the column '{plain(wanted[0])}'; write {asking(domain, 'target=COLUMN')} to choose another",
        )
    return Contents(content.labels, content.images, content.classes, content.names or _names(content, wanted),
                    schema=content.schema, groups={"all": groups}, notes=notes,
                    encoding=Encoding(features, values, means))  # fmt: skip


def rows_of(encoding: Encoding, rows: Any) -> np.ndarray:
    """Return rows as inputs [n, features] of a network that learned from a table with this encoding.

    Args:
        encoding: The table's columns, categories, and means in place of missing values.
        rows: A pandas table, a mapping of columns, or the path of a table.

    Raises:
        UserError: A column is missing or of another kind, or has missing values.
    """
    import pandas

    features, values = list(encoding.features), encoding.values
    try:
        table: Any = _loaded(Path(rows), values)[0] if isinstance(rows, str | Path) else pandas.DataFrame(rows)
        table = table.set_axis([str(name).strip() for name in table.columns], axis=1)
        _check(table, features, "inputs")
        _check_twice(name for name in table.columns if name in features)
        table = stripped(table[features]).fillna(dict(encoding.means)).infer_objects()
        table = table.assign(**{name: filled(table[name], True) for name in features if GAP in values.get(name, ())})
        if lacking := [plain(name) for name in features if table[name].isna().any()]:
            raise ValueError(f"has missing values in {', '.join(lacking[:5])}; fill them in, or leave these rows out")
        return np.stack([part for name in features for part in parts_of(table[name], values.get(name))], axis=1)
    except ValueError as error:
        where = str(rows) if isinstance(rows, str | Path) else f"the {type(rows).__name__}"
        raise UserError(f"inputs: {where} {error}") from None


def _asked(table: Any, query: Mapping[str, str]) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Return the columns of targets and of features, and the listed values of categories. Raises ValueError."""
    wanted = _listed(query.get("target", "")) or [_target(table)]
    _check(table, wanted, "target")
    given = _listed(query.get("features", ""))
    left = _listed(query.get("without", ""))
    _check(table, left, "without")
    features = [name for name in given or table.columns if name not in (*wanted, *left)]
    if not features:
        raise ValueError("has no column but the target; name columns to learn from with ?features=A,B")
    categories = _categories(query.get("categories", ""))
    _check(table, features, "features")
    _check(table, [name for name in categories if name not in features], "categories", only=features)
    return wanted, features, categories


def _names(content: Contents, wanted: list[str]) -> tuple[str, ...]:
    return tuple(wanted) if content.schema.task != "class" else ()


def _categories(text: str) -> dict[str, list[str]]:
    """Return the values of each categorical column: none for those in the table, and the names of N buckets for `#N`."""
    pairs = [part.partition(":") for part in text.split(",") if part.strip()]
    listed = {unquoted(name): [unquoted(value) for value in values.split("|") if value.strip()] for name, _, values in pairs}
    for name, values in listed.items():
        if len(values) == 1 and (hashed := re.fullmatch(r"#(\d{1,9})", values[0])):
            if not 2 <= (many := int(hashed[1])) <= MOST_BUCKETS:
                raise ValueError(f"'{plain(name)}' is hashed into {many} columns; write {quote(name)}:#2 to "
                                 f"{quote(name)}:#{MOST_BUCKETS}")  # fmt: skip
            listed[name] = buckets(many)
    return listed


def _listed(text: str) -> list[str]:
    parts = [unquoted(part) for part in text.split(",") if part.strip()]
    if double := next((part for index, part in enumerate(parts) if part in parts[:index]), ""):
        raise ValueError(f"lists '{plain(double)}' twice; remove one of the two")
    return parts


def _loaded(path: Path, texts: Iterable[str] = ()) -> tuple[Any, int]:
    """Return the table, and how many columns without a name it had. Columns in `texts` are read as they are written."""
    import pandas

    name = path.name.lower()
    if not path.is_file() or not any(name.endswith(suffix) for suffix in SUFFIXES):
        raise ValueError(f"is not a table. Name a file that ends in {', '.join(sorted(SUFFIXES))}.")
    if name.endswith(".parquet"):
        with _readable():
            table = pandas.read_parquet(path)
    else:
        how: dict[str, Any] = {"sep": "\t" if name.endswith(".tsv") else ",", "skipinitialspace": True}
        with _readable():
            first = pandas.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False, **how)
        if len(first.columns) == 1 and (other := next((mark for mark in ";\t" if mark in first.iloc[0, 0]), "")):
            sign, takes = "a tab" if other == "\t" else f"'{other}'", "tabs" if how["sep"] == "\t" else "commas"
            raise ValueError(f"has one column, with {sign} in its name; separate its columns by {takes}, and write decimals "
                             "with points")  # fmt: skip
        _check_twice([str(name).strip() for name in first.iloc[0]])  # read_csv renames the second one
        with _readable():
            table = pandas.read_csv(path, dtype={name: str for name in first.iloc[0] if str(name).strip() in texts}, **how)
        if not isinstance(table.index, pandas.RangeIndex):  # read_csv takes the entries without a name as names of rows
            named, entries = len(table.columns), len(table.columns) + table.index.nlevels
            raise ValueError(f"has {entries} entries in a row, but {named} names of columns. Name each column, and remove "
                             "separators at the ends of rows.")  # fmt: skip
    table.columns = [str(name).strip() for name in table.columns]
    _check_twice(table.columns)
    if not len(table):
        raise ValueError("has no rows")
    unnamed = [name for name in table.columns if name.startswith("Unnamed:") or not name]
    return stripped(table.drop(columns=unnamed)), len(unnamed)


@contextmanager
def _readable() -> Iterator[None]:
    """Turn any error of pandas into a ValueError of one line."""
    try:
        yield
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8 text; save it as UTF-8") from None
    except Exception as error:
        raise ValueError(f"cannot be read ({error_summary(error)}). Replace it with an intact copy.") from error


def _check_twice(names: Iterable[str]) -> None:
    """Raise ValueError for a name that comes twice."""
    counts = Counter(name for name in names if name)
    if doubles := [name for name, number in counts.items() if number > 1]:
        raise ValueError(f"has the column '{plain(doubles[0])}' twice; rename one")


def _target(table: Any) -> str:
    named = [name for name in table.columns if name.lower() in TARGETS]
    if len(named) != 1:
        have = f"has the columns {', '.join(map(plain, table.columns))}"
        raise ValueError(f"{have}. Name the one to predict with ?target=COLUMN.{_quoting(table)}")
    return named[0]


def _quoting(table: Any) -> str:
    """Return how to write the table's columns in a query, if they have letters with a meaning there; else nothing."""
    odd = any(letter in name for name in table.columns for letter in ",&:|%")
    return " Write , & : | % in a name as %2C %26 %3A %7C %25." if odd else ""


def _heading(table: Any) -> str:
    """Return a hint if a name of a column is a number, as in a file without a line of names; else nothing."""
    numbers = any(re.fullmatch(r"-?\d+([.,]\d+)?", str(name).strip()) for name in table.columns)
    return " If its first line is data, add a line with the columns' names before it." if numbers else ""


def _check(table: Any, columns: list[str], key: str, only: list[str] | None = None) -> None:
    """Raise ValueError for a column that the table does not have, or that is not in `only`."""
    for name in columns:
        if name not in table.columns:
            near = nearest(name, table.columns)
            hint = f"; did you mean '{plain(near)}'?" if near else "."
            has = f"It has {plain(listed(name, table.columns))}.{_quoting(table)}{_heading(table)}"
            raise ValueError(f"has no column '{plain(name)}' ({key}){hint} {has}")
        if only is not None:
            raise ValueError(f"'{plain(name)}' is in categories, but not in features; add it to features, or remove it")
