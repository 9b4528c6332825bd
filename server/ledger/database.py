"""The SQLite file of a ledger: opened to write or to read, locked by one server, sealed with its sha256 when closed."""

import os
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import InitVar, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import portalocker

from fedloom.clients.storage.states import write_bytes
from fedloom.server.ledger.blobs import LedgerError, ledger_errors, sync
from fedloom.server.ledger.connection import PATIENCE, Connection
from fedloom.server.run_folder.layout import LEDGER, LOCK, SEAL

T = TypeVar("T")
TICK = 0.05  # seconds in which file systems may give two writes the same time
_TRIES = 10  # for the lock, which a process that queues a request holds for a moment
_HINTS = {
    "SQLITE_FULL": "free space and run again: what was committed is safe",
    "SQLITE_IOERR": "the disk is full or failing: free space and run again; what was committed is safe",
    "SQLITE_BUSY": f"another process has locked it for {PATIENCE:.0f} s: wait until it ends and run again",
    "SQLITE_READONLY": "check the permissions of the file and its folder",
    "SQLITE_CANTOPEN": "check the permissions of the file and its folder",
    "SQLITE_NOTADB": "restore it from a copy of the run",
    "SQLITE_CORRUPT": "restore it from a copy of the run",
}


class BusyError(LedgerError):
    """Another server process is working on the run."""


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Turn an error of SQLite or the operating system into a LedgerError that names the file."""
    try:
        with ledger_errors(path):
            yield
    except UnicodeDecodeError:  # sqlite3 decodes a message that quotes the damaged file
        raise LedgerError(f"{path}: is damaged; {_HINTS['SQLITE_CORRUPT']}") from None
    except sqlite3.Error as error:
        if "Could not decode" in str(error):  # the message quotes the whole column
            raise LedgerError(f"{path}: is damaged; {_HINTS['SQLITE_CORRUPT']}") from None
        name = "_".join(getattr(error, "sqlite_errorname", "").split("_")[:2])
        hint = _HINTS.get(name)
        raise LedgerError(f"{path}: {error}" + (f"; {hint}" if hint else "")) from None


def acquire(folder: Path) -> int:
    """Lock the folder for its one server and return the open lock file. The lock ends with the process.

    Raises BusyError naming the process that holds the lock.
    """
    for _ in range(_TRIES):
        if (handle := _try_lock(folder)) is not None:
            return handle
        time.sleep(0.05)
    with ledger_errors(folder / LOCK):
        owner = (folder / LOCK).read_text(errors="replace").strip() or "unknown"
    raise BusyError(f"{folder}: process {owner} is working on it; wait until it ends, or stop it, and run again")


def refuse_busy(folder: Path) -> None:
    """Raise BusyError if a server is working on the run in the folder."""
    if (folder / LOCK).exists():
        unlock(acquire(folder))


def _try_lock(folder: Path) -> int | None:
    """Lock the folder; return None if another process holds the lock."""
    with ledger_errors(folder / LOCK):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            portalocker.lock(handle, portalocker.LockFlags.EXCLUSIVE | portalocker.LockFlags.NON_BLOCKING)
            if not _is_at(handle, folder / LOCK):  # another process has replaced the folder meanwhile
                os.close(handle)
                return None
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        except BaseException as error:
            os.close(handle)
            if isinstance(error, portalocker.AlreadyLocked):
                return None
            raise
    return handle


def _is_at(handle: int, path: Path) -> bool:
    """Return whether an open file is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def unlock(lock: int) -> None:
    """Release the lock."""
    os.ftruncate(lock, 0)
    os.close(lock)


def reading(path: Path) -> Connection:
    """Return a connection to an SQLite file that changes neither the file nor its log.

    If there is a write-ahead log (a server runs, or one crashed), the log is read as well. Without a log, the file is final
    and opened as immutable. Otherwise SQLite would create a log, and fail where it cannot.

    Raises LedgerError for what is not a file, such as a pipe, which would block.
    """
    for file in (path, _log(path)):
        if file.exists() and not file.is_file():
            raise LedgerError(f"{file}: is not a regular file; {_HINTS['SQLITE_CORRUPT']}")
    return Connection(path, "mode=ro" if _log(path).exists() else "immutable=1")


def content(path: Path) -> tuple[object, ...]:
    """Return a value that changes when a process writes: it removes the seal first, and writes a new one at the end.

    Two writes within TICK may leave it the same.
    """
    found, seal = path.stat(), (0, 0)
    with suppress(FileNotFoundError):
        about = (path.parent / SEAL).stat()
        seal = about.st_ino, about.st_mtime_ns
    return found.st_mtime_ns, found.st_size, _log(path).exists(), *seal


def may_have_changed(path: Path, before: tuple[object, ...]) -> bool:
    """Return whether a process may have written since the file had the content `before`."""
    return content(path) != before or abs(time.time() - path.stat().st_mtime) < TICK


