"""What became of a run among many."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedloom.conf.errors import FailedError, UserError, of_files, plain
from fedloom.server.run_folder.listing import busy, read_summary
from fedloom.sims.report.tables import Table, before_forgetting, percent
from fedloom.sims.sweeps.plan import Planned, ordered, placed

KEPT, FINISHED, FAILED, BUSY = "kept", "finished", "failed", "busy"
AT_IT = "another process is at it; the same command keeps what that finishes"
MOST_TOLD = 500  # letters of an error


@dataclass(frozen=True)
class Outcome:
    """A run's folder, what was swept in it, and its status: kept (it was there), finished, failed (`error`: why), busy."""

    folder: Path
    values: Mapping[str, Any]
    status: str
    error: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def missing(self) -> bool:
        """Whether there is no finished run."""
        return self.status in (FAILED, BUSY)

    def as_json(self) -> dict[str, Any]:
        """Everything as plain values."""
        error = {"error": self.error} if self.error else {}
        return {"run": str(self.folder), "values": dict(self.values), "status": self.status, **error,
                "summary": dict(self.summary)}  # fmt: skip


def outcome_table(outcomes: Sequence[Outcome]) -> Table:
    """A row for each run."""
    rows = [[outcome.folder.name, outcome.status, percent(before_forgetting(outcome.summary).get("union"))]
            for outcome in outcomes]  # fmt: skip
    note = "kept: it was finished before." if any(outcome.status == KEPT for outcome in outcomes) else ""
    return Table("Runs", ["run", "status", "test accuracy"], rows, note)


def finished(run: Planned, status: str = FINISHED) -> Outcome:
    """That of a run whose folder says how it ended."""
    return Outcome(run.folder, run.values, status, summary=read_summary(run.folder))


def failed(run: Planned, reason: str) -> Outcome:
    """That of a run that did not end as it should, or that another process works on."""
    if busy(run.folder):
        return Outcome(run.folder, run.values, BUSY, AT_IT)
    return Outcome(run.folder, run.values, FAILED, reason, read_summary(run.folder))


def looked_at(run: Planned) -> Planned | Outcome:
    """What is to be done when its turn comes, or its outcome: another process may have made it since it was planned."""
    try:
        now = placed(run, run.config.run.overwrite)
    except UserError as error:
        return failed(run, plain(str(error))[:MOST_TOLD])
    if now.done:
        return finished(now, KEPT)
    if busy(now.folder):
        return failed(now, AT_IT)
    return now if now.config.run.overwrite else ordered(now, resume=True)  # also where another process makes it first


def attempt(do: Callable[[], Any]) -> str:
    """Do it; why it failed, in a line, empty if it did not. What nobody foresaw leaves a traceback on stderr, too."""
    try:
        do()
    except (UserError, FailedError) as error:
        return plain(str(error))[:MOST_TOLD]
    except Exception as error:
        if isinstance(error, OSError) and (text := of_files(error)):
            return text[:MOST_TOLD]
        traceback.print_exc()
        return plain(f"{type(error).__name__}: {error}")[:MOST_TOLD]
    return ""
