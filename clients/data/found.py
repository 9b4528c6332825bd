"""A domain of the user's own as it was found, its name and its place, and what is said of what does not fit."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from fedloom.clients.data.sources import Labels, Pixels, Positions
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import is_reference, told

KINDS = ("images", "npz", "dataset")  # of paths

Select = Callable[[Positions], Pixels | Iterable[Pixels]]


@dataclass(frozen=True, eq=False)
class Contents:
    """A domain as it was found. By part (train and test, or all): int64 labels, and the images at given positions.

    `names`: of its `classes`, in their order; none if they are numbers. `files`: those that are opened one by one.
    `left_out`: what is there and is not read, in words.
    """

    labels: Mapping[str, Labels]
    images: Mapping[str, Select]
    classes: int
    names: tuple[str, ...]
    files: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()


def has_path(domain: str) -> bool:
    """Whether the domain is a path, such as images:PATH."""
    kind, _, rest = domain.partition(":")
    return kind in KINDS and bool(rest)


def path_of(domain: str) -> Path:
    """The whole path of a domain that has one."""
    text = domain.partition(":")[2]
    if domain.startswith("dataset:") and not _path(text).exists():
        text = text.partition("?")[0]
    return _path(text)


def columns_of(domain: str) -> dict[str, str]:
    """The columns that a data set's domain names: dataset:PATH?image=photo&label=kind. UserError for other keys."""
    text = domain.partition(":")[2]
    asked = "" if _path(text).exists() else text.partition("?")[2]
    columns = dict(parse_qsl(asked, keep_blank_values=True))
    if odd := [key for key in columns if key not in ("image", "label")]:
        raise UserError(f"domain '{domain}': '{odd[0]}' is not a key of it; takes ?image=COLUMN&label=COLUMN")
    return columns


def _path(text: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(text)))  # expanduser leaves the ~ of an unknown user as it is


def short(domain: str) -> str:
    """A domain's name in tables: of a path its last part, of `module:attribute` the attribute."""
    kind, _, rest = domain.partition(":")
    if kind in KINDS:
        path = path_of(domain)
        return (path.stem if kind == "npz" else path.name) or kind
    return rest.rpartition(".")[2] if is_reference(domain) else domain


def absolute(domain: str) -> str:
    """The same domain with a path that means the same wherever a process was started."""
    if not has_path(domain):
        return domain
    kind, _, rest = domain.partition(":")
    query = "" if _path(rest).exists() or kind != "dataset" else "".join(rest.partition("?")[1:])
    return f"{kind}:{path_of(domain)}{query}"


def origin(domain: str) -> str:
    """Where a domain comes from, as the user wrote it."""
    return domain.partition(":")[2] if domain.partition(":")[0] in KINDS else domain


def wrong(domain: str, why: str) -> UserError:
    """The error for a domain that does not fit."""
    return UserError(f"domain '{short(domain)}': {origin(domain)} {why}")


@contextmanager
def legible(domain: str, place: str = "") -> Iterator[None]:
    """What fails in reading becomes a UserError in one line that names the domain and the place (empty: its origin)."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        where = f"domain '{short(domain)}': {place or origin(domain)}"
        raise UserError(f"{where} cannot be read ({told(error)}); put an intact copy there or remove it") from error


@contextmanager
def fitting(domain: str) -> Iterator[None]:
    """A ValueError about what was read names the domain."""
    try:
        yield
    except UserError:
        raise
    except ValueError as error:
        raise wrong(domain, str(error)) from None
