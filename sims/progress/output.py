"""Standard output that fails nothing: what it cannot encode is replaced, and a run goes on when nobody reads it any more."""

import contextlib
import errno
import os
import sys
from typing import Any, TextIO, cast


class Lenient:
    """A text stream. `fault`: why nothing can be written into it any more; empty where its reader has simply gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._gone, self.fault = stream, False, ""

    def write(self, text: str) -> int:
        """As of the stream. Returns the length of the text, whatever became of it."""
        if not self._gone:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._write_replaced(text)
            except (OSError, ValueError) as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        """As of the stream."""
        if not self._gone:
            try:
                self._stream.flush()
            except (OSError, ValueError) as error:
                self._lose(error)

    def writelines(self, lines: Any) -> None:
        """As of the stream."""
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
    """The stream as one that fails nothing; one that is closed: as one that nobody reads."""
    if isinstance(stream, Lenient):
        return stream
    return cast(TextIO, Lenient(stream or open(os.devnull, "w", encoding="utf-8")))


def make_lenient() -> None:
    """Let standard output and errors of this process be such."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # pyright: ignore[reportAttributeAccessIssue]
    sys.stdout, sys.stderr = lenient(sys.stdout), lenient(sys.stderr)


def fault() -> str:
    """Why standard output is not whole; empty if it is, or if its reader has gone."""
    sys.stdout.flush()
    return getattr(sys.stdout, "fault", "")
