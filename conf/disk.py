"""The space that files take on a disk."""

import os
from pathlib import Path


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
