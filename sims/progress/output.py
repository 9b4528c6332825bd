"""Make standard output safe: it replaces characters that it cannot encode, and a closed pipe does not stop a run."""

import contextlib
import errno
import os
import sys
from typing import Any, TextIO, cast


class Lenient:
    """A text stream whose errors do not stop the program.

    Attributes:
        fault: Why writing failed, such as a full disk; "" if it did not, or if the reader closed the pipe.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._gone, self.fault = stream, False, ""

    def write(self, text: str) -> int:
        """Write the text if the stream still works. Return the length of the text in any case."""
        if not self._gone:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._write_replaced(text)
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream if it still works."""
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def _write_replaced(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "ascii"
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text.encode(encoding, "replace").decode(encoding))

    def _lose(self, error: Exception) -> None:
        self._gone = True
        gone = not isinstance(error, OSError) or error.errno == errno.EPIPE
        self.fault = "" if gone else os.strerror(cast(OSError, error).errno or 0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def lenient(stream: TextIO | None) -> TextIO:
    """Return the stream as a `Lenient` one. Without a stream, return one that discards everything."""
    if isinstance(stream, Lenient):
        return stream
    return cast(TextIO, Lenient(stream or open(os.devnull, "w", encoding="utf-8")))


def make_lenient() -> None:
    """Replace stdout and stderr of this process by `Lenient` streams."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout, sys.stderr = lenient(sys.stdout), lenient(sys.stderr)


def fault() -> str:
    """Return why writing to stdout failed, such as a full disk; "" if nothing failed.

    A reader that closed the pipe early (`| head`) is not a failure.
    """
    sys.stdout.flush()
    return getattr(sys.stdout, "fault", "")
