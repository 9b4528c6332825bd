"""Logs as JSON lines, with FEDLOOM_LOG=json: one object a line, with time, level, message and run."""

import contextlib
import json
import logging
import os
import re
import traceback
from datetime import UTC, datetime
from typing import Any

from fedloom.conf.errors import UserError, plain

VARIABLE = "FEDLOOM_LOG"
_LEVEL = re.compile(r"(DEBUG|INFO|WARNING|ERROR|CRITICAL)\s*:\s+(.*)")  # as Flower writes it
_RUN = re.compile(r"\brun(?:[ _]id)?[ :=]+'?(\d{6,})", re.IGNORECASE)  # Flower's id of a run


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
        "handlers": {"stderr": handler}, "loggers": {"uvicorn": {"handlers": ["stderr"], "propagate": False}},
    }  # fmt: skip
