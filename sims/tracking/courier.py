"""A tracker at work in a thread of its own: it can be slow, hang or fail, and the run goes on."""

import queue
import threading
from collections.abc import Callable
from typing import Any

from fedloom.conf.plugins import told
from fedloom.sims.tracking.base import Writer

MOST_WAITING = 10_000  # rounds that a tracker may be behind


class Courier:
    """Carries what a run tells to one tracker's writer, in order. The first failure ends it: `failure` says why."""

    def __init__(self, name: str, open: Callable[[], Writer]) -> None:
        self.name, self.failure = name, ""
        self._open = open
        self._told = False
        self._waiting: queue.Queue[tuple[str, tuple[Any, ...]]] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker {name}", daemon=True)

    def tell(self, call: str, *given: Any) -> None:
        """Have the writer's method of this name called, some time."""
        if self.failure:
            return
        if self._thread.ident is None:
            self._thread.start()
        try:
            self._waiting.put_nowait((call, given))
        except queue.Full:
            self.failure = f"is {MOST_WAITING} rounds behind"

    def wait(self, seconds: float) -> None:
        """Till all that was told is done, with `close` as the last of it, or so long."""
        if self._thread.ident is not None:
            self._thread.join(seconds)
        if self._thread.is_alive() and not self.failure:
            self.failure = f"did not end within {seconds:g} s"

    def news(self) -> str:
        """A failure that was not told yet."""
        if not self.failure or self._told:
            return ""
        self._told = True
        return f"tracking: {self.name} stops: {self.failure}; the run goes on without it"

    def _work(self) -> None:
        try:
            writer, call = self._open(), ""
            while call != "close":
                call, given = self._waiting.get()
                getattr(writer, call)(*given)
        except BaseException as error:  # interruptions are the main thread's: here they are the tracker's own doing
            self.failure = self.failure or told(error)
