"""Files of a federation's folders: written as a whole or not at all, and read only where they are what they should be."""

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

PRIVATE = 0o600
MOST_KEY = 4096  # bytes of a public key's file


def write_private(path: Path, content: bytes) -> None:
    """Readable by its owner alone, from the first byte on; whoever reads it finds all of it, or what was there before."""
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Several files, in this order, each as `write_private`: none of them is touched before all are on the disk.

    OSError: they cannot be written; nothing of them is left behind.
    """
    beside = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in contents}
    try:
        for path, content in contents.items():
            beside[path].unlink(missing_ok=True)
            with os.fdopen(os.open(beside[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, new in beside.items():
            new.replace(path)
    finally:
        for new in beside.values():
            with contextlib.suppress(OSError):
                new.unlink()


def read_small(path: Path, most: int = MOST_KEY) -> bytes:
    """A file's content. OSError for what is larger, or is not a file: a pipe, say, that nobody writes to."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if len(content := file.read(most + 1)) > most:
            raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
        return content
