"""Show the progress of a sweep: a live block in a terminal, plain lines in a log, or only warnings."""

import time
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from fedloom.conf.errors import plain
from fedloom.server.run_folder.scores import metric_of
from fedloom.sims.progress.listeners import REFRESHES_PER_SECOND, PlainListener, QuietListener, RichListener, clock_text
from fedloom.sims.progress.memory import recent_bytes
from fedloom.sims.report.results import shown, which
from fedloom.sims.sweeps.outcome import BUSY, FAILED, Outcome


class Display:
    """Print only warnings, failures and the output of processes. The base of the other displays."""

    def __init__(self, console: Console, total: int, kept: int) -> None:
        self.console, self.total, self.done, self.failed = console, total, kept, 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal."""

    def begin(self, name: str) -> QuietListener:
        """Show the run of this name from now on. Return the listener for it."""
        return QuietListener(self.console, name)

    def end(self, name: str, outcome: Outcome) -> None:
        """Count and show the outcome of a run."""
        self.done += outcome.status != BUSY
        self.failed += outcome.status == FAILED
        if outcome.missing:
            self.say(name, f"{outcome.status}: {outcome.error}")

    def say(self, name: str, text: str) -> None:
        """Print a line of a run; without a name, of the sweep."""
        line = plain(text).rstrip()
        self.console.print(f"{name}: {line}" if name else line, markup=False, highlight=False, soft_wrap=True)


class Lines(Display):
    """Print plain lines, for logs and pipes."""

    def begin(self, name: str) -> QuietListener:
        return PlainListener(self.console, name)

    def end(self, name: str, outcome: Outcome) -> None:
        super().end(name, outcome)
        if not outcome.missing:
            self.say(name, f"{ending(outcome)} ({self.done} of {self.total} runs done)")


class Row(RichListener):
    """One run's line in a `Block`."""

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self._begin(self.name, rounds)

    def _show(self) -> None:
        """Do nothing: the block shows this row."""

    def note(self, text: str) -> None:
        """Print nothing: the row shows the progress."""

    def finished(self, summary: dict[str, Any]) -> None:
        """Print nothing: `Block.end` does."""

    def _load(self) -> str:
        return ""  # the block's first line shows it for all runs


class Block(Display):
    """Show a live line for the sweep, and one for each run in progress."""

    def __init__(self, console: Console, total: int, kept: int) -> None:
        super().__init__(console, total, kept)
        self._rows: dict[str, Row] = {}
        self._since, self._kept = time.monotonic(), kept
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
        self._rows[name] = Row(self.console, name)
        return self._rows[name]

    def end(self, name: str, outcome: Outcome) -> None:
        super().end(name, outcome)
        self._rows.pop(name, None)
        if not outcome.missing:
            self.say(name, ending(outcome))

    def block(self) -> Group:
        """Return the current lines: the sweep's, and one for each run in progress."""
        now = time.monotonic()
        parts = [f"{self.done} of {self.total} runs done"]
        parts += [f"{self.failed} failed"] if self.failed else []
        parts += [f"{recent_bytes() / 2**30:.1f} GiB", f"{clock_text(now - self._since)} so far"]
        parts += [f"about {clock_text(left)} left"] if (left := self._left(now)) else []
        return Group(Text(", ".join(parts), style="bold"), *(row.line() for row in list(self._rows.values())))

    def _left(self, now: float) -> float:
        """Return the seconds left, at the pace of the runs that this sweep has finished."""
        ended = self.done - self._kept
        return (now - self._since) / ended * (self.total - self.done) if ended else 0.0


def display_for(quiet: bool, total: int, kept: int, json_output: bool = False) -> Display:
    """Return the display for this output: quiet on request, live in a terminal, plain lines elsewhere.

    With `json_output`, it prints to stderr.
    """
    console = Console(stderr=json_output)
    if quiet:
        return Display(console, total, kept)
    kind = Block if console.is_terminal and not console.is_dumb_terminal else Lines
    return kind(console, total, kept)


def ending(outcome: Outcome) -> str:
    """Return a line that says how a run ended."""
    union, seconds = shown(outcome.summary).get("union"), outcome.summary.get("seconds", 0.0)
    text = f"{outcome.status} after {seconds:.1f} s"
    metric = metric_of(outcome.summary)
    best = f" ({which(outcome.summary)})" if which(outcome.summary) else ""
    return f"{text}, test {metric.title} {metric.text(union)}{best}" if union is not None else text
