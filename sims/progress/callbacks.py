"""Call a user's functions while a run is in progress."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedloom.server.rounds.listener import Silent, StopRun

OnRound = Callable[[dict[str, Any]], object]
STOP = "stop"  # what on_round returns to end the run
OnReply = Callable[[str, bool, str], object]


class Callbacks(Silent):
    """A listener that calls the user's `on_round(record)`, which may return STOP, and `on_reply(site, ok, reason)`."""

    def __init__(self, on_round: OnRound | None, on_reply: OnReply | None) -> None:
        self._on_round, self._on_reply = on_round, on_reply
        self._run, self._part = Path(), ""

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self._run = Path(note) if self._run == Path() else self._run  # the run itself comes first
        self._part = "" if Path(note) == self._run else Path(note).relative_to(self._run).as_posix()

    def round_done(self, record: dict[str, Any]) -> None:
        if self._on_round is not None and self._on_round({**copy.deepcopy(record), "part": self._part}) == STOP:
            raise StopRun

    def reply(self, site: str, ok: bool, reason: str) -> None:
        if self._on_reply is not None:
            self._on_reply(site, ok, reason)
