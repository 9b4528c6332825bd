"""Memory of this process and all its descendants."""

import contextlib
import os

import psutil


def descendants(root: int) -> list[int]:
    """The process and everything it started, directly or not, that runs now."""
    with contextlib.suppress(psutil.Error):  # it has just ended
        return [root, *(process.pid for process in psutil.Process(root).children(recursive=True))]
    return [root]


def own_bytes(process: int) -> int:
    """Resident bytes without shared pages (files, object store), where the system tells them apart."""
    with contextlib.suppress(psutil.Error):
        memory = psutil.Process(process).memory_info()
        return memory.rss - getattr(memory, "shared", 0)
    return 0


def tree_bytes(root: int | None = None) -> int:
    """Own bytes of a process (default: this one) and its descendants together."""
    return sum(own_bytes(process) for process in descendants(root or os.getpid()))
