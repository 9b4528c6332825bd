"""How a process of ours ends: at once, when all is in order.

To take an interpreter with torch and Ray in it apart takes half a second, on a busy machine seconds, and threads of Ray have
crashed meanwhile: the status of a run that had finished was then that of a crash.
"""

import atexit
import contextlib
import os
import sys
from typing import NoReturn


class Ending:
    """Made before anything else is registered with `atexit`, so that it comes last. `status`: the process's exit status."""

    def __init__(self) -> None:
        self.status = 1  # of a process that an exception ends
        atexit.register(self._leave)

    def _leave(self) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # nobody reads it any more, or it is closed
                stream.flush()
        os._exit(self.status)
