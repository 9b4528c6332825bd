"""What a run in another process tells of itself: its listener's calls as lines of JSON, in and out."""

import contextlib
import json
import time
from collections.abc import Mapping
from typing import Any, TextIO

from rich.console import Console

from fedloom.sims.progress.listeners import QuietListener

SECONDS = 0.25  # that replies and steps wait for others, to travel together
STARTED, ROUND, REPLIES, DONE, STEP, NOTE, MESSAGE = "started", "round", "replies", "done", "step", "note", "message"
FINISHED, FAILED = "finished", "failed"  # the last of a run


class Teller(QuietListener):
    """Writes what it hears as lines."""

    def __init__(self, out: TextIO) -> None:
        super().__init__(Console(quiet=True))
        self._out, self._replies, self._told, self._stepped = out, [], 0.0, 0.0

    def tell(self, what: str, *given: Any) -> None:
        """One event."""
        if self._replies:
            replies, self._replies, self._told = self._replies, [], time.monotonic()
            self._write(REPLIES, replies)
        self._write(what, *given)

    def _write(self, what: str, *given: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # the parent is gone, and says so by stdin's end
            self._out.write(json.dumps([what, *given]) + "\n")
            self._out.flush()

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self.tell(STARTED, run, sites, rounds, note)

    def round_started(self, round: int, asked: int) -> None:
        self.tell(ROUND, round, asked)

    def reply(self, site: str, ok: bool, reason: str) -> None:
        self._replies.append((site, ok, reason))
        if time.monotonic() - self._told > SECONDS:
            replies, self._replies, self._told = self._replies, [], time.monotonic()
            self._write(REPLIES, replies)

    def round_done(self, record: dict[str, Any]) -> None:
        self.tell(DONE, record)

    def step(self, what: str, done: int, of: int) -> None:
        if done in (0, of) or time.monotonic() - self._stepped > SECONDS:
            self._stepped = time.monotonic()
            self.tell(STEP, what, done, of)

    def note(self, text: str) -> None:
        self.tell(NOTE, text)

    def message(self, text: str) -> None:
        self.tell(MESSAGE, text)


def repeat(event: list[Any], listener: QuietListener) -> None:
    """Call the listener as an event says."""
    what, *given = event
    if what == REPLIES:
        for site, ok, reason in given[0]:
            listener.reply(site, ok, reason)
        return
    calls: Mapping[str, Any] = {
        STARTED: listener.started,
        ROUND: listener.round_started,
        DONE: listener.round_done,
        STEP: listener.step,
        NOTE: listener.note,
        MESSAGE: listener.message,
    }
    calls[what](*given)
