"""Memory of this process and all its descendants, from /proc."""

import contextlib
import os
from pathlib import Path

PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(root: int) -> list[int]:
    """The process and everything it started, directly or not, that runs now."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended
            parent = int(Path(f"/proc/{name}/stat").read_bytes().rpartition(b")")[2].split()[1])
            children.setdefault(parent, []).append(int(name))
    found = [root]
    for process in found:  # grows while it is walked
        found += children.get(process, [])
    return found


def own_bytes(process: int) -> int:
    """Resident bytes without shared pages (files, object store)."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process}/statm").read_text().split()
        return PAGE * (int(fields[1]) - int(fields[2]))
    return 0


def tree_bytes(root: int | None = None) -> int:
    """Own bytes of a process (default: this one) and its descendants together; 0 where there is no /proc."""
    if not os.path.isdir("/proc/self"):
        return 0
    return sum(own_bytes(process) for process in descendants(root or os.getpid()))
