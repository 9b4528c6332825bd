"""Listeners, to which a run reports its progress. All calls come from the main thread."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from fedloom.conf.formatting import count
from fedloom.server.run_folder.scores import first_metric, headline


class StopRun(Exception):
    """Raised by a listener after a committed round: the run ends here, as a finished one."""


class Listener(Protocol):
    """Receives a run's progress: a progress bar, a log, a test."""

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        """A run or one of its baselines (named in `run`) begins or resumes. `note`: its folder."""

    def round_started(self, round: int, asked: int) -> None:
        """A round begins: `asked` sites receive their orders."""

    def reply(self, site: str, ok: bool, reason: str) -> None:
        """A site answered. If not `ok`, its reply was dropped for this reason."""

    def round_done(self, record: dict[str, Any]) -> None:
        """A round was committed. `record`: its line of metrics.jsonl."""

    def note(self, text: str) -> None:
        """Show a line about the progress."""

    def message(self, text: str) -> None:
        """Show a line that the user should always see, such as a warning."""

    def finished(self, summary: dict[str, Any]) -> None:
        """The run is complete. `summary`: the content of summary.json."""


class Silent(Listener):
    """A listener that does nothing."""


class Listeners:
    """Several listeners. All receive every call; then the first error of any of them is raised. Implements `Listener`."""

    def __init__(self, listeners: Sequence[Listener]) -> None:
        self.listeners = list(listeners)

    def _all(self, call: Callable[[Listener], None]) -> None:
        errors: list[BaseException] = []
        for each in self.listeners:
            try:
                call(each)
            except BaseException as error:
                errors.append(error)
        if errors:
            raise next((error for error in errors if not isinstance(error, StopRun)), errors[0])

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self._all(lambda each: each.started(run, sites, rounds, note))

    def round_started(self, round: int, asked: int) -> None:
        self._all(lambda each: each.round_started(round, asked))

    def reply(self, site: str, ok: bool, reason: str) -> None:
        self._all(lambda each: each.reply(site, ok, reason))

    def round_done(self, record: dict[str, Any]) -> None:
        self._all(lambda each: each.round_done(record))

    def note(self, text: str) -> None:
        self._all(lambda each: each.note(text))

    def message(self, text: str) -> None:
        self._all(lambda each: each.message(text))

    def finished(self, summary: dict[str, Any]) -> None:
        self._all(lambda each: each.finished(summary))


class LogListener:
    """Writes everything to the log, for the ServerApp in a real federation. Implements `Listener`."""

    def __init__(self) -> None:
        self.log = logging.getLogger("flwr")
        self.rounds = 0

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self.rounds = rounds
        self.log.info("%s: %s, %s %s", run, count(sites, "site"), count(rounds, "round"), note)

    def round_started(self, round: int, asked: int) -> None:
        self.log.info("round %d of %d: %s asked", round, self.rounds, count(asked, "site"))

    def reply(self, site: str, ok: bool, reason: str) -> None:
        """Do nothing: dropped replies also come as messages."""

    def round_done(self, record: dict[str, Any]) -> None:
        metric, replies = first_metric(record), count(record["replies"], "reply", "replies")
        values = " ".join(f"{name} {metric.text(value)}" for name, value in headline(record).items())
        self.log.info("round %d: %s, validation %s: %s", record["round"], replies, metric.title, values)

    def note(self, text: str) -> None:
        self.log.info("%s", text)

    def message(self, text: str) -> None:
        self.log.warning("%s", text)

    def finished(self, summary: dict[str, Any]) -> None:
        self.log.info("finished in %.1f s", summary["seconds"])
