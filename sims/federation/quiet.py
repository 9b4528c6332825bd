"""Logs that others cannot fill, nor write in: of each kind of complaint a few lines a minute, each of them one line."""

import logging
import threading
import time
import traceback
from collections.abc import Sequence

from fedloom.conf.errors import plain

NAMES = ("flwr", "uvicorn.error", "asyncio")  # loggers that write of what callers do
LINES = 10  # a minute, of one place in the code
MINUTE = 60.0  # seconds
LONGEST, LONGEST_TRACE = 2000, 20_000  # characters of a line, and of a traceback


class Quiet(logging.Filter):
    """Lets through so many lines a minute of each place in the code, and says afterwards how many it left out."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # when a place's minute began, lines since then
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a line is written. The first of a minute alone has its traceback."""
        place, now = (record.pathname, record.lineno), time.monotonic()
        with self._lock:
            began, lines = self._seen.get(place, (now, 0))
            left_out = 0
            if now - began > MINUTE:
                began, lines, left_out = now, 0, max(lines - LINES, 0)
            self._seen[place] = began, lines + 1
        if lines >= LINES:
            return False
        trace = "" if lines or not record.exc_info else "".join(traceback.format_exception(record.exc_info[1]))
        record.exc_info = record.stack_info = None
        record.exc_text = plain(trace[:LONGEST_TRACE], lines=True).rstrip() or None
        text = plain(record.getMessage()[:LONGEST]).strip()
        record.msg, record.args = f"{text} ({left_out} more like it were left out)" if left_out else text, ()
        return True


def quieten(names: Sequence[str] = NAMES) -> None:
    """Have these loggers write few lines of each kind."""
    for name in names:
        logging.getLogger(name).addFilter(Quiet())
