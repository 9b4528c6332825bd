"""The columns of a table: gaps, categories, numbers and targets."""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from fedloom.conf.errors import listed, plain

MISSING = ("refuse", "drop", "mean")
GAP = "missing"  # with missing=mean, the value of a category's gaps
MOST_VALUES = 100  # of a column of text
DATE = r"\d{4}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{2,4}"
NUMBER = r"\s*[-+]?\d[\d.,]*\s*"  # also with commas
_WHOLE = r"^(-?\d+)\.0+$|^(\d{4}-\d\d-\d\d) 00:00:00$"


def _texts(column: Any, values: Sequence[str]) -> Any:
    """Return a categorical column as texts, or as the names of the buckets in `values` (sha256, equal on all machines).

    A value's text depends on no other row: 1.0 is "1", and midnight is its day.
    """
    texts = column.astype(str).str.replace(_WHOLE, r"\1\2", regex=True)
    if not values or list(values) != buckets(len(values)):
        return texts
    digests = {text: int.from_bytes(hashlib.sha256(text.encode()).digest()) for text in texts.unique()}
    return texts.map({text: f"#{number % len(values)}" for text, number in digests.items()})


def stripped(table: Any) -> Any:
    """Return a table without spaces around its texts."""
    texts = [name for name in table.columns if table[name].dtype.kind == "O"]
    return table.assign(**{name: table[name].map(lambda text: text.strip() if isinstance(text, str) else text)
                           for name in texts})  # fmt: skip


def spoiled(table: Any, names: Iterable[str]) -> tuple[str, ...]:
    """Return a warning for each of these columns of texts in which most entries are numbers."""
    odd = {name: text for name in names if (text := _odd(table[name]))}
    mend = "so each of its values is a category; correct such entries, or leave them empty"
    return tuple(f"'{plain(name)}' has numbers and '{plain(text)}', {mend}" for name, text in odd.items())


def _odd(column: Any) -> str:
    """Return the first entry that is not a number, in a column in which most are; else nothing."""
    import pandas

    texts = column.dropna().astype(str)
    numbers: Any = pandas.to_numeric(texts, errors="coerce")
    odd = texts[numbers.isna()]
    return odd.iloc[0] if 0 < len(odd) < len(texts) / 2 else ""


def complete(table: Any, features: list[str], wanted: list[str], categories: Iterable[str], missing: str) -> tuple[Any, str]:
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
        table = table.assign(**{name: filled(table[name], name in categories)})
    why = "a missing value" if missing == "drop" else "no target"
    return table, f"{rows - len(table)} of {rows} rows have {why}, and are not read" if len(table) < rows else ""


def filled(column: Any, is_category: bool) -> Any:
    """Return a column with its mean in place of missing values, or GAP for texts and categories."""
    import pandas

    if not column.isna().any():
        return column
    if is_category or not pandas.api.types.is_numeric_dtype(column):
        return _texts(column.dropna(), []).reindex(column.index, fill_value=GAP)
    if column.isna().all():
        raise ValueError(f"has no values in '{plain(column.name)}'; leave it out with ?without={quote(column.name)}")
    return column.fillna(column.mean())


def check_commas(table: Any, columns: list[str]) -> None:
    """Raise ValueError for a column of texts that are numbers with commas."""
    for name in columns:
        texts = table[name].dropna()
        if texts.dtype.kind in "fiub" or not all(isinstance(text, str) and re.fullmatch(NUMBER, text) for text in texts):
            continue
        if odd := next((text for text in texts if "," in text), ""):
            raise ValueError(f"'{plain(name)}' has numbers with commas, such as {odd}; write decimals with points")


def values_of(table: Any, features: list[str], categories: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the values of each categorical column. Raises ValueError for texts that nearly every row has for itself."""
    import pandas

    found, own = {}, {}
    for name in features:
        if name in categories or not pandas.api.types.is_numeric_dtype(table[name]):
            given = categories.get(name, [])
            values = found[name] = list(dict.fromkeys(given or sorted(_texts(table[name], given).unique())))
            if not given and len(values) > max(2, min(MOST_VALUES, len(table) // 2)):
                own[name] = values
    if own:
        raise ValueError(_too_many(own, table))
    return found


def _too_many(own: Mapping[str, list[str]], table: Any) -> str:
    """Return what to do with columns of texts that nearly every row has for itself."""
    (first, texts), *others = own.items()
    if odd := _odd(table[first]):
        return f"'{plain(first)}' has numbers and '{plain(odd)}'. Correct such entries, or leave them empty."
    more = "".join(f", '{plain(name)}' {len(each)}" for name, each in others)
    names, it = [quote(name) for name in own], "them" if others else "it"
    dates = [plain(name) for name, each in own.items() if all(re.match(DATE, text) for text in each if text != GAP)]
    days = f" Instead of {' and '.join(dates)}, add a column of numbers, such as days." if dates else ""
    return (
        f"'{plain(first)}' has {len(texts)} different texts in {len(table)} rows{more}. Leave {it} out with "
        f"?without={','.join(names)}, or hash {it} with ?categories={','.join(f'{name}:#16' for name in names)}.{days}"
    )


def parts_of(column: Any, values: Sequence[str] | None) -> list[np.ndarray]:
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


def numbers_of(
    table: Any, features: list[str], values: dict[str, list[str]]
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Return the features as numbers [n, columns], the names of these columns, and warnings."""
    parts, names, constant, merged = [], [], [], []
    for name in features:
        column, made = table[name], parts_of(table[name], values.get(name))
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


def targets_of(table: Any, wanted: list[str]) -> np.ndarray:
    """Return the targets: numbers [n, targets] for several columns; else numbers or texts [n]. Raises ValueError."""
    columns = table[wanted]
    if len(wanted) > 1:
        text = [name for name in wanted if columns[name].dtype.kind not in "fiub"]
        if text:
            raise ValueError(f"the target '{plain(text[0])}' is text; several targets are numbers")
        return columns.to_numpy(np.float64)
    values = columns[wanted[0]].to_numpy()
    return values.astype(str) if values.dtype.kind not in "fiub" else values


def buckets(number: int) -> list[str]:
    """Return the names of the columns of a category that is hashed into a number of buckets."""
    return [f"#{bucket}" for bucket in range(number)]
