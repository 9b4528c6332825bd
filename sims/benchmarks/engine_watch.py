"""The processes of one measurement: how much memory they take, and that none of them stays.

All inherit a mark in their environment, so that one that detaches itself (Flower's local SuperLink does) is found, too; a
process that has overwritten its environment (Ray's workers do) is known by its parent.
"""

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from fedloom.sims.benchmarks.engine_job import private_bytes

MARK = "FEDLOOM_BENCH"
PAGE = os.sysconf("SC_PAGE_SIZE")
STOP_SECONDS = {signal.SIGTERM: 1.0, signal.SIGKILL: 5.0}
DRIVERS = ("fedloom.sims.benchmarks.engine_run", "flwr-simulation")


@dataclass
class Peaks:
    """Largest bytes seen: resident in the driver and in all workers, in Ray's object store, private to the driver."""

    driver: int = 0
    workers: int = 0
    store: int = 0
    private: int = 0


@dataclass
class Watch:
    """The processes whose environment has MARK=`mark`, and their descendants."""

    mark: str
    peaks: Peaks = field(default_factory=Peaks)
    _known: dict[int, tuple[str, bool]] = field(default_factory=dict)  # pid: start time, ours

    def sample(self) -> None:
        """Look once."""
        workers, peaks = 0, self.peaks
        for pid in self.processes():
            with contextlib.suppress(OSError):  # it has just ended
                words = _words(pid)
                if _is_worker(words):
                    workers += PAGE * int(Path(f"/proc/{pid}/statm").read_text().split()[1])
                elif any(word.endswith(DRIVERS) for word in words[:4]):
                    peaks.driver = max(peaks.driver, _high_water(pid))
                    peaks.private = max(peaks.private, private_bytes(pid))
                elif words[0].endswith("/raylet"):
                    peaks.store = max(peaks.store, store_bytes(pid))
        peaks.workers = max(peaks.workers, workers)

    def processes(self) -> list[int]:
        """Those that run now, oldest first."""
        found: dict[int, tuple[str, bool]] = {}
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):
                state, parent, start = _stat(pid)
                known = self._known.get(pid)
                if known is None or known[0] != start or not known[1]:
                    known = (start, found.get(parent, ("", False))[1] or self._marked(pid))
                if state != "Z":
                    found[pid] = known
        self._known = found
        return [pid for pid, (_, ours) in found.items() if ours]

    def stop(self) -> None:
        """End them all, by their ids: asked first, then killed."""
        for kind, seconds in STOP_SECONDS.items():
            deadline = time.monotonic() + seconds
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, kind)
            while self.processes() and time.monotonic() < deadline:
                time.sleep(0.1)

    def _marked(self, pid: int) -> bool:
        return f"{MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")


def _stat(pid: int) -> tuple[str, int, str]:
    """State, parent and start time; the name before them may hold spaces."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[1]), fields[19]


def _words(pid: int) -> list[str]:
    """The command line; never empty."""
    text = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    return text.rstrip("\0").split("\0")


def _is_worker(words: list[str]) -> bool:
    if words[0].startswith("ray::"):
        return not words[0].endswith("Agent")
    return any(word.endswith("default_worker.py") or "spawn_main" in word for word in words[1:4])


def _high_water(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:")), 0)


def store_bytes(raylet: int) -> int:
    """Pages that Ray's object store has taken in shared memory."""
    folder, sizes = Path(f"/proc/{raylet}/fd"), {}
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(folder / name).startswith("/dev/shm/"):
                status = os.stat(folder / name)
                sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())
