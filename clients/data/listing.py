"""Detection of changed files. A process's caches of a domain are valid only while its files are unchanged."""

import functools
import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Lock
from typing import TypeVar, cast
from uuid import uuid4

from fedloom.conf.schema import Config

MOST_MOMENTS = 8

T = TypeVar("T")
Listed = dict[Hashable, object]
Counts = Callable[[str], bool]

_LISTED: ContextVar[Listed | None] = ContextVar("listed", default=None)  # what is valid in this context
_AT: ContextVar[str] = ContextVar("at", default="")  # the run of the current message
_MOMENTS: OrderedDict[tuple[str, int], Listed] = OrderedDict()
_RUN, _RUNS, _LOCK = "", 0, Lock()  # the id of the runs in this process, and their number: threads may have several


def state(path: Path, counts: Counts = lambda name: True) -> str:
    """Return a digest of the names, sizes and times of a file, or of all files below a folder, existing or not.

    Contexts such as `held` cache it. `counts`: whether a file counts, by its name; always the same for the same folder.
    """
    return once(path, lambda: fresh(path, counts))


def once(key: Hashable, compute: Callable[[], T]) -> T:
    """Return compute(), which is computed once for this key in contexts such as `held`: files do not change in them."""
    known = _LISTED.get()
    if known is None:
        return compute()
    if key not in known:
        known[key] = compute()
    return cast("T", known[key])


def run_now() -> str:
    """Return the id or name of the current run, or an empty text. A user's function for images is called once per run."""
    return _RUN or _AT.get()


@contextmanager
def held() -> Iterator[None]:
    """Enter a context in which `state` examines each path at most once."""
    token = _LISTED.set({}) if _LISTED.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _LISTED.reset(token)


@contextmanager
def of_run() -> Iterator[None]:
    """Enter a context in which `run_now` returns one id everywhere in this process, until all threads have left it."""
    global _RUN, _RUNS
    with _LOCK:
        _RUN, _RUNS = _RUN or uuid4().hex, _RUNS + 1
    try:
        yield
    finally:
        with _LOCK:
            _RUNS -= 1
            _RUN = _RUN if _RUNS else ""


@contextmanager
def at_round(run: str, number: int, afresh: bool = False) -> Iterator[None]:
    """Enter a context in which `state` looks at each file or folder once per round, and then answers from memory.

    Args:
        run: The run whose message a site answers.
        number: The round of the message.
        afresh: First forget what earlier messages of this round have seen.
    """
    if afresh:
        _MOMENTS.pop((run, number), None)
    listed = _LISTED.set(_MOMENTS.setdefault((run, number), {}))
    at = _AT.set(run)
    while len(_MOMENTS) > MOST_MOMENTS:
        _MOMENTS.popitem(last=False)
    try:
        yield
    finally:
        _LISTED.reset(listed)
        _AT.reset(at)


def fresh(path: Path, counts: Counts = lambda name: True) -> str:
    """Return the same digest as `state`, but computed now, without any cache."""
    digest = hashlib.blake2b(digest_size=16)
    for name, entry in _entries(path, str(path), frozenset()):
        if isinstance(entry, os.DirEntry) and not counts(entry.name):
            continue
        try:
            seen = entry.stat()
            stamp = f"{seen.st_size}:{seen.st_mtime_ns}:{seen.st_ctime_ns}"
        except OSError:  # gone, or a link to nothing
            stamp = "-"
        digest.update(f"{name}\0{stamp}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()


def content(path: Path, counts: Counts = lambda name: True) -> str:
    """Return a digest of a file's bytes, or of the names and sizes of all files below a folder. It has no times."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    sizes = {name: entry.stat().st_size for name, entry in _entries(path, "", frozenset()) if counts(entry.name)}
    return hashlib.sha256(repr(sizes).encode()).hexdigest()


def _entries(path: Path, name: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, Path | os.DirEntry[str]]]:
    """Yield a file, or all files below a folder, in the order of names. Follows links, except to a folder above."""
    try:
        status = os.stat(path)
        listed = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError:  # a file, or an unreadable folder: reading it raises later
        yield name, path
        return
    if (identity := (status.st_dev, status.st_ino)) in above:
        return
    for entry in listed:
        if entry.is_dir():
            yield from _entries(Path(entry.path), f"{name}/{entry.name}", above | {identity})
        else:
            yield f"{name}/{entry.name}", entry


def while_same(state: Callable[[Config], object]) -> Callable[[Callable[[Config], T]], Callable[[Config], T]]:
    """Return a decorator that caches function(config) while state(config), a digest of files, is unchanged."""

    def decorated(function: Callable[[Config], T]) -> Callable[[Config], T]:
        key = f"_{function.__module__}.{function.__qualname__}"

        @functools.wraps(function)
        def remembered(config: Config) -> T:
            cache, now = vars(config), state(config)
            if key not in cache or cache[key][0] != now:
                cache[key] = now, function(config)
            return cache[key][1]

        return remembered

    return decorated
