"""Show the progress of a run: a live line in a terminal, plain lines in a log, or only warnings.

Each class is a listener that the server's round loop calls, and a context manager that restores the terminal.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table as Grid
from rich.text import Text

from fedloom.conf.formatting import count
from fedloom.conf.progress import progress_to
from fedloom.server.rounds.listener import Silent
from fedloom.server.run_folder import results_schema
from fedloom.server.run_folder.scores import first_metric, headline
from fedloom.sims.progress.output import lenient, line_of, wants_json
from fedloom.sims.report.headline import closing_lines, result_tables
from fedloom.sims.report.tables import clean, shortened

REFRESHES_PER_SECOND = 4
WIDE, WIDE_BAR, NARROW_BAR = 100, 24, 10  # columns of a wide terminal; of the bar there, and in a narrower one
MOST_NAME = 24  # characters of a run's name in the live line

TOLD_SECONDS, AGAIN_SECONDS = 2.0, 10.0  # plain lines report a long step after 2 s, then every 10 s


class Watcher(Silent):
    """A listener that, inside its `with` block, also receives the steps of long work. The base class shows nothing."""

    def __init__(self) -> None:
        self._hears = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._hears.enter_context(progress_to(self.step))
        return self

    def __exit__(self, *error: object) -> None:
        self._hears.close()
        self.close()

    def close(self) -> None:
        """Restore the terminal. May be called twice."""

    def step(self, what: str, done: int, of: int) -> None:
        """React when `done` of `of` steps of the work `what` are done (`of` 0: total unknown). Must be fast."""


class QuietListener(Watcher):
    """Print warnings only. The base of the listeners that print. `name`: begin each line with it, for one run of a sweep."""

    def __init__(self, console: Console, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.console, self.name, self._clock = console, name, clock

    def message(self, text: str) -> None:
        self._say(text)

    def _say(self, text: str) -> None:
        self.console.print(
            clean(f"{self.name}: {text}" if self.name else text), markup=False, highlight=False, soft_wrap=True
        )


class PlainListener(QuietListener):
    """Print one plain line per round, for logs and pipes. With a name, leave notes and results to the sweep."""

    _what, _due = "", 0.0

    def step(self, what: str, done: int, of: int) -> None:
        if what != self._what or not done:
            self._what, self._due = what, self._clock() + TOLD_SECONDS
        elif self._clock() >= self._due and done != of:
            self._due = self._clock() + AGAIN_SECONDS
            self._say(_step_text(what, done, of))

    def note(self, text: str) -> None:
        if not self.name:
            self._say(text)

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self._rounds = rounds
        self._say(_opening("" if self.name else run, sites, rounds, note))

    def round_done(self, record: dict[str, Any]) -> None:
        parts = [f"round {record['round']}/{self._rounds}", f"{record.get('seconds', 0):.1f} s"]
        parts += [count(record.get("replies", 0), "reply", "replies")]
        dropped, loss, union = len(record.get("dropped") or {}), record.get("train_loss"), _union(record)
        parts += [f"{dropped} dropped"] if dropped else []
        parts += [traffic] if (traffic := traffic_of(record)) else []
        parts += [f"train loss {loss:.4g}"] if loss is not None else []
        costs = (record.get("epsilon") or {}).values()
        parts += [f"epsilon {max(costs):.3g}"] if costs else []
        metric = first_metric(record)
        parts += [f"validation {metric.title} {metric.text(union)}"] if union is not None else []
        self._say(", ".join(parts))

    def finished(self, summary: dict[str, Any]) -> None:
        if self.name:
            return
        for line in (_ending(summary), *closing_lines(summary)):
            self._say(line)
        for table in result_tables(summary):
            self.console.print("\n" + table.plain(), end="", markup=False, highlight=False, soft_wrap=True)
        self.console.print()


class JsonListener(PlainListener):
    """Print a JSON object per line (FEDLOOM_LOG=json), for programs that read logs."""

    def _say(self, text: str, level: str = "info", **facts: Any) -> None:
        self.console.print(
            line_of(text, level, **{"run": self._run, **facts}), markup=False, highlight=False, soft_wrap=True
        )

    _run = ""

    def message(self, text: str) -> None:
        self._say(text, "warning")

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self._run = run.rsplit(" (", 1)[0]  # without the name of its network
        super().started("", sites, rounds, note)

    def finished(self, summary: dict[str, Any]) -> None:
        for line in (_ending(summary), *closing_lines(summary)):
            self._say(line)


class RichListener(QuietListener):
    """Show one live line: run, bar, round, sites of this round, validation metric, time left.

    Calls to the listener only set counters. The display's thread builds the line from them a few times a second.
    """

    def __init__(self, console: Console, name: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, name, clock)
        self._live: Live | None = None
        self._begin(name, 0)

    def _begin(self, run: str, rounds: int) -> None:
        self._run, self._rounds, self._round, self._done = run, rounds, 0, 0
        self._asked, self._heard, self._failed = 0, set[str](), set[str]()
        self._measured = ""
        self._step = ""
        self._replies = 0
        self._since, self._first = self._clock(), 0.0

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self.close()
        self._begin(run, rounds)
        self._say(_opening(run, sites, rounds, note))
        self._show()

    def _show(self) -> None:
        self._live = Live(
            console=self.console,
            get_renderable=self.line,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=not self.console.stderr,  # stdout may carry JSON
        )
        self._live.start()

    def step(self, what: str, done: int, of: int) -> None:
        self._step = "" if done == of else _step_text(what, done, of)
        if self._step and self._live is None:
            self._show()

    def note(self, text: str) -> None:
        self._say(text)

    def round_started(self, round: int, asked: int) -> None:
        if not self._round:  # the first round of this process: a resumed run does not start at 1
            self._done, self._first, self._since = round - 1, float(round - 1), self._clock()
        self._round, self._step = round, ""
        self._ask(asked)

    def _ask(self, asked: int) -> None:
        self._asked, self._heard, self._failed = asked, set(), set()

    def reply(self, site: str, ok: bool, reason: str) -> None:
        self._replies += 1
        if site in self._heard:  # a round may send several requests to each site
            self._heard = set()
        self._heard.add(site)
        if not ok:
            self._failed.add(site)

    def round_done(self, record: dict[str, Any]) -> None:
        self._done = record["round"]
        self._ask(0)
        union = _union(record)
        self._measured = self._measured if union is None else first_metric(record).text(union)

    def finished(self, summary: dict[str, Any]) -> None:
        self.close()
        for line in (_ending(summary), *closing_lines(summary)):
            self._say(line)
        for table in result_tables(summary):
            self.console.print(table.rich())

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def line(self) -> Grid:
        """Return the live line in its current state. In a narrow terminal, it lacks the parts that matter least."""
        done, rounds = len(self._heard), f"round {max(self._round, self._done)}/{self._rounds}"
        parts = {
            "round": rounds if self._rounds else "",
            "sites": f"sites {done}/{self._asked}" if self._rounds and self._asked else "",
            "step": self._step,
            "failed": f"{len(self._failed)} failed" if self._failed else "",
            "measured": f"validation {self._measured}" if self._measured else "",
            "load": self._load(),
            "left": _left(self._clock() - self._since, self._fraction(), self._first / max(1, self._rounds)),
        }
        name, bar = shortened(self._run, MOST_NAME), WIDE_BAR if self.console.width >= WIDE else NARROW_BAR
        room = self.console.width - len(name) - bar - 3  # and the spaces between
        for part in ("load", "step", "measured", "sites"):
            if len(", ".join(filter(None, parts.values()))) > room:
                parts[part] = ""
        grid = Grid.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(width=bar)
        grid.add_column(no_wrap=True)
        shown = ProgressBar(total=1.0, completed=self._fraction(), width=bar)
        grid.add_row(Text(name, style="bold"), shown, Text(", ".join(filter(None, parts.values()))))
        return grid

    def _load(self) -> str:
        """Return the replies per second since the start, and the memory of all processes of the run."""
        from fedloom.sims.progress.memory import recent_bytes

        seconds = self._clock() - self._since
        speed = f"{self._replies / seconds:.3g} tasks/s, " if self._replies and seconds > 0 else ""
        return f"{speed}{recent_bytes() / 2**30:.1f} GiB"

    def _fraction(self) -> float:
        """Return the completed share of all rounds; the current round counts by the sites that replied."""
        part = len(self._heard) / self._asked if self._asked else 0.0
        return min(1.0, (self._done + min(part, 1.0)) / max(1, self._rounds))


def listener_for(quiet: bool, console: Console | None = None, json_output: bool = False) -> QuietListener:
    """Return the listener for this output: quiet on request, live in a terminal, plain lines elsewhere.

    With `json_output`, everything goes to stderr, so that stdout has only JSON. `console` replaces both.
    """
    if wants_json() and not quiet and console is None:
        return JsonListener(Console(stderr=True, file=lenient(sys.stderr)))
    console = console or Console(stderr=json_output, file=lenient(sys.stderr if json_output else sys.stdout))
    if quiet:
        return QuietListener(console)
    return RichListener(console) if console.is_terminal and not console.is_dumb_terminal else PlainListener(console)


def _opening(run: str, sites: int, rounds: int, note: str) -> str:
    size = f"{count(sites, 'site')}, {count(rounds, 'round')}"
    return (f"{run}: " if run else "") + size + (f" ({note})" if note else "")


def traffic_of(record: dict[str, Any]) -> str:
    """Return the traffic of a round as text: `1.2 MB sent, 0.6 MB received`. Empty if the record has no bytes."""
    sent, received = results_schema.traffic_of(record)
    return f"{sent / 1e6:.3g} MB sent, {received / 1e6:.3g} MB received" if record.get("bytes") else ""


def _step_text(what: str, done: int, of: int) -> str:
    if of == 1:  # work that has no parts to count
        return what
    return f"{what}: {done} of {of}" if of else f"{what}: {done}"


def _ending(summary: dict[str, Any]) -> str:
    resources = summary.get("resources", {})
    start, commands = resources.get("start_up"), resources.get("commands", 1)
    text = f"{summary.get('status', 'finished')} after {summary.get('seconds', 0):.1f} s"
    text += f" in {commands} commands" if commands > 1 else ""
    return text if start is None else f"{text} (start-up {start:.1f} s)"


def _union(record: dict[str, Any]) -> float | None:
    return headline(record).get("union")


def _left(seconds: float, fraction: float, start: float) -> str:
    """Return the time left at the current speed as text; empty while it is unknown."""
    if fraction <= start:
        return ""
    return f"{clock_text(seconds * (1 - fraction) / (fraction - start))} left"


def clock_text(seconds: float) -> str:
    """Return a duration as text: 1:02:03 or 2:03."""
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours}:{minutes:02d}:{round(seconds) % 60:02d}" if hours else f"{minutes}:{round(seconds) % 60:02d}"
