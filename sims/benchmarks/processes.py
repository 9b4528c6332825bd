"""The processes of a measurement: their memory, and how to end them."""

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import psutil

from fedloom.sims.benchmarks.measuring import MIB
from fedloom.sims.progress.memory import own_bytes

MARK = "FEDLOOM_BENCH"
STOP_SECONDS = {signal.SIGTERM: 1.0, signal.SIGKILL: 5.0}
END_SECONDS = 20.0
EARLY, SPAN = 50, 10  # growth is from this round to the end, each the median of some rounds
LEAST_BYTES = 32 * MIB  # growth of less memory is a share of this: a small object store takes pages with each message
WHAT: tuple[str, ...] = ("driver", "largest worker", "object store")
DRIVERS = ("fedloom.sims.benchmarks.engine_run", "flwr-simulation")


class Processes:
    """The processes that this one starts from now on, and samples of their memory.

    They inherit a mark in their environment, so those that detach are recognised, such as Flower's local SuperLink. Ray's
    workers overwrite their environment; they are recognised by their parent.

    Args:
        is_driver: This process runs the server; otherwise, one of the others does.
    """

    def __init__(self, is_driver: bool = True) -> None:
        self._driver = [psutil.Process()] if is_driver else []
        os.environ[MARK] = self._mark = uuid.uuid4().hex
        self._before, self._ours = set(psutil.process_iter()), set[psutil.Process]()
        self._samples: list[dict[str, int]] = []

    def running(self) -> list[psutil.Process]:
        """Return the processes that run now, oldest first."""
        ours: dict[int, psutil.Process] = {}
        psutil.process_iter.cache_clear()  # a new process may have the number of an old one
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has just ended
                if process not in self._before and self._is_ours(process, ours):
                    ours[process.pid] = process
        self._ours = set(ours.values())
        return list(ours.values())

    def _is_ours(self, process: psutil.Process, ours: Mapping[int, psutil.Process]) -> bool:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return process in self._ours or process.ppid() in ours or process.environ().get(MARK) == self._mark

    def sample(self) -> dict[str, int]:
        """Measure now; return the bytes of the driver, of all workers, of the largest worker, and of Ray's object store.

        Shared memory counts in the object store and in the driver's `rss` only. `private` is the driver's USS.
        """
        sample: dict[str, int] = dict.fromkeys(("driver", "rss", "private", "workers", "largest worker", "object store"), 0)
        for process in [*self._driver, *self.running()]:
            with contextlib.suppress(psutil.Error, OSError):  # it has just ended
                kind = "driver" if process in self._driver else kind_of(process.cmdline())
                rss, own = process.memory_info().rss, own_bytes(process.pid)
                if kind == "worker":
                    sample |= {"workers": sample["workers"] + own, "largest worker": max(sample["largest worker"], own)}
                elif kind == "driver":
                    sample |= {"driver": own, "rss": rss, "private": process.memory_full_info().uss}
                elif kind == "store":  # each node has one
                    sample["object store"] = max(sample["object store"], _store_bytes(process.pid))
        self._samples.append(sample)
        return sample

    def peaks(self) -> dict[str, int]:
        """Return the maximum of each size over all samples, in bytes."""
        return {what: max(sample[what] for sample in self._samples) for what in self._samples[0]} if self._samples else {}

    def growth(self) -> dict[str, float] | None:
        """Return by which share each quantity in WHAT has grown since round EARLY; None if there are too few samples."""
        if len(self._samples) < 2 * EARLY:
            return None
        before, after = (_medians(some) for some in (self._samples[EARLY - SPAN : EARLY], self._samples[-SPAN:]))
        return {what: (after[what] - before[what]) / max(LEAST_BYTES, before[what]) for what in WHAT}

    def mib(self) -> dict[str, float]:
        """Return each of WHAT's memory at the end, in MiB."""
        return {what: size / MIB for what, size in _medians(self._samples[-SPAN:]).items()}

    def left(self) -> list[str]:
        """Wait some seconds for all processes to end; return the command lines of those that still run."""
        deadline = time.monotonic() + END_SECONDS
        while (left := self.running()) and time.monotonic() < deadline:
            time.sleep(0.2)
        os.environ.pop(MARK, None)
        return [" ".join(process.cmdline())[:100] for process in left]

    def stop(self) -> None:
        """End all processes: first by SIGTERM, then by SIGKILL."""
        for number, seconds in STOP_SECONDS.items():
            deadline = time.monotonic() + seconds
            for process in self.running():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(number)
            while self.running() and time.monotonic() < deadline:
                time.sleep(0.1)
        os.environ.pop(MARK, None)


def _medians(samples: Sequence[Mapping[str, int]]) -> dict[str, float]:
    return {what: float(median(sample[what] for sample in samples)) for what in WHAT}


def kind_of(command: Sequence[str]) -> str:
    """Return what a command line starts: "worker", "driver" (the process with the ServerApp), "store" (Ray's), or ""."""
    first = command[0] if command else ""
    if first.startswith("ray::"):
        return "" if first.endswith("Agent") else "worker"
    if any(word.endswith("default_worker.py") or "spawn_main" in word for word in command[1:4]):
        return "worker"
    if any(word.endswith(DRIVERS) for word in command[:4]):
        return "driver"
    return "store" if first.endswith("/raylet") else ""


def _store_bytes(raylet: int) -> int:
    """Bytes that Ray's object store holds in shared memory; `raylet` is its process."""
    folder, sizes = Path(f"/proc/{raylet}/fd"), {}
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if os.readlink(folder / name).startswith("/dev/shm/"):
                status = os.stat(folder / name)
                sizes[status.st_ino] = 512 * status.st_blocks
    return sum(sizes.values())
