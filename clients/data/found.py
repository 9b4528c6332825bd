"""The contents, name and path of a user's own domain, and the errors about it."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from fedloom.clients.data.sources import Labels, Pixels, Positions
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import error_summary, is_reference

KINDS = ("images", "npz", "dataset")  # prefixes of domains with a path

Select = Callable[[Positions], Pixels | Iterable[Pixels]]


@dataclass(frozen=True, eq=False)
class Contents:
    """The content of a user's domain. Its parts are "train" and "test", or only "all".

    Attributes:
        labels: By part, the labels, int64 [n].
        images: By part, a function that returns the images at some positions.
        classes: The number of classes.
        names: The names of the classes; empty if they are numbers.
        files: Image files that are opened one by one.
        left_out: Descriptions of files and images that are not read.
    """

    labels: Mapping[str, Labels]
    images: Mapping[str, Select]
    classes: int
    names: tuple[str, ...]
    files: tuple[Path, ...] = ()
    left_out: tuple[str, ...] = ()


def has_path(domain: str) -> bool:
    """Return whether a domain's name has a path, as in images:PATH."""
    kind, _, rest = domain.partition(":")
    return kind in KINDS and bool(rest)


def path_of(domain: str) -> Path:
    """Return the absolute path in a domain's name, such as images:PATH."""
    text = domain.partition(":")[2]
    if domain.startswith("dataset:") and not _path(text).exists():
        text = text.partition("?")[0]
    return _path(text)


def columns_of(domain: str) -> dict[str, str]:
    """Return the columns in a domain such as dataset:PATH?image=photo&label=kind. Raises UserError for other keys."""
    text = domain.partition(":")[2]
    asked = "" if _path(text).exists() else text.partition("?")[2]
    columns = dict(parse_qsl(asked, keep_blank_values=True))
    if odd := [key for key in columns if key not in ("image", "label")]:
        raise UserError(f"domain '{domain}': unknown key '{odd[0]}'; takes ?image=COLUMN&label=COLUMN")
    return columns


def _path(text: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(text)))  # expanduser does not change the ~ of an unknown user


def short(domain: str) -> str:
    """Return a domain's name in tables: the last part of a path, or the attribute of `module:attribute`."""
    kind, _, rest = domain.partition(":")
    if kind in KINDS:
        path = path_of(domain)
        return (path.stem if kind == "npz" else path.name) or kind
    return rest.rpartition(".")[2] if is_reference(domain) else domain


def absolute(domain: str) -> str:
    """Return a domain's name with its path, if it has one, made absolute."""
    if not has_path(domain):
        return domain
    kind, _, rest = domain.partition(":")
    query = "" if _path(rest).exists() or kind != "dataset" else "".join(rest.partition("?")[1:])
    return f"{kind}:{path_of(domain)}{query}"


def origin(domain: str) -> str:
    """Return the path in a domain's name as the user wrote it, or else the name."""
    return domain.partition(":")[2] if domain.partition(":")[0] in KINDS else domain


def wrong(domain: str, why: str) -> UserError:
    """Return a UserError about a domain. `why` continues the sentence that begins with the domain's path or name."""
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
