"""Measure the memory of this process and all its descendants."""

import contextlib
import os
import time

import psutil

SECONDS = 2.0  # between two measurements for a display
_last = -SECONDS, 0  # the time and result of the last one


def descendants(root: int) -> list[int]:
    """Return the ids of a process and of all running processes that it started, directly or indirectly."""
    with contextlib.suppress(psutil.Error):  # the process has just ended
        return [root, *(process.pid for process in psutil.Process(root).children(recursive=True))]
    return [root]


def own_bytes(process: int) -> int:
    """Return a process's resident bytes, without shared pages (files, object store) where the system reports them."""
    with contextlib.suppress(psutil.Error):
        memory = psutil.Process(process).memory_info()
        return memory.rss - getattr(memory, "shared", 0)
    return 0


def tree_bytes(root: int | None = None) -> int:
    """Return the sum of `own_bytes` over a process (default: this one) and its descendants."""
    return sum(own_bytes(process) for process in descendants(root or os.getpid()))


def recent_bytes() -> int:
    """Return the memory of this process and its descendants in bytes, at most SECONDS old."""
    global _last
    if time.monotonic() - _last[0] > SECONDS:
        _last = time.monotonic(), tree_bytes()
    return _last[1]
