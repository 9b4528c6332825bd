"""What programs write: standard output that odd characters and closed pipes do not stop, and logs as JSON lines.

With FEDLOOM_LOG=json, each line of a log is an object with time, level, message and run.
"""

import contextlib
import errno
import json
import logging
import os
import re
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, TextIO, cast

from fedloom.conf.errors import UserError, plain

VARIABLE = "FEDLOOM_LOG"
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*:\s+(.*)")  # as Flower writes it
_RUN = re.compile(r"\brun(?:[ _]id)?[ :=]+'?(\d{6,})", re.IGNORECASE)  # Flower's id of a run


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


def wants_json() -> bool:
    """Return whether logs are JSON lines. Raises UserError if the variable has another value than text and json."""
    value = os.environ.get(VARIABLE, "text")
    if value not in ("", "text", "json"):
        raise UserError(f"{VARIABLE}: got '{value}', takes text or json")
    return value == "json"


def line_of(text: str, level: str = "info", **facts: Any) -> str:
    """Return a line of the log. `facts`: further entries, such as the run."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "message": plain(text, lines=True).strip(), "run": "", **facts})


def wrapped(text: str, **facts: Any) -> str:
    """Return a line that a program has written as a line of the log; empty for an empty line. Lines of the log stay."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        if "message" in (known := json.loads(text)) and isinstance(known, dict):
            return text.strip()
    if not (text := plain(text).strip()):
        return ""
    level, message = found.groups() if (found := _LEVEL.fullmatch(text)) else ("info", text)
    run = found[1] if (found := _RUN.search(message)) else ""
    return line_of(message, level.lower(), run=run, **facts)


class JsonFormatter(logging.Formatter):
    """Formats a record of Python's logging as such a line, with its traceback in the message."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line. The record may name its run (`extra={"run": ...}`)."""
        trace = "".join(traceback.format_exception(record.exc_info[1])) if record.exc_info else ""
        text = f"{record.getMessage()}\n{trace}" if trace else record.getMessage()
        return line_of(text, record.levelname.lower(), run=getattr(record, "run", ""))


def json_logging() -> dict[str, Any]:
    """Return a configuration for logging.config.dictConfig that writes such lines to stderr."""
    handler = {"class": "logging.StreamHandler", "formatter": "json"}
    return {
        "version": 1, "disable_existing_loggers": False, "formatters": {"json": {"()": JsonFormatter}},
        "handlers": {"stderr": handler},
        "loggers": {"uvicorn": {"handlers": ["stderr"], "propagate": False}, "uvicorn.error": {"propagate": True}},
    }  # fmt: skip
