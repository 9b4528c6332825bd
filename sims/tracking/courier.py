"""Run a tracker in its own thread. A slow, hanging or failed tracker does not affect the run."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from fedloom.conf.plugins import error_summary
from fedloom.sims.tracking.base import Writer

MOST_WAITING = 10_000  # a tracker may be so many rounds behind


class Courier:
    """A thread that passes events to one tracker's writer, in order. The first error stops it; `failure`: its message."""

    def __init__(self, name: str, open: Callable[[], Writer]) -> None:
        self.name, self.failure = name, ""
        self._open = open
        self._told = False
        self._waiting: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def tell(self, call: str, *arguments: Any) -> None:
        """Queue a call of the writer's method `call`. After a failure, do nothing."""
        if self.failure:
            return
        if self._thread.ident is None:
            self._thread.start()
        try:
            self._waiting.put_nowait((call, arguments))
        except queue.Full:
            self.failure = f"is {MOST_WAITING} rounds behind"

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until all queued calls are done, of which `close` must be the last."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        if self._thread.is_alive() and not self.failure:
            self.failure = f"did not end within {seconds:g} s"

    def news(self) -> str:
        """Return a message about the failure, only once; otherwise an empty text."""
        if not self.failure or self._told:
            return ""
        self._told = True
        return f"tracking: {self.name} has stopped ({self.failure}). The run continues without it."

    def _work(self) -> None:
        try:
            writer, call = self._open(), ""
            while call != "close":
                call, arguments = self._waiting.get()
                getattr(writer, call)(*arguments)
        except BaseException as error:  # only the main thread is interrupted: any interruption here comes from the tracker
            self.failure = self.failure or error_summary(error)