def _log(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


@dataclass
class Database:
    """A connection to a ledger's file: the server's, which holds the lock, or a reader's, which sees what it writes.

    `held`: the lock, if the server has it already.
    """

    path: Path
    server: bool
    held: InitVar[int | None] = None
    _db: Connection = field(init=False)
    _lock: int | None = field(init=False, default=None)
    _final: bool = field(init=False, default=False)

    def __post_init__(self, held: int | None) -> None:
        self._lock = acquire(self.path.parent) if self.server and held is None else held
        try:
            with sqlite_errors(self.path):
                self._open() if self.server or not self.path.exists() else self._read(self._open)
        except BaseException:
            self._release()
            raise

    def query(self, sql: str, *values: Any) -> list[tuple]:
        """Return all rows of an SQL query. Raises LedgerError if they cannot be read.

        A file that is opened as immutable is read again if another process has written to it meanwhile.
        """
        with sqlite_errors(self.path):
            return self._rows(sql, values) if self.server else self._read(lambda: self._rows(sql, values))

    def _read(self, action: Callable[[], T]) -> T:
        """Return what the action reads. Repeat it while another process writes, for up to PATIENCE seconds."""
        deadline = time.monotonic() + PATIENCE
        while True:
            before = content(self.path)
            try:
                read = action()
            except sqlite3.DatabaseError:
                if not may_have_changed(self.path, before) or time.monotonic() > deadline:
                    raise
            else:
                if not (self._final and may_have_changed(self.path, before)) or time.monotonic() > deadline:
                    return read
            time.sleep(0.01)

    def _rows(self, sql: str, values: tuple[Any, ...]) -> list[tuple]:
        if self._final:
            self._open()  # SQLite does not notice changes of an immutable file
        return self._db.execute(sql, values).fetchall()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Commit all changes of the block, or none if it raises. Raises LedgerError for a reader."""
        if not self.server:
            raise LedgerError(f"{self.path}: is open for reading and for queueing requests; only its server may change it")
        self.refuse_moved()
        with _changing(self._db, self.path):
            yield self._db

    @contextmanager
    def queueing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction that a reader may use, too. Without a server, the file is sealed again after it."""
        if self.server:
            with self.transaction() as db:
                yield db
            return
        with sqlite_errors(self.path), closing(Connection(self.path, "mode=rw")) as db:
            with _changing(db, self.path):
                yield db
            if (lock := _try_lock(self.path.parent)) is not None:
                _seal(db, self.path)
                unlock(lock)

    def in_place(self) -> bool:
        """Return whether the folder is still the one that this server has locked."""
        if self._lock is None:
            return False
        try:
            return os.path.samestat(os.fstat(self._lock), os.stat(self.path.parent / LOCK))
        except FileNotFoundError:
            return False

    def refuse_moved(self) -> None:
        """Raise LedgerError unless this is the folder's server, and the folder has not moved."""
        if not self.in_place():
            relative = "" if self.path.is_absolute() else ", or this program's working directory has changed (os.chdir)"
            raise LedgerError(f"{self.path.parent}: this folder has moved while its server worked{relative}. "
                              "The server writes nothing more. Resume the run where it is now")  # fmt: skip

    def seal(self) -> None:
        """Merge the log into the file, and write the file's sha256 next to it. A server calls this when it ends."""
        if self.in_place():
            with sqlite_errors(self.path):
                _seal(self._db, self.path)

    def close(self) -> None:
        """Close the file and release the lock. Closing twice is harmless."""
        try:
            with sqlite_errors(self.path):
                self._db.close()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            unlock(self._lock)
            self._lock = None

    def _open(self) -> None:
        if "_db" in vars(self):
            self._db.close()
        self._final = not self.server and not _log(self.path).exists()
        self._db = Connection(self.path, "mode=rw") if self.server else reading(self.path)


@contextmanager
def _changing(db: sqlite3.Connection, path: Path) -> Iterator[None]:
    """Run a transaction that removes the seal before anything is written."""
    with sqlite_errors(path):
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
    """Merge the log into the file, and write the file's sha256, unless a reader holds the log for too long."""
    while not db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]:
        db.execute("BEGIN IMMEDIATE")  # no one writes until the seal exists
        try:
            if not _log(path).stat().st_size:
                write_bytes(path.parent / SEAL, f"{db.file_digest()}  {LEDGER}\n".encode())
                return sync(path.parent)
        finally:
            db.execute("ROLLBACK")
    return None


def begun(path: Path) -> bool:
    """Return whether the file is a ledger; false if a crash came before its tables were committed."""
    if not path.is_file():
        return False
    with closing(Database(path, server=False)) as db:
        return bool(db.query("SELECT 1 FROM sqlite_master"))


def make(path: Path) -> None:
    """Create an empty SQLite file with a write-ahead log. Raises LedgerError if it cannot, or a ledger exists."""
    with sqlite_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with closing(Connection(path, "mode=rwc")) as db:
            if db.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise LedgerError(f"{path.parent}: already has a ledger; open it, or choose another run.name")
            db.execute("PRAGMA journal_mode=WAL")
        sync(path.parent)
