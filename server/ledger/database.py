"""The SQLite file of a ledger: opened to write or to read, locked by one server, sealed by its sha256 when closed."""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import portalocker

from fedloom.clients.storage.states import write_bytes
from fedloom.server.ledger.blobs import LedgerError, sync, told
from fedloom.server.ledger.connection import PATIENCE, Connection
from fedloom.server.run_folder.layout import LEDGER, LOCK, SEAL

_TRIES = 10  # for the lock, which one who queues a request has for a moment
_HINTS = {
    "SQLITE_FULL": "make room and run again, what was committed is safe",
    "SQLITE_IOERR": "the disk is full or failing: make room and run again, what was committed is safe",
    "SQLITE_BUSY": f"another process has it since {PATIENCE:.0f} s: let it end and run again",
    "SQLITE_READONLY": "look at the permissions of the file and its folder",
    "SQLITE_CANTOPEN": "look at the permissions of the file and its folder",
    "SQLITE_NOTADB": "put it back from a copy of the run",
    "SQLITE_CORRUPT": "put it back from a copy of the run",
}


class BusyError(LedgerError):
    """Another server is at work on the run."""


@contextmanager
def sqlite_told(path: Path) -> Iterator[None]:
    """Turn what SQLite or the operating system refuses into a LedgerError that names the file."""
    try:
        with told(path):
            yield
    except sqlite3.Error as error:
        name = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
        hint = _HINTS.get(name)
        raise LedgerError(f"{path}: {error}" + (f"; {hint}" if hint else "")) from None


def acquire(folder: Path) -> int:
    """The lock of the folder's one server, as an open file; it dies with the process. LedgerError names who has it."""
    for _ in range(_TRIES):
        if (handle := _try_lock(folder)) is not None:
            return handle
        time.sleep(0.05)
    with told(folder / LOCK):
        owner = (folder / LOCK).read_text(errors="replace").strip() or "unknown"
    raise BusyError(f"{folder}: process {owner} is working on it; let it end, or stop it, and run again")


def refuse_busy(folder: Path) -> None:
    """BusyError if a server is at work on the run in a folder."""
    if (folder / LOCK).exists():
        _unlock(acquire(folder))


def _try_lock(folder: Path) -> int | None:
    """The same, None if another has it."""
    with told(folder / LOCK):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            portalocker.lock(handle, portalocker.LockFlags.EXCLUSIVE | portalocker.LockFlags.NON_BLOCKING)
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        except BaseException as error:
            os.close(handle)
            if isinstance(error, portalocker.AlreadyLocked):
                return None
            raise
    return handle


def _unlock(lock: int) -> None:
    """Give the lock back."""
    os.ftruncate(lock, 0)
    os.close(lock)


def reading(path: Path) -> Connection:
    """A connection that changes neither the file nor its log.

    With a log (a server is there, or one crashed) it is read as well. Without one the file is final and opened as
    immutable: SQLite would make a log otherwise, and fail where it cannot.
    """
    return Connection(path, "mode=ro" if _log(path).exists() else "immutable=1")


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


@dataclass
class Database:
    """One connection: the server's, which holds the lock, or a reader's, which sees what a server writes."""

    path: Path
    server: bool
    _db: Connection = field(init=False)
    _lock: int | None = field(init=False, default=None)
    _final: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self._lock = acquire(self.path.parent) if self.server else None
        try:
            with sqlite_told(self.path):
                self._open()
        except BaseException:
            self._release()
            raise

    def query(self, sql: str, *values: Any) -> list[tuple]:
        """All rows. Raises LedgerError if they cannot be read."""
        with sqlite_told(self.path):
            if self._final:
                self._db.close()
                self._open()  # SQLite does not look whether an immutable file has changed
            return self._db.execute(sql, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """All of the block's changes, or none if it raises. Raises LedgerError for a reader and if the disk refuses them."""
        if not self.server:
            raise LedgerError(f"{self.path}: is open to be read and to queue requests; only its server may change it")
        self.refuse_moved()
        with _changing(self._db, self.path):
            yield self._db

    @contextmanager
    def queueing(self) -> Iterator[sqlite3.Connection]:
        """A transaction for a reader as well. Without a server, the file is sealed again after it."""
        if self.server:
            with self.transaction() as db:
                yield db
            return
        with sqlite_told(self.path), closing(Connection(self.path, "mode=rw")) as db:
            with _changing(db, self.path):
                yield db
            if (lock := _try_lock(self.path.parent)) is not None:
                _seal(db, self.path)
                _unlock(lock)

    def in_place(self) -> bool:
        """Whether the folder is still the one whose lock this server has."""
        if self._lock is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path.parent / LOCK))
        except FileNotFoundError:
            return False

    def refuse_moved(self) -> None:
        """Raises LedgerError unless this is the folder's server, and the folder where it was."""
        if not self.in_place():
            raise LedgerError(f"{self.path.parent}: is no longer the folder that this server began to work in; it was moved "
                              "meanwhile, and nothing more is written; resume the run where it is now")  # fmt: skip

    def seal(self) -> None:
        """A server that is done: bring the log into the file and write its sha256 beside it."""
        if self.in_place():
            with sqlite_told(self.path):
                _seal(self._db, self.path)

    def close(self) -> None:
        """Let go of the file, and of the lock. Twice is harmless."""
        try:
            with sqlite_told(self.path):
                self._db.close()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            _unlock(self._lock)
            self._lock = None

    def _open(self) -> None:
        self._final = not self.server and not _log(self.path).exists()
        self._db = Connection(self.path, "mode=rw") if self.server else reading(self.path)


@contextmanager
def _changing(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """A transaction that breaks the seal before anything is written."""
    with sqlite_told(path):
        db.execute("BEGIN IMMEDIATE")
        try:
            seal = path.parent / SEAL
            if seal.exists():
                seal.unlink()
                sync(path.parent)
            yield
            db.execute("COMMIT")
        finally:
            if db.in_transaction:
                db.execute("ROLLBACK")


def _seal(db: Connection, path: Path) -> None:
    """Bring the log into the file and write its sha256 beside it, unless a reader holds the log for too long."""
    while not db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        db.execute("BEGIN IMMEDIATE")  # no one writes until the seal is there
        try:
            if not _log(path).stat().st_size:
                write_bytes(path.parent / SEAL, f"{db.file_digest()}  {LEDGER}\n".encode())
                return sync(path.parent)
        finally:
            db.execute("ROLLBACK")
    return None


def begun(path: Path) -> bool:
    """Whether a ledger is there; not if a crash came before its tables were committed."""
    if not path.is_file():
        return False
    with sqlite_told(path), closing(reading(path)) as db:
        return db.execute("SELECT 1 FROM sqlite_master").fetchone() is not None


def make(path: Path) -> None:
    """An empty SQLite file with a write-ahead log. LedgerError if one with tables is there or nothing can be written."""
    with sqlite_told(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(Connection(path, "mode=rwc")) as db:
            if db.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise LedgerError(f"{path.parent}: has a ledger; open it, or choose another run.name")
            db.execute("PRAGMA journal_mode=WAL")
        sync(path.parent)
