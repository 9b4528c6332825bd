"""Tables: CSV and Parquet files with one example per row.

`table:PATH?target=COLUMN&features=A,B&categories=C,D:no|yes&missing=mean`. Without `features`, all columns are used but the
target and those in `without`. Columns of text, and those in `categories`, become one column of 0 and 1 per value. If sites
have separate files, list the values of all sites (`D:no|yes`), so that their columns agree, or hash them into 16 (`D:#16`).
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from fedloom.clients.data.arrays import Labelled
from fedloom.clients.data.contents import of_arrays
from fedloom.clients.data.form import FEATURES
from fedloom.clients.data.found import Contents, fitting, query_of
from fedloom.conf.errors import listed, nearest, plain

TARGETS = ("target", "label", "class", "y", "outcome")  # names of a target column, lower-case
SUFFIXES = {".csv", ".csv.gz", ".tsv", ".parquet"}
MISSING = ("refuse", "drop", "mean")
MOST_VALUES = 100  # of a column of text
MOST_BUCKETS = 1024  # of hashed values


def read_table(path: Path, domain: str) -> Contents:
    """Read table:PATH. Raises UserError for columns that are missing, of the wrong kind or with missing values."""
    query = query_of(domain)
    with fitting(domain):
        table, unnamed = _loaded(path)
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
        table = _complete(table, [*features, *wanted], wanted, query.get("missing", MISSING[0]))
        columns, names, notes = _numbers(table, features, categories)
        example = Labelled(columns, _targets(table, wanted), kind=FEATURES, task=query.get("task", ""), columns=names)
        if len(wanted) > 1:
            example = Labelled(columns, example.targets, tuple(wanted), FEATURES, example.task, names)
    content = of_arrays({"all": example}, domain)
    groups = {name: table[name].to_numpy() for name in table.columns}
    notes += (f"{unnamed} columns without a name are not read",) if unnamed else ()
    return Contents(content.labels, content.images, content.classes, content.names or _names(content, wanted),
                    schema=content.schema, groups={"all": groups}, notes=notes)  # fmt: skip


def _names(content: Contents, wanted: list[str]) -> tuple[str, ...]:
    return tuple(wanted) if content.schema.task != "class" else ()


def _categories(text: str) -> dict[str, list[str]]:
    """Return the values of each categorical column: none for those in the table, and the names of N buckets for `#N`."""
    pairs = [part.partition(":") for part in _listed(text)]
    listed = {name.strip(): [value.strip() for value in values.split("|") if value.strip()] for name, _, values in pairs}
    for name, values in listed.items():
        if len(values) == 1 and (hashed := re.fullmatch(r"#(\d{1,9})", values[0])):
            if not 2 <= (buckets := int(hashed[1])) <= MOST_BUCKETS:
                raise ValueError(
                    f"'{plain(name)}' is hashed into {buckets} columns; write {name}:#2 to {name}:#{MOST_BUCKETS}"
                )
            listed[name] = _buckets(buckets)
    return listed


def _buckets(number: int) -> list[str]:
    return [f"#{bucket}" for bucket in range(number)]


def _texts(column: Any, values: list[str]) -> Any:
    """Return a categorical column as texts, or as the names of the buckets in `values` (sha256, equal on all machines)."""
    if column.dtype.kind == "f" and bool((column % 1 == 0).all()):
        column = column.astype("int64")  # in a table with missing values, whole numbers are floats
    texts = column.astype(str)
    if not values or values != _buckets(len(values)):
        return texts
    digests = {text: int.from_bytes(hashlib.sha256(text.encode()).digest()) for text in texts.unique()}
    return texts.map({text: f"#{number % len(values)}" for text, number in digests.items()})


def _listed(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if double := next((part for index, part in enumerate(parts) if part in parts[:index]), ""):
        raise ValueError(f"lists '{plain(double)}' twice; remove one of the two")
    return parts


def _loaded(path: Path) -> tuple[Any, int]:
    """Return the table, and how many columns without a name it had."""
    import pandas

    name = path.name.lower()
    if not path.is_file() or not any(name.endswith(suffix) for suffix in SUFFIXES):
        raise ValueError(f"is not a table. Name a file that ends in {', '.join(sorted(SUFFIXES))}.")
    if name.endswith(".parquet"):
        table = pandas.read_parquet(path)
    else:
        how: dict[str, Any] = {"sep": "\t" if name.endswith(".tsv") else ",", "skipinitialspace": True}
        first = pandas.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False, **how)
        _check_twice([str(name).strip() for name in first.iloc[0]])  # read_csv renames the second one
        table = pandas.read_csv(path, **how)
    table.columns = [str(name).strip() for name in table.columns]
    _check_twice(table.columns)
    if not len(table):
        raise ValueError("has no rows")
    unnamed = [name for name in table.columns if name.startswith("Unnamed:") or not name]
    return table.drop(columns=unnamed), len(unnamed)


def _check_twice(names: Iterable[str]) -> None:
    """Raise ValueError for a name that comes twice."""
    counts = Counter(name for name in names if name)
    if doubles := [name for name, number in counts.items() if number > 1]:
        raise ValueError(f"has the column '{plain(doubles[0])}' twice; rename one")


def _target(table: Any) -> str:
    named = [name for name in table.columns if name.lower() in TARGETS]
    if len(named) != 1:
        have = f"has the columns {', '.join(map(plain, table.columns))}"
        raise ValueError(f"{have}. Name the one to predict with ?target=COLUMN.")
    return named[0]


def _check(table: Any, columns: list[str], key: str, only: list[str] | None = None) -> None:
    """Raise ValueError for a column that the table does not have, or that is not in `only`."""
    for name in columns:
        if name not in table.columns:
            near = nearest(name, table.columns)
            hint = f"; did you mean '{plain(near)}'?" if near else "."
            raise ValueError(f"has no column '{plain(name)}' ({key}){hint} It has {plain(listed(name, table.columns))}.")
        if only is not None:
            raise ValueError(f"'{plain(name)}' is in categories, but not in features; add it to features, or remove it")


def _complete(table: Any, columns: list[str], wanted: list[str], missing: str) -> Any:
    """Return the table without rows with missing values, or with means in their place, as `missing` says."""
    if missing not in MISSING:
        raise ValueError(f"missing: got '{plain(missing)}', takes {', '.join(MISSING)}")
    counts = table[columns].isna().sum()
    counts = counts[counts > 0]
    if not len(counts):
        return table
    if missing == "drop":
        table = table.dropna(subset=columns)
        if not len(table):
            raise ValueError("has missing values in every row; remove the column with most of them from features")
        return table
    text = [name for name in counts.index if table[name].dtype.kind not in "fiub"]
    if missing == "mean" and not text and not set(counts.index) & set(wanted):
        return table.fillna(table[list(counts.index)].mean())
    listed = ", ".join(f"{plain(str(name))} ({number})" for name, number in counts.head(5).items())
    why = f"has missing values in {listed}"
    if missing == "mean":
        raise ValueError(f"{why}; missing=mean fills in numbers of features only. Write ?missing=drop to drop these rows.")
    raise ValueError(f"{why}. Write ?missing=drop to drop these rows, or ?missing=mean to fill in the column's mean.")


def _numbers(
    table: Any, features: list[str], categories: dict[str, list[str]]
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Return the features as numbers [n, columns], the names of these columns, and warnings."""
    import pandas

    parts, names, constant, merged = [], [], [], []
    for name in features:
        column = table[name]
        number = pandas.api.types.is_numeric_dtype(column) and name not in categories
        if not number:
            given = categories.get(name, [])
            texts = _texts(column, given)
            values = list(dict.fromkeys(given or sorted(texts.unique())))
            if odd := set(texts) - set(values):
                raise ValueError(f"'{plain(name)}' has the value '{plain(sorted(odd)[0])}', which categories does not list")
            if not given and len(values) > max(2, min(MOST_VALUES, len(table) // 2)):
                raise ValueError(f"'{plain(name)}' has {len(values)} different texts in {len(table)} rows. Leave it out "
                                 f"with ?without={plain(name)}, or hash it with ?categories={plain(name)}:#16.")  # fmt: skip
            parts += [(texts == value).to_numpy(np.float32) for value in values]
            names += [f"{name}={value}" for value in values]
        else:
            numbers = column.to_numpy(np.float32)
            merged += [name] if len(np.unique(numbers)) < column.nunique() / 2 else []
            parts.append(numbers)
            names.append(name)
        constant += [name] if column.nunique() < 2 else []
    if len(constant) == len(features):
        raise ValueError("has the same value in every row of all features, so nothing can be learned from it")
    notes = (f"the same value in every row of {', '.join(map(plain, constant))}; leave it out",) if constant else ()
    if merged:
        notes += (f"most values of {', '.join(map(plain, merged))} are equal in float32; subtract a constant from them",)
    return np.stack(parts, axis=1), tuple(names), notes


def _targets(table: Any, wanted: list[str]) -> np.ndarray:
    columns = table[wanted]
    if len(wanted) > 1:
        text = [name for name in wanted if columns[name].dtype.kind not in "fiub"]
        if text:
            raise ValueError(f"the target '{plain(text[0])}' is text; several targets are numbers")
        return columns.to_numpy(np.float64)
    values = columns[wanted[0]].to_numpy()
    return values.astype(str) if values.dtype.kind not in "fiub" else values
