"""A connection to an SQLite file that can also read the file's bytes."""

import hashlib
import os
import sqlite3
import threading
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 5.0  # seconds that a writer waits for another
_PIECE = 2**20  # bytes read at a time


@dataclass
class _Shared:
    """What all connections of this process to one file share."""

    users: int = 0
    descriptor: int | None = None


_SHARED: dict[tuple[int, int], _Shared] = {}  # by device and inode
_GUARD = threading.Lock()


class Connection(sqlite3.Connection):
    """A durable SQLite connection with foreign keys. The caller begins and commits transactions.

    A process that closes any descriptor of a file loses all its POSIX locks on it, SQLite's too. Therefore, all connections
    to a file share one descriptor for reading its bytes. The last connection closes it.
    """

    def __init__(self, path: Path, how: str) -> None:
        """Open the file. `how`: the query of SQLite's URI, such as mode=ro."""
        self._path, self._file = path, None
        uri = f"{path.absolute().as_uri()}?{how}"
        super().__init__(uri, uri=True, isolation_level=None, timeout=PATIENCE)
        about = path.stat()
        with _GUARD:
            self._file = about.st_dev, about.st_ino
            _SHARED.setdefault(self._file, _Shared()).users += 1
        try:
            for pragma in ("foreign_keys=ON", "synchronous=FULL", "temp_store=MEMORY"):
                self.execute(f"PRAGMA {pragma}")
        except sqlite3.Error:
            self.close()
            raise

    def file_digest(self) -> str:
        """Return the sha256 of the file's bytes, as hex."""
        if not hasattr(os, "pread"):  # Windows, where closing a file does not free other locks
            with self._path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        assert self._file is not None
        shared, sha256, offset = _SHARED[self._file], hashlib.sha256(), 0
        with _GUARD:
            if shared.descriptor is None:
                shared.descriptor = os.open(self._path, os.O_RDONLY)
        while piece := os.pread(shared.descriptor, _PIECE, offset):
            sha256.update(piece)
            offset += len(piece)
        return sha256.hexdigest()

    def close(self) -> None:
        """Close the connection. Closing twice is harmless."""
        super().close()
        file, self._file = self._file, None
        if file is None:
            return
        with _GUARD:
            shared = _SHARED[file]
            shared.users -= 1
            if not shared.users:
                del _SHARED[file]
                if shared.descriptor is not None:
                    os.close(shared.descriptor)
