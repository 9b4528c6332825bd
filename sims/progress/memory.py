"""Measure the memory of this process and all its descendants."""

import contextlib
import os

import psutil


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
