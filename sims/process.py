"""Interrupt and end Fedloom's processes quickly and with the correct exit status.

Shutting down an interpreter with torch and Ray takes half a second, or seconds on a busy machine. Threads of Ray have
crashed meanwhile, which gave finished runs the status of a crash. Threads and handlers of other packages must not block the
end.
"""

import _thread
import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import Any, NoReturn

PATIENCE = 15.0  # seconds for threads and handlers of other packages


class Ending:
    """Ends the process as the last `atexit` handler. Create it before any other handler is registered."""

    def __init__(self) -> None:
        self._status = 1  # if an exception ends the process
        atexit.register(self._end)

    def leave(self, status: int) -> NoReturn:
        """End the process with this exit status; wait at most PATIENCE seconds for other threads and handlers."""
        self._status = status
        last = threading.Timer(PATIENCE, self._end)
        last.daemon = True
        last.start()
        sys.exit(status)

    def _end(self) -> NoReturn:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the reader is gone, or it is closed
                stream.flush()
        os._exit(self._status)


def listen() -> None:
    """Make SIGTERM and SIGINT raise KeyboardInterrupt, even if the shell made this process ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _again


def _terminate(*_: Any) -> None:
    raise KeyboardInterrupt


def _interrupt() -> None:
    """Interrupt the main thread, by a signal where the system has signals to threads, since only that ends a wait."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    else:
        _thread.interrupt_main()


def _again(ignored: Any) -> None:
    """Repeat an interruption that came while an object was destroyed, where Python ignores it."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        threading.Timer(0.1, _interrupt).start()
    else:
        sys.__unraisablehook__(ignored)
