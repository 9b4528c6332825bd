"""Write the files of a federation's folders completely or not at all, and read small regular files only."""

import contextlib
import errno
import os
import stat
import uuid
from collections.abc import Mapping
from pathlib import Path

PRIVATE = 0o600
MOST_KEY = 4096  # bytes of a public key's file


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read. Readers see the old content or all of the new one."""
    write_together({path: content})


def write_together(contents: Mapping[Path, bytes]) -> None:
    """Write several files, in this order, like `write_private`. None is replaced before all are on the disk.

    Raises OSError if they cannot be written, and then leaves no new files behind.
    """
    new_files = {path: path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}") for path in contents}
    try:
        for path, content in contents.items():
            with os.fdopen(os.open(new_files[path], os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for path, new in new_files.items():
            new.replace(path)
    finally:
        for new in new_files.values():
            with contextlib.suppress(OSError):
                new.unlink()


def read_small(path: Path, most: int = MOST_KEY) -> bytes:
    """Return a file's content. Raises OSError for a larger file, or one that is not regular, such as a pipe."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file", str(path))
        if len(content := file.read(most + 1)) > most:
            raise OSError(errno.EFBIG, f"has more than {most} bytes", str(path))
        return content
