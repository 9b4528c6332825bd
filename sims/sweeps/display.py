"""What a user sees of many runs: a live block in a terminal, plain lines in a log, or only what is worth telling."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fedloom.conf.errors import plain
from fedloom.sims.progress.listeners import (
    MEMORY_SECONDS,
    REFRESHES_PER_SECOND,
    PlainListener,
    QuietListener,
    RichListener,
    size_of,
)
from fedloom.sims.progress.memory import tree_bytes
from fedloom.sims.report.tables import before_forgetting, percent
from fedloom.sims.sweeps.outcome import BUSY, FAILED, Outcome


class Display:
    """Tells only messages, failures and what processes print; the base of the others."""

    def __init__(self, console: Console, total: int, kept: int) -> None:
        self.console, self.total, self.done, self.failed = console, total, kept, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Gives the terminal back."""

    def begin(self, name: str) -> QuietListener:
        """A run begins, or goes on; who is told how."""
        return Quiet(self.console, name)

    def end(self, name: str, outcome: Outcome) -> None:
        """It ended."""
        self.done += outcome.status != BUSY
        self.failed += outcome.status == FAILED
        if outcome.missing:
            self.say(name, f"{outcome.status}: {outcome.error}")

    def say(self, name: str, text: str) -> None:
        """A line of a run."""
        line = plain(text).rstrip()
        self.console.print(f"{name}: {line}" if name else line, markup=False, highlight=False, soft_wrap=True)


class Quiet(QuietListener):
    """Tells only a run's messages, with its name."""

    def __init__(self, console: Console, name: str) -> None:
        super().__init__(console)
        self.name = name

    def _say(self, text: str) -> None:
        super()._say(f"{self.name}: {text}")


class Plain(Quiet, PlainListener):
    """One line for each round of a run, with its name."""

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self._rounds = rounds
        self._say(size_of(sites, rounds) + (f" ({note})" if note else ""))

    def note(self, text: str) -> None:
        """Steps between the rounds are not told: there are many runs."""

    def finished(self, summary: dict[str, Any]) -> None:
        """`Lines.end` tells it."""


class Lines(Display):
    """Plain lines, for logs and pipes."""

    def begin(self, name: str) -> QuietListener:
        return Plain(self.console, name)

    def end(self, name: str, outcome: Outcome) -> None:
        super().end(name, outcome)
        if not outcome.missing:
            self.say(name, f"{ending(outcome)} ({self.done} of {self.total} runs done)")


class Row(RichListener):
    """One run's line in the block."""

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self._begin(self._run, rounds)

    def _show(self) -> None:
        """The block shows it."""

    def note(self, text: str) -> None:
        """The line says how it goes."""

    def message(self, text: str) -> None:
        self._say(f"{self._run}: {text}")

    def finished(self, summary: dict[str, Any]) -> None:
        """`Block.end` tells it."""

    def _load(self) -> str:
        return ""  # told once, for all

    def named(self, name: str) -> Self:
        """With the run's name."""
        self._begin(name, 0)
        return self


class Block(Display):
    """A line for all runs, and one for each that is under way."""

    def __init__(self, console: Console, total: int, kept: int) -> None:
        super().__init__(console, total, kept)
        self._rows: dict[str, Row] = {}
        self._since, self._kept, self._memory, self._looked = time.monotonic(), kept, 0, 0.0
        self._live = Live(
            console=console,
            get_renderable=self.block,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=not console.stderr,
        )
        self._live.start()

    def close(self) -> None:
        self._live.stop()

    def begin(self, name: str) -> QuietListener:
        self._rows[name] = Row(self.console).named(name)
        return self._rows[name]

    def end(self, name: str, outcome: Outcome) -> None:
        super().end(name, outcome)
        self._rows.pop(name, None)
        if not outcome.missing:
            self.say(name, ending(outcome))

    def block(self) -> Group:
        """What is shown now."""
        now = time.monotonic()
        if now - self._looked > MEMORY_SECONDS:
            self._memory, self._looked = tree_bytes(), now
        parts = [f"{self.done} of {self.total} runs done"]
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{self._memory / 2**30:.1f} GiB", f"{_clock(now - self._since)} so far"]
        parts += [f"about {_clock(left)} left"] if (left := self._left(now)) else []
        return Group(Text(", ".join(parts), style="bold"), *(row.line() for row in list(self._rows.values())))

    def _left(self, now: float) -> float:
        """Seconds, at the pace of the runs that ended here."""
        ended = self.done - self._kept
        return (now - self._since) / ended * (self.total - self.done) if ended else 0.0


def display_for(quiet: bool, total: int, kept: int, json_output: bool = False) -> Display:
    """The display that fits: quiet if asked for, live in a terminal, plain lines elsewhere; JSON leaves stdout free."""
    console = Console(stderr=json_output)
    if quiet:
        return Display(console, total, kept)
    kind = Block if console.is_terminal and not console.is_dumb_terminal else Lines
    return kind(console, total, kept)


def ending(outcome: Outcome) -> str:
    """How a run ended, in a line."""
    union, seconds = before_forgetting(outcome.summary).get("union"), outcome.summary.get("seconds", 0.0)
    text = f"{outcome.status} after {seconds:.1f} s"
    return f"{text}, test accuracy {percent(union)}" if union is not None else text


def _clock(seconds: float) -> str:
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours}:{minutes:02d}:{round(seconds) % 60:02d}" if hours else f"{minutes}:{round(seconds) % 60:02d}"
