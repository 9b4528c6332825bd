"""Protect logs from remote callers: a few messages a minute from each place in the code, each on one line."""

import logging
import threading
import time
import traceback
from collections.abc import Sequence

from fedloom.conf.errors import plain

NAMES = ("flwr", "uvicorn.error", "asyncio")  # loggers of messages that callers cause
LINES = 10  # a minute, from one place in the code
MINUTE = 60.0  # seconds
MAX_LINE, MAX_TRACE = 2000, 20_000  # characters of a line, and of a traceback


class Quiet(logging.Filter):
    """A filter that passes LINES lines a minute from each place in the code, and then reports how many it dropped."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # start of a place's minute, lines since then
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log a record, cut to one line. Only a place's first line of a minute has its traceback."""
        location, now = (record.pathname, record.lineno), time.monotonic()
        with self._lock:
            began, lines = self._seen.get(location, (now, 0))
            left_out = 0
            if now - began > MINUTE:
                began, lines, left_out = now, 0, max(lines - LINES, 0)
            self._seen[location] = began, lines + 1
        if lines >= LINES:
            return False
        trace = "" if lines or not record.exc_info else "".join(traceback.format_exception(record.exc_info[1]))
        record.exc_info = record.stack_info = None
        record.exc_text = plain(trace[:MAX_TRACE], lines=True).rstrip() or None
        text = plain(record.getMessage()[:MAX_LINE]).strip()
        record.msg, record.args = f"{text} ({left_out} similar messages were left out)" if left_out else text, ()
        return True


def quieten(names: Sequence[str] = NAMES) -> None:
    """Add the filter `Quiet` to the loggers of these names."""
    for name in names:
        logging.getLogger(name).addFilter(Quiet())
