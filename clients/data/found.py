"""The contents, name and path of a user's own domain, and the errors about it."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fedloom.clients.data.form import KINDS as INPUTS
from fedloom.clients.data.schema import IMAGES, TASKS, Schema
from fedloom.clients.data.sources import Labels, Pixels, Positions
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import error_summary, is_reference

KINDS = ("images", "npz", "dataset", "table")  # prefixes of domains with a path
KEYS = {  # of the query in a domain such as npz:PATH?KEY=VALUE&KEY=VALUE
    "images": (),
    "npz": ("inputs", "task"),
    "dataset": ("image", "label", "inputs", "task"),
    "table": ("target", "features", "without", "categories", "missing", "task"),
}
OF_FUNCTIONS = ("inputs", "task")  # keys of module:function?KEY=VALUE

Select = Callable[[Positions], Pixels | Iterable[Pixels]]


@dataclass(frozen=True)
class Encoding:
    """How the rows of a table become inputs.

    Attributes:
        features: The columns, in the order of the inputs.
        values: By categorical column, the values that become a column of 0 and 1 each.
        means: By column, the number in place of a missing value.
    """

    features: Sequence[str]
    values: Mapping[str, Sequence[str]]
    means: Mapping[str, float]


@dataclass(frozen=True, eq=False)
class Contents:
    """The content of a user's domain. Its parts are "train" and "test", or only "all".

    Attributes:
        labels: By part, the targets: class numbers, int64 [n], or as Schema says.
        images: By part, a function that returns the inputs at some positions.
        classes: The number of classes, labels or target numbers.
        names: The names of the classes, labels or numbers; empty if they have none.
        files: Image files that are opened one by one.
        left_out: Descriptions of files and examples that are not read.
        schema: The kind of inputs and targets.
        groups: By part, the columns that can divide a table among sites.
        notes: Warnings.
        encoding: Of a table.
    """

    labels: Mapping[str, Labels]
    images: Mapping[str, Select]
    classes: int
    names: tuple[str, ...]
    files: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()
    schema: Schema = IMAGES
    groups: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    encoding: Encoding | None = None


def has_path(domain: str) -> bool:
    """Return whether a domain's name has a path, as in images:PATH."""
    kind, _, rest = domain.partition(":")
    return kind in KINDS and bool(rest)


def path_of(domain: str) -> Path:
    """Return the absolute path in a domain's name, such as images:PATH."""
    text = domain.partition(":")[2]
    return _path(text if _exists(text) else text.partition("?")[0])


def query_of(domain: str) -> dict[str, str]:
    """Return the query of a domain such as dataset:PATH?image=photo&label=kind.

    The values are URL-quoted, as the user wrote them: see `unquoted`. Raises UserError for unknown or doubled keys.
    """
    kind = domain.partition(":")[0]
    text = domain.partition(":")[2] if kind in KINDS else domain
    asked, keys = "" if _exists(text) else text.partition("?")[2], KEYS.get(kind, OF_FUNCTIONS)
    pairs = [part.partition("=") for part in asked.split("&") if part]
    query = {key: value for key, _, value in pairs}
    if len(query) < len(pairs):
        key, number = Counter(key for key, _, _ in pairs).most_common(1)[0]
        raise UserError(f"domain '{domain}': has the key '{key}' {number} times; write it once")
    if odd := [key for key in query if key not in keys]:
        takes = f"takes ?{'&'.join(f'{key}=' for key in keys)}" if keys else "takes no keys"
        raise UserError(f"domain '{domain}': unknown key '{odd[0]}'; {takes} (write & in a name as %26)")
    for key, known in (("inputs", INPUTS), ("task", TASKS)):
        if query.get(key, known[0]) not in known:
            raise UserError(f"domain '{domain}': {key}: got '{query[key]}', takes {', '.join(known)}")
    return query


def function_of(domain: str) -> str:
    """Return the name of a domain without a path, such as module:function?task=class, without its query."""
    return domain.partition("?")[0]


def unquoted(text: str) -> str:
    """Return a name in a query without URL quoting (%2C is a comma) and spaces at its ends."""
    return unquote(text).strip()


def asking(domain: str, text: str) -> str:
    """Return `text`, such as "task=regression", as it continues a domain's name."""
    return f"{'&' if query_of(domain) else '?'}{text}"


def _exists(text: str) -> bool:
    return os.path.exists(_path(text))  # also False for a name that is too long


def _path(text: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(text)))  # expanduser does not change the ~ of an unknown user


def short(domain: str) -> str:
    """Return a domain's name in tables: the last part of a path, or the attribute of `module:attribute`."""
    kind = domain.partition(":")[0]
    if kind in KINDS:
        path = path_of(domain)
        return (path.stem if kind in ("npz", "table") else path.name) or kind
    name = function_of(domain)
    return name.partition(":")[2].rpartition(".")[2] if is_reference(name) else name


def absolute(domain: str) -> str:
    """Return a domain's name with its path, if it has one, made absolute."""
    if not has_path(domain):
        return domain
    kind, _, rest = domain.partition(":")
    query = "" if _exists(rest) else "".join(rest.partition("?")[1:])
    return f"{kind}:{path_of(domain)}{query}"


def origin(domain: str) -> str:
    """Return the path in a domain's name as the user wrote it, or else the name."""
    return domain.partition(":")[2] if domain.partition(":")[0] in KINDS else domain


def wrong(domain: str, why: str) -> UserError:
    """Return a UserError about a domain. `why` continues the sentence that begins with the domain's path or name.

    A `?KEY=` in it becomes `&KEY=` if the domain already has a query.
    """
    why = re.sub(r"(?<= )\?(?=[a-z]+=)", "&", why) if query_of(domain) else why
    return UserError(f"domain '{short(domain)}': {origin(domain)} {why}")


@contextmanager
def legible(domain: str, place: str = "") -> Iterator[None]:
    """Enter a context that turns any error into a UserError: `place` in a domain (default: its path) cannot be read."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        where = f"domain '{short(domain)}': {place or origin(domain)}"
        raise UserError(
            f"{where} cannot be read ({error_summary(error)}). Replace it with an intact copy, or remove it."
        ) from error


@contextmanager
def fitting(domain: str) -> Iterator[None]:
    """Enter a context that turns a ValueError about a domain's contents into a UserError that names the domain."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise wrong(domain, str(error)) from None
