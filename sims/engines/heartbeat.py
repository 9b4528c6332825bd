"""A worker's mark: its current call and message, and the start time, in 24 bytes of a file that the pool reads.

The mark shows whose message was running when a worker died, and which message exceeds its time limit. On another node the
pool cannot read the file. It then knows the worker's last report only, and tries messages alone to identify the culprit.
"""

import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qqd")
NOTHING, SEVERAL = -1, -2  # instead of a call, and of a message


@dataclass(frozen=True)
class Progress:
    """The message at index `place` (SEVERAL: all messages) of call `call` has been running for `seconds`."""

    call: int
    place: int
    seconds: float


@dataclass(frozen=True)
class MarkFile:
    """The file in which a worker records what it runs now (its mark): path and host."""

    path: str
    host: str

    def read(self) -> Progress | None:
        """Return the worker's mark, or None if the worker runs nothing."""
        return _mark(*_LAYOUT.unpack(Path(self.path).read_bytes()[: _LAYOUT.size]))


def make(folder: Path, number: int) -> MarkFile:
    """Create an empty mark file for the worker with this number."""
    path = folder / f"worker-{number}"
    path.write_bytes(_LAYOUT.pack(NOTHING, NOTHING, 0.0))
    return MarkFile(str(path), socket.gethostname())


class Marker:
    """Holds a worker's mark, and writes it into the worker's file if the pool runs on the same host."""

    def __init__(self, file: MarkFile) -> None:
        self._memory: mmap.mmap | None = None
        self._now = NOTHING, NOTHING, 0.0
        if socket.gethostname() == file.host and os.path.exists(file.path):
            with open(file.path, "r+b") as opened:
                self._memory = mmap.mmap(opened.fileno(), _LAYOUT.size)

    def write(self, call: int, place: int) -> None:
        """Record that the message at index `place` of call `call` starts now (NOTHING: no message runs)."""
        self._now = call, place, time.monotonic()
        if self._memory is not None:
            self._memory[: _LAYOUT.size] = _LAYOUT.pack(*self._now)

    @property
    def near(self) -> bool:
        """Whether the pool can read the worker's file."""
        return self._memory is not None

    def read(self) -> Progress | None:
        """Return the mark, for a pool on another host; None if the worker runs nothing."""
        return _mark(*self._now)


def _mark(call: int, place: int, since: float) -> Progress | None:
    return None if call == NOTHING else Progress(call, place, time.monotonic() - since)
