"""How a process of ours ends: at once, when all is in order.

To take an interpreter with torch and Ray in it apart takes half a second, on a busy machine seconds, and threads of Ray have
crashed meanwhile: the status of a run that had finished was then that of a crash. Nor may a thread or a handler that a
tracker or a method from outside has left keep the process from ending.
"""

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

PATIENCE = 15.0  # seconds that others' threads and handlers may take


class Ending:
    """Made before anything else is registered with `atexit`, so that it comes last."""

    def __init__(self) -> None:
        self._status = 1  # of a process that an exception ends
        atexit.register(self._end)

    def leave(self, status: int) -> NoReturn:
        """End with this status: after all threads and handlers, but not long after."""
        self._status = status
        last = threading.Timer(PATIENCE, self._end)
        last.daemon = True
        last.start()
        sys.exit(status)

    def _end(self) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
                stream.flush()
        os._exit(self._status)
