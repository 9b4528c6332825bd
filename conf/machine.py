"""What this machine has, asked the same way on Linux, macOS and Windows."""

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import psutil


def cores() -> int:
    """The cores that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(usable(0)) if usable else os.cpu_count() or 1


def memory() -> int:
    """The bytes of memory that there are."""
    return psutil.virtual_memory().total


def free_memory() -> int:
    """The bytes of memory that can be had without swapping."""
    return psutil.virtual_memory().available


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
