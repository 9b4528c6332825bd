"""Tables: CSV and Parquet files with one example per row.

`table:PATH?target=COLUMN&features=A,B&categories=C,D:no|yes&missing=mean`. Without `features`, all columns are used but the
target and those in `without`. Columns of text, and those in `categories`, become one column of 0 and 1 per value. If sites
have separate files, list the values of all sites (`D:no|yes`), so that their columns agree, or hash them into 16 (`D:#16`).
With `missing=mean`, gaps get the column's mean, those of categories the value `missing`; rows without a target are not read.
Names are URL-quoted: `%2C` is a comma.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from fedloom.clients.data.arrays import Labelled
from fedloom.clients.data.contents import of_arrays
from fedloom.clients.data.form import FEATURES
from fedloom.clients.data.found import Contents, Encoding, asking, fitting, query_of, unquoted
from fedloom.conf.errors import UserError, listed, nearest, plain
from fedloom.conf.plugins import error_summary

TARGETS = ("target", "label", "class", "y", "outcome")  # names of a target column, lower-case
SUFFIXES = {".csv", ".csv.gz", ".tsv", ".parquet"}
MISSING = ("refuse", "drop", "mean")
GAP = "missing"  # with missing=mean, the value of a category's gaps
MOST_VALUES = 100  # of a column of text
NUMBER = r"\s*[-+]?\d[\d.,]*\s*"  # also with commas
MOST_BUCKETS = 1024  # of hashed values
_WHOLE = r"^(-?\d+)\.0+$|^(\d{4}-\d\d-\d\d) 00:00:00$"


def read_table(path: Path, domain: str) -> Contents:
    """Read table:PATH. Raises UserError for columns that are missing, of the wrong kind or with missing values."""
    query = query_of(domain)
    with fitting(domain):
        whole, unnamed = _loaded(path, _categories(query.get("categories", "")))
        wanted, features, categories = _asked(whole, query)
        _check_commas(whole, [name for name in (*features, *wanted) if name not in categories])
        missing = query.get("missing", MISSING[0])
        table, dropped = _complete(whole, features, wanted, categories, missing)
        values = _values(table, features, categories)
        numbers = whole.dropna(subset=wanted)[[name for name in features if name not in values]]
        means = numbers.mean().to_dict() if missing == "mean" else {}
        columns, names, notes = _numbers(table, features, values)
        example = Labelled(columns, _targets(table, wanted), kind=FEATURES, task=query.get("task", ""), columns=names)
        if len(wanted) > 1:
            example = Labelled(columns, example.targets, tuple(wanted), FEATURES, example.task, names)
    content = of_arrays({"all": example}, domain)
    groups = {name: table[name].to_numpy() for name in table.columns}
    notes = (*content.notes, *notes)
    notes += (dropped,) if dropped else ()
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
        table = table.fillna(dict(encoding.means)).infer_objects()
        table = table.assign(**{name: _filled(table[name], True) for name in features if GAP in values.get(name, ())})
        if lacking := [plain(name) for name in features if table[name].isna().any()]:
            raise ValueError(f"has missing values in {', '.join(lacking[:5])}; fill them in, or leave these rows out")
        return np.stack([part for name in features for part in _parts(table[name], values.get(name))], axis=1)
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
            if not 2 <= (buckets := int(hashed[1])) <= MOST_BUCKETS:
                raise ValueError(f"'{plain(name)}' is hashed into {buckets} columns; write {quote(name)}:#2 to "
                                 f"{quote(name)}:#{MOST_BUCKETS}")  # fmt: skip
            listed[name] = _buckets(buckets)
    return listed


def _buckets(number: int) -> list[str]:
    return [f"#{bucket}" for bucket in range(number)]


def _texts(column: Any, values: Sequence[str]) -> Any:
    """Return a categorical column as texts, or as the names of the buckets in `values` (sha256, equal on all machines).

    A value's text depends on no other row: 1.0 is "1", and midnight is its day.
    """
    texts = column.astype(str).str.replace(_WHOLE, r"\1\2", regex=True)
    if not values or list(values) != _buckets(len(values)):
        return texts
    digests = {text: int.from_bytes(hashlib.sha256(text.encode()).digest()) for text in texts.unique()}
    return texts.map({text: f"#{number % len(values)}" for text, number in digests.items()})


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
    table.columns = [str(name).strip() for name in table.columns]
    _check_twice(table.columns)
    if not len(table):
        raise ValueError("has no rows")
    unnamed = [name for name in table.columns if name.startswith("Unnamed:") or not name]
    return table.drop(columns=unnamed), len(unnamed)


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


def _check(table: Any, columns: list[str], key: str, only: list[str] | None = None) -> None:
    """Raise ValueError for a column that the table does not have, or that is not in `only`."""
    for name in columns:
        if name not in table.columns:
            near = nearest(name, table.columns)
            hint = f"; did you mean '{plain(near)}'?" if near else "."
            has = f"It has {plain(listed(name, table.columns))}.{_quoting(table)}"
            raise ValueError(f"has no column '{plain(name)}' ({key}){hint} {has}")
        if only is not None:
            raise ValueError(f"'{plain(name)}' is in categories, but not in features; add it to features, or remove it")


def _complete(
    table: Any, features: list[str], wanted: list[str], categories: Iterable[str], missing: str
) -> tuple[Any, str]:
    """Return the table without gaps, as `missing` says, and a line about rows that are not read."""
    import pandas

    if missing not in MISSING:
        raise ValueError(f"missing: got '{plain(missing)}', takes {', '.join(MISSING)}")
    columns, rows = [*features, *wanted], len(table)
    if endless := [name for name in columns if table[name].dtype.kind == "f" and np.isinf(table[name]).any()]:
        raise ValueError(f"has infinite values in {', '.join(map(plain, endless[:5]))}; correct them, or leave them empty")
    gaps = table[columns].isna().sum()
    gaps = gaps[gaps > 0]
    if len(gaps) and missing == "refuse":
        text = any(not pandas.api.types.is_numeric_dtype(table[name]) for name in gaps.index)
        mean = f", or ?missing=mean to fill in the column's mean{f' (texts: the value {GAP!r})' if text else ''}"
        where = ", ".join(f"{plain(str(name))} ({gaps[name]})" for name in gaps.index[:5])
        mean = "" if set(gaps.index) & set(wanted) else mean
        raise ValueError(f"has missing values in {where}. Write ?missing=drop to drop these rows{mean}.")
    table = table.dropna(subset=columns if missing == "drop" else wanted)
    if not len(table):
        raise ValueError("has missing values in every row; remove the column with most of them from features")
    for name in features if missing == "mean" else ():
        table = table.assign(**{name: _filled(table[name], name in categories)})
    why = "a missing value" if missing == "drop" else "no target"
    return table, f"{rows - len(table)} of {rows} rows have {why}, and are not read" if len(table) < rows else ""


def _filled(column: Any, is_category: bool) -> Any:
    """Return a column with its mean in place of missing values, or GAP for texts and categories."""
    import pandas

    if not column.isna().any():
        return column
    if is_category or not pandas.api.types.is_numeric_dtype(column):
        return _texts(column.dropna(), []).reindex(column.index, fill_value=GAP)
    if column.isna().all():
        raise ValueError(f"has no values in '{plain(column.name)}'; leave it out with ?without={quote(column.name)}")
    return column.fillna(column.mean())


def _check_commas(table: Any, columns: list[str]) -> None:
    """Raise ValueError for a column of texts that are numbers with commas."""
    for name in columns:
        texts = table[name].dropna()
        if texts.dtype.kind in "fiub" or not all(isinstance(text, str) and re.fullmatch(NUMBER, text) for text in texts):
            continue
        if odd := next((text for text in texts if "," in text), ""):
            raise ValueError(f"'{plain(name)}' has numbers with commas, such as {odd}; write decimals with points")


def _values(table: Any, features: list[str], categories: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the values of each categorical column. Raises ValueError for texts that nearly every row has for itself."""
    import pandas

    found = {}
    for name in features:
        if name in categories or not pandas.api.types.is_numeric_dtype(table[name]):
            given = categories.get(name, [])
            values = found[name] = list(dict.fromkeys(given or sorted(_texts(table[name], given).unique())))
            if not given and len(values) > max(2, min(MOST_VALUES, len(table) // 2)):
                raise ValueError(f"'{plain(name)}' has {len(values)} different texts in {len(table)} rows. Leave it out "
                                 f"with ?without={quote(name)}, or hash it with ?categories={quote(name)}:#16.")  # fmt: skip
    return found


def _parts(column: Any, values: Sequence[str] | None) -> list[np.ndarray]:
    """Return the columns of numbers for a feature: one for each value of a category, else one. Raises ValueError."""
    import pandas

    name = plain(str(column.name))
    if values is None:
        if not pandas.api.types.is_numeric_dtype(column):
            raise ValueError(f"has texts in '{name}'; it takes numbers")
        return [column.to_numpy(np.float32)]
    texts = _texts(column, values)
    if odd := set(texts) - set(values):
        raise ValueError(f"'{name}' has the value '{plain(new := sorted(odd)[0])}', takes {plain(listed(new, values))}")
    return [(texts == value).to_numpy(np.float32) for value in values]


def _numbers(
    table: Any, features: list[str], values: dict[str, list[str]]
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Return the features as numbers [n, columns], the names of these columns, and warnings."""
    parts, names, constant, merged = [], [], [], []
    for name in features:
        column, made = table[name], _parts(table[name], values.get(name))
        parts += made
        names += [f"{name}={value}" for value in values[name]] if name in values else [name]
        merged += [name] if name not in values and len(np.unique(made[0])) < column.nunique() / 2 else []
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
