"""Whether a domain's files are as they were. What a process keeps of a domain counts only as long as they are."""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from uuid import uuid4

MOST_MOMENTS = 8

Listed = dict[Path, str]
Counts = Callable[[str], bool]

_LISTED: ContextVar[Listed | None] = ContextVar("listed", default=None)  # listings that count as true for now
_AT: ContextVar[str] = ContextVar("at", default="")  # the run whose message is answered
_MOMENTS: OrderedDict[tuple[str, int], Listed] = OrderedDict()
_RUN = ""  # the run that this process carries out


def state(path: Path, counts: Counts = lambda name: True) -> str:
    """A digest of the names, sizes and times of a file, or of all files below a folder; of what is not there, too.

    `counts`: which of the files of a folder do, by their names; all that ask for the same folder ask alike.
    """
    known = _LISTED.get()
    if known is None:
        return fresh(path, counts)
    if path not in known:
        known[path] = fresh(path, counts)
    return known[path]


def run_now() -> str:
    """The run that this process is at work on; empty outside of one. A function of the user's is asked once in each."""
    return _RUN or _AT.get()


@contextmanager
def held() -> Iterator[None]:
    """Every file is looked at once at most within: for what asks for the same domains again and again."""
    token = _LISTED.set({}) if _LISTED.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _LISTED.reset(token)


@contextmanager
def of_run() -> Iterator[None]:
    """A run in this process, from its beginning to its end."""
    global _RUN
    before, _RUN = _RUN, _RUN or uuid4().hex
    try:
        yield
    finally:
        _RUN = before


@contextmanager
def at_round(run: str, number: int, afresh: bool = False) -> Iterator[None]:
    """A message of a round is answered: files are looked at once in a round. `afresh`: now, even so."""
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
    """The same, looked at now, whatever is held."""
    found = hashlib.blake2b(digest_size=16)
    for name, entry in _entries(path, str(path), frozenset()):
        if isinstance(entry, os.DirEntry) and not counts(entry.name):
            continue
        try:
            seen = entry.stat()
            stamp = f"{seen.st_size}:{seen.st_mtime_ns}:{seen.st_ctime_ns}"
        except OSError:  # gone, or a link to nothing
            stamp = "-"
        found.update(f"{name}\0{stamp}\0".encode(errors="surrogateescape"))
    return found.hexdigest()


def _entries(path: Path, name: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, Path | os.DirEntry[str]]]:
    """A file, or all files below a folder, in the order of their names; links are followed, but to no folder above."""
    try:
        here = os.stat(path)
        listed = sorted(os.scandir(path), key=lambda entry: entry.name)
    except OSError:  # a file, or what cannot be looked into: whoever reads it says so
        yield name, path
        return
    if (one := (here.st_dev, here.st_ino)) in above:
        return
    for entry in listed:
        if entry.is_dir():
            yield from _entries(Path(entry.path), f"{name}/{entry.name}", above | {one})
        else:
            yield f"{name}/{entry.name}", entry
