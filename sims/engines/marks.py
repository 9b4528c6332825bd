"""What a worker is doing right now, in 32 bytes of a file that its pool can read: which call, which message, since when.

It tells whose message was running when a worker died, and which one has outlasted its time. Where worker and pool share no
file (several nodes), nothing can be read, and the pool finds the culprit by trying messages alone.
"""

import mmap
import os
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_LAYOUT = struct.Struct("<qqd")
NOTHING = -1


@dataclass(frozen=True)
class Mark:
    """The message at `place` of call `call` has been running for `seconds`."""

    call: int
    place: int
    seconds: float


@dataclass(frozen=True)
class MarkFile:
    """The file of one worker, and the host where it lies."""

    path: str
    host: str

    def read(self) -> Mark | None:
        """The worker's mark; None if it has never run anything, runs several at once, or cannot be seen from here."""
        call, place, since = _LAYOUT.unpack(Path(self.path).read_bytes()[: _LAYOUT.size])
        return None if NOTHING in (call, place) else Mark(call, place, time.monotonic() - since)


def make(folder: Path, number: int) -> MarkFile:
    """A new, empty file for the worker of this number."""
    path = folder / f"worker-{number}"
    path.write_bytes(_LAYOUT.pack(NOTHING, NOTHING, 0.0))
    return MarkFile(str(path), socket.gethostname())


class Marker:
    """The worker's side: writes its mark; silent on another host than the pool's."""

    def __init__(self, file: MarkFile) -> None:
        self._memory: mmap.mmap | None = None
        if socket.gethostname() == file.host and os.path.exists(file.path):
            with open(file.path, "r+b") as opened:
                self._memory = mmap.mmap(opened.fileno(), _LAYOUT.size)

    def write(self, call: int, place: int) -> None:
        """From now on, the message at `place` (NOTHING: several at once) of call `call` is running."""
        if self._memory is not None:
            self._memory[: _LAYOUT.size] = _LAYOUT.pack(call, place, time.monotonic())
