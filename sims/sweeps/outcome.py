"""The outcome of each run of a sweep."""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.conf.errors import FailedError, UserError, of_files, plain
from fedloom.conf.metrics import ACCURACY
from fedloom.server.run_folder.listing import busy, read_summary
from fedloom.server.run_folder.metrics_file import read_metrics
from fedloom.server.run_folder.scores import headline, metric_of, value_in
from fedloom.sims.report.results import shown, which
from fedloom.sims.report.tables import Table
from fedloom.sims.sweeps.plan import Planned, ordered, placed

KEPT, FINISHED, FAILED, BUSY = "kept", "finished", "failed", "busy"
BUSY_MESSAGE = "another process is working on this run; repeat the command when that process has finished"
MOST_CHARACTERS = 500  # letters of an error


@dataclass(frozen=True)
class Outcome:
    """A run's folder, its swept values and its status.

    The status is `kept` (finished before this sweep), `finished`, `failed` (see `error`) or `busy` (in another process).
    """

    folder: Path
    values: Mapping[str, Any]
    status: str
    error: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Outcome({self.folder.name}: {self.status})"

    @property
    def missing(self) -> bool:
        """Whether the folder has no finished run."""
        return self.status in (FAILED, BUSY)

    @property
    def validation(self) -> float | None:
        """The first metric on validation examples of all domains (`validation_of`)."""
        return validation_of(self.folder, self.summary, metric_of(self.summary).name)

    def as_json(self) -> dict[str, Any]:
        """Return the outcome as plain values."""
        error = {"error": self.error} if self.error else {}
        return {"run": str(self.folder), "values": dict(self.values), "status": self.status, **error,
                "validation": self.validation, "summary": dict(self.summary)}  # fmt: skip


def validation_of(folder: Path, summary: Mapping[str, Any], metric: str) -> float | None:
    """Return a run's value on validation examples: of the best network, if it has one, or at the last measured round."""
    records = read_metrics(folder)
    rounds = [best["round"]] if (best := summary.get("best")) else sorted(records, reverse=True)
    return next((value for round in rounds if (value := value_in(records.get(round, {}), metric)) is not None), None)


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a table with the status of each run, and its first metric on validation and test examples."""
    values = [shown(outcome.summary).get("union") for outcome in outcomes]
    best = [f" ({name})" if (name := which(outcome.summary)) else "" for outcome in outcomes]
    rows = [[outcome.folder.name, outcome.status, metric_of(outcome.summary).text(outcome.validation),
             f"{metric_of(outcome.summary).text(value)}{name}"]
            for outcome, value, name in zip(outcomes, values, best, strict=True)]  # fmt: skip
    titles = dict.fromkeys(metric_of(outcome.summary).title for outcome in outcomes if headline(outcome.summary))
    note = "Choose by validation, for example with --best METRIC."
    note += f" {KEPT}: finished before this sweep." if any(outcome.status == KEPT for outcome in outcomes) else ""
    title = " or ".join(titles) or ACCURACY
    return Table("Runs", ["run", "status", f"validation {title}", f"test {title}"], rows, note)


def finished(run: Planned, status: str = FINISHED) -> Outcome:
    """Return the outcome of a complete run, read from its folder."""
    return Outcome(run.folder, run.values, status, summary=read_summary(run.folder))


def failed(run: Planned, reason: str) -> Outcome:
    """Return the outcome of a run that failed for this reason, or that another process is working on."""
    if busy(run.folder):
        return Outcome(run.folder, run.values, BUSY, BUSY_MESSAGE)
    return Outcome(run.folder, run.values, FAILED, reason, read_summary(run.folder))


def check_again(run: Planned) -> Planned | Outcome:
    """Check a run again just before it starts. Return the run, or its outcome if another process has worked on it."""
    try:
        now = placed(run, run.config.run.overwrite)
    except UserError as error:
        return failed(run, plain(str(error))[:MOST_CHARACTERS])
    if now.done:
        return finished(now, KEPT)
    if busy(now.folder):
        return failed(now, BUSY_MESSAGE)
    return (
        now if now.config.run.overwrite else ordered(now, resume=True)
    )  # resume, in case another process creates the folder first


def attempt(do: Callable[[], Any]) -> str:
    """Call `do`. Return why it failed in one line, or an empty text. Unexpected errors also print a traceback."""
    try:
        do()
    except (UserError, FailedError) as error:
        if isinstance(error, UserError) and error.trace:
            print(error.trace, file=sys.stderr)
        return plain(str(error))[:MOST_CHARACTERS]
    except Exception as error:
        if isinstance(error, OSError) and (text := of_files(error)):
            return text[:MOST_CHARACTERS]
        traceback.print_exc()
        return plain(f"{type(error).__name__}: {error}")[:MOST_CHARACTERS]
    return ""
