"""Send the listener calls of a run in another process as lines of JSON, and repeat them in the parent."""

import contextlib
import json
import time
from functools import partial
from typing import Any, TextIO

from fedloom.sims.progress.listeners import Watcher

SECONDS = 0.25  # replies are sent together, and steps thinned out, for so long
CALLS = ("started", "round_started", "round_done", "note", "message")  # listener calls that are sent at once
STEP, REPLIES = "step", "replies"
FINISHED, FAILED = "finished", "failed"  # the last event of a run


class Teller(Watcher):
    """A listener that writes each call to `out` as a line of JSON."""

    def __init__(self, out: TextIO) -> None:
        super().__init__()
        self._out, self._replies, self._told, self._stepped = out, [], 0.0, 0.0
        for call in CALLS:
            setattr(self, call, partial(self.tell, call))

    def tell(self, what: str, *arguments: Any) -> None:
        """Write the event `what` (a call, FINISHED or FAILED), after the replies that wait."""
        if self._replies:
            self._tell_replies()
        self._write(what, *arguments)

    def _tell_replies(self) -> None:
        replies, self._replies, self._told = self._replies, [], time.monotonic()
        self._write(REPLIES, replies)

    def _write(self, what: str, *arguments: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent has exited; stdin's end reports that
            self._out.write(json.dumps([what, *arguments]) + "\n")
            self._out.flush()

    def reply(self, site: str, ok: bool, reason: str) -> None:
        self._replies.append((site, ok, reason))
        if time.monotonic() - self._told > SECONDS:
            self._tell_replies()

    def step(self, what: str, done: int, of: int) -> None:
        if done in (0, of) or time.monotonic() - self._stepped > SECONDS:
            self._stepped = time.monotonic()
            self.tell(STEP, what, done, of)


def repeat(event: list[Any], listener: Watcher) -> None:
    """Call `listener` as the parsed line `event` of a `Teller` says. Raises KeyError for an unknown event."""
    what, *arguments = event
    if what == REPLIES:
        for site, ok, reason in arguments[0]:
            listener.reply(site, ok, reason)
    elif what in (*CALLS, STEP):
        getattr(listener, what)(*arguments)
    else:
        raise KeyError(what)
