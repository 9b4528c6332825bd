"""What this machine has, asked the same way on Linux, macOS and Windows."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import psutil

from fedloom.conf.cgroups import limits


def cores() -> int:
    """The cores that this process may use: those that it is bound to, and no more than its container has."""
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    return max(1, int(min(len(usable(0)) if usable else os.cpu_count() or 1, limits().cores)))


def memory() -> int:
    """The bytes of memory that there are: of the container, where that has fewer than the machine."""
    return int(min(psutil.virtual_memory().total, limits().memory))


def free_memory() -> int:
    """The bytes of memory that can be had without swapping, within the container's limit."""
    return int(min(psutil.virtual_memory().available, limits().free))


def forget_peak() -> None:
    """Have `peak_memory` count from now on, without what is free already. Linux; elsewhere it goes on counting."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> int:
    """The most bytes of memory that this process has held at a time, since it began or `forget_peak`."""
    peak = getattr(psutil.Process().memory_info(), "peak_wset", None)  # on Windows
    if peak is not None:
        return int(peak)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
