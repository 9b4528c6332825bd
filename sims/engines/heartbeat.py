"""What a worker is doing right now, in 24 bytes of a file that its pool can read: which call, which message, since when.

It tells whose message was running when a worker died, and which one has outlasted its time. Where worker and pool share no
file (several nodes), the pool knows only what the worker last told it, and finds a culprit by trying messages alone.
"""

import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qqd")
NOTHING, SEVERAL = -1, -2  # in the place of a call, and of a message


@dataclass(frozen=True)
class Progress:
    """The message at `place` (SEVERAL: all of them) of call `call` has been running for `seconds`."""

    call: int
    place: int
    seconds: float


@dataclass(frozen=True)
class MarkFile:
    """The file of one worker, and the host where it lies."""

    path: str
    host: str

    def read(self) -> Progress | None:
        """The worker's mark; None if it runs nothing or cannot be seen from here."""
        return _mark(*_LAYOUT.unpack(Path(self.path).read_bytes()[: _LAYOUT.size]))


def make(folder: Path, number: int) -> MarkFile:
    """A new, empty file for the worker of this number."""
    path = folder / f"worker-{number}"
    path.write_bytes(_LAYOUT.pack(NOTHING, NOTHING, 0.0))
    return MarkFile(str(path), socket.gethostname())


class Marker:
    """The worker's side: keeps its mark, and writes it where the pool's host is its own."""

    def __init__(self, file: MarkFile) -> None:
        self._memory: mmap.mmap | None = None
        self._now = NOTHING, NOTHING, 0.0
        if socket.gethostname() == file.host and os.path.exists(file.path):
            with open(file.path, "r+b") as opened:
                self._memory = mmap.mmap(opened.fileno(), _LAYOUT.size)

    def write(self, call: int, place: int) -> None:
        """From now on, the message at `place` of call `call` is running (NOTHING: none)."""
        self._now = call, place, time.monotonic()
        if self._memory is not None:
            self._memory[: _LAYOUT.size] = _LAYOUT.pack(*self._now)

    @property
    def near(self) -> bool:
        """Whether the pool can read what it writes."""
        return self._memory is not None

    def read(self) -> Progress | None:
        """The mark, for a pool on another host."""
        return _mark(*self._now)


def _mark(call: int, place: int, since: float) -> Progress | None:
    return None if call == NOTHING else Progress(call, place, time.monotonic() - since)
