"""The runs of a folder, read for the desk: every read is cached until a file of the run changes."""

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from fedloom.conf.errors import UserError
from fedloom.conf.metrics import ACCURACY, Facts, facts_of
from fedloom.conf.plugins import error_summary
from fedloom.server.ledger.database import LEDGER
from fedloom.server.run_folder.layout import CONFIG, METRICS, SEAL, SUMMARY
from fedloom.server.run_folder.listing import RUNNING, busy, is_run, searched
from fedloom.sims.operations.run_list import CORRECT, row_of

T = TypeVar("T")
LISTED_SECONDS = 2.0  # a list of the folder's runs is this old at most
MOST_CACHED = 2000  # results in the cache
_WAL = f"{LEDGER}-wal"
_STAMPED = (CONFIG, METRICS, SUMMARY, LEDGER, _WAL)
_HEAD = 96  # bytes: the ledger's digest in its seal; the salt of its log, which is new whenever the log begins again


class MissingError(UserError):
    """A run, site, request or certificate that does not exist."""


@dataclass(frozen=True)
class Run:
    """A run in the list. `id`: its path below the folder of runs, for URLs. `version`: changes when the run does."""

    id: str
    version: str
    status: str
    method: str
    seed: int
    round: int
    rounds: int
    metric: str
    test: str
    validation: str
    forgotten: list[str]
    waiting: list[str]
    bytes: int
    notes: list[str]

    @property
    def running(self) -> bool:
        """Whether a server works on it."""
        return self.status == RUNNING


def checked(root: Path) -> Path:
    """Return the folder of runs. Raises UserError if it does not exist, or is a run itself."""
    if not root.is_dir() or is_run(root):
        fault = "is a run" if root.is_dir() else "the folder does not exist"
        raise UserError(f"{root}: {fault}; name the folder that contains the runs")
    return root


def id_of(root: Path, path: Path) -> str:
    """Return a run's id: its path below `root`, with `/` as `~1` and `~` as `~0`, as in JSON pointers."""
    return path.relative_to(root).as_posix().replace("~", "~0").replace("/", "~1")


def _is_text(name: str) -> bool:
    """Return whether a file's name is valid UTF-8, which answers and pages must be."""
    return _shown(name) == name


def _shown(text: str) -> str:
    """Return a text with escapes for the bytes of a file's name that are not UTF-8."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")


def stamp(path: Path) -> tuple[Any, ...]:
    """Return a value that changes when a file of the run does, or a server starts or stops.

    Times of files are too coarse for two requests at once, so the ledger counts with its seal and its log's size and salt.
    """
    return busy(path), *(_stamp(path / name) for name in _STAMPED), _head(path / SEAL), _head(path / _WAL)


def version(path: Path) -> str:
    """Return a run's stamp as a short text."""
    return hashlib.sha256(repr(stamp(path)).encode()).hexdigest()[:16]


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = file.stat()
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size


def _head(file: Path) -> bytes:
    try:
        if not file.is_file():  # such as a pipe, which would block
            return b""
        with file.open("rb") as content:
            return content.read(_HEAD)
    except OSError:
        return b""


@dataclass
class Runs:
    """Read access to the runs in and below a folder."""

    root: Path
    _listed: tuple[float, dict[str, Path], list[str]] = (0.0, {}, [])
    _cache: dict[tuple[Any, ...], tuple[Any, Any]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def paths(self) -> dict[str, Path]:
        """Return the folder of each run, by its id."""
        return self._list()[0]

    def path(self, id: str) -> Path:
        """Return the folder of a listed run. Raises MissingError for others: an id is never used as a path."""
        path = self.paths().get(id)
        if path is None or not (path / CONFIG).is_file():  # the list may be older than a removal
            raise MissingError("This run does not exist.")
        return path

    def all(self) -> list[Run]:
        """Return all runs that can be read, by id."""
        return [run for id in self.paths() if isinstance(run := self._readable(id), Run)]

    def damaged(self) -> list[str]:
        """Return a line for each run that cannot be read. Such runs are not in the list."""
        found = (self._readable(id) for id in self.paths())
        return [*self._list()[1], *(_shown(self.without_root(fault)) for fault in found if isinstance(fault, str) and fault)]

    def get(self, id: str) -> Run:
        """Return one run. Raises UserError if it does not exist or cannot be read."""
        return self.cached(id, _run, id)

    def cached(self, id: str, read: Callable[..., T], *words: Any) -> T:
        """Return `read(path, *words)`, read again only after a file of the run has changed."""
        path, key = self.path(id), (id, read, *words)
        now = stamp(path)
        if (known := self._cache.get(key)) and known[0] == now:
            return known[1]
        try:
            result = read(path, *words)
        except (UserError, OSError):
            self.path(id)  # it may have been removed meanwhile
            raise
        if len(self._cache) > MOST_CACHED:
            self._cache.clear()
        self._cache[key] = now, result
        return result

    def version(self, id: str) -> str:
        """Return a text that changes when the run does."""
        return version(self.path(id))

    def without_root(self, text: str) -> str:
        """Return a message without the path of the folder of runs."""
        for name in {str(self.root.resolve()), str(self.root)} - {"."}:
            text = text.replace(f"{name}/", "")
        return text

    def _list(self) -> tuple[dict[str, Path], list[str]]:
        with self._lock:
            if time.monotonic() - self._listed[0] > LISTED_SECONDS or not self._listed[1]:
                every = list(searched(self.root))
                found = {id_of(self.root, path): path for path, fault in every if not fault}
                odd = [id for id in found if not _is_text(id)]
                faults = [self.without_root(fault) for _, fault in every if fault]
                faults += [f"{id}: its name is not valid UTF-8; rename the folder" for id in odd]
                named = {id: path for id, path in found.items() if id not in odd}
                self._listed = time.monotonic(), named, [_shown(fault) for fault in faults]
            return self._listed[1:]

    def _readable(self, id: str) -> Run | str:
        """Return a run, or a line on its damage; empty if it was just removed."""
        try:
            return self.get(id)
        except MissingError:
            return ""
        except UserError as error:
            return str(error)
        except Exception as error:  # its files may be damaged in any way
            return (
                f"{id}: cannot be read ({error_summary(error)}); {CORRECT}" if (self.paths()[id] / CONFIG).exists() else ""
            )


def _run(path: Path, id: str) -> Run:
    now, row = version(path), row_of(path)
    if row["seed"] is None:
        raise UserError(row["odd"][-1])
    metric = metric_of_row(row)
    texts = {key: metric.text(row[key]) for key in ("test", "validation")}
    same = ("status", "method", "seed", "round", "rounds", "forgotten", "waiting", "bytes")
    return Run(
        id,
        now,
        metric=metric.title,
        notes=[line.replace(str(path), id) for line in row.get("odd", [])],
        **texts,
        **{key: row[key] for key in same},
    )


def metric_of_row(row: dict[str, Any]) -> Facts:
    """Return the first metric of a row of `fedloom runs`."""
    return facts_of(row.get("metric", ACCURACY))
