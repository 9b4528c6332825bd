"""Query this machine's cores, memory and files, and set how this process uses memory, on Linux, macOS and Windows."""

import contextlib
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil

from fedloom.conf.cgroups import limits

_MALLOPT = {-1: 2**28, -3: 2**25}  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h, in bytes
_SEVERAL = threading.Event()  # set once torch was to use several threads in this process
_FORKED = threading.Event()  # set in a process that was forked from one where _SEVERAL was set


def cores() -> int:
    """Return the number of cores that this process may use, within its affinity and its container's limit."""
    usable = getattr(os, "sched_getaffinity", None)  # not on macOS
    return max(1, int(min(len(usable(0)) if usable else os.cpu_count() or 1, limits().cores)))


def threads(number: int) -> int:
    """Return `number`, the threads that torch is to use in this process; 1 where several would hang.

    They hang in a forked process (multiprocessing's default on Linux) whose parent has used several: OpenMP's limit.
    """
    if number > 1:
        _SEVERAL.set()
    return 1 if _FORKED.is_set() else number


if hasattr(os, "register_at_fork"):  # Windows does not fork
    os.register_at_fork(after_in_child=lambda: _FORKED.set() if _SEVERAL.is_set() else None)


def memory() -> int:
    """Return the memory of the machine in bytes, or that of its container if it is smaller."""
    return int(min(psutil.virtual_memory().total, limits().memory))


def free_memory() -> int:
    """Return the bytes of memory that are available without swapping, within the container's limit."""
    return int(min(psutil.virtual_memory().available, limits().free))


def size_of(path: Path) -> int:
    """Return the bytes of all files in a folder. Links are not followed."""
    size = 0
    for root, _, names in os.walk(path):
        for name in names:
            try:
                size += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # another process has just removed it
                continue
    return size


def reuse_freed_memory() -> None:
    """Make glibc reuse the memory that tensors leave, instead of returning it to the system and asking for it again.

    Training asks for the same few MB in each step. Up to 256 MiB stay with the process. Elsewhere nothing happens.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
            for parameter, size in _MALLOPT.items():
                ctypes.CDLL(None).mallopt(parameter, size)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in a block that makes many objects which live on: to search them again and again takes long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def limit_memory(most: float) -> None:
    """Limit the memory of this process, and of each that it starts, to `most` bytes. Only Linux supports this.

    An allocation beyond the limit raises an error. Without a limit, the system ends this process, or another one.
    """
    if sys.platform == "linux":
        import resource

        now, hard = resource.getrlimit(resource.RLIMIT_DATA)
        set_before = [limit for limit in (now, hard) if limit != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_DATA, (min([int(most), sys.maxsize, *set_before]), hard))


def forget_peak() -> None:
    """Reset the peak that `peak_memory` returns. Only Linux supports this; elsewhere nothing happens."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    with contextlib.suppress(OSError):  # /proc may be read-only
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> int:
    """Return the peak memory of this process in bytes, since its start or `forget_peak`."""
    peak = getattr(psutil.Process().memory_info(), "peak_wset", None)  # on Windows
    if peak is not None:
        return int(peak)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
