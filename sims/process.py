"""How a process of ours is interrupted, and how it ends: at once, when all is in order.

To take an interpreter with torch and Ray in it apart takes half a second, on a busy machine seconds, and threads of Ray have
crashed meanwhile: the status of a run that had finished was then that of a crash. Nor may a thread or a handler that a
tracker or a method from outside has left keep the process from ending.
"""

import _thread
import atexit
import contextlib
import os
import signal
import sys
import threading
from typing import Any, NoReturn

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


def listen() -> None:
    """Be interrupted by SIGINT, even where the shell started us with it ignored, and by SIGTERM, at whatever moment."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _again


def _terminate(*_: Any) -> None:
    raise KeyboardInterrupt


def _interrupt() -> None:
    """A signal to another thread would not end a wait; Windows has none to a thread."""
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)
    else:
        _thread.interrupt_main()


def _again(ignored: Any) -> None:
    """An interruption while an object is destroyed goes no further than there: hear it again."""
    if issubclass(ignored.exc_type, KeyboardInterrupt):
        threading.Timer(0.1, _interrupt).start()
    else:
        sys.__unraisablehook__(ignored)
