"""What became of a run among many."""

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conf.errors import FailedError, UserError, plain
from server.runs import read_summary
from sims.sweeps.plan import Planned

KEPT, FINISHED, FAILED = "kept", "finished", "failed"
MOST_TOLD = 500  # letters of an error


@dataclass(frozen=True)
class Outcome:
    """A run's folder, what was swept in it, and its status: kept (it was there), finished or failed, with the reason."""

    folder: Path
    values: Mapping[str, Any]
    status: str
    error: str = ""
    summary: Mapping[str, Any] = field(default_factory=dict)


def finished(one: Planned, status: str = FINISHED) -> Outcome:
    """That of a run whose folder says how it ended."""
    return Outcome(one.folder, one.values, status, summary=read_summary(one.folder))


def failed(one: Planned, reason: str) -> Outcome:
    """That of a run that did not end as it should."""
    return Outcome(one.folder, one.values, FAILED, reason, read_summary(one.folder))


def attempt(do: Callable[[], Any]) -> str:
    """Do it; why it failed, in a line, empty if it did not. What nobody foresaw leaves a traceback on stderr, too."""
    try:
        do()
    except (UserError, FailedError) as error:
        return plain(str(error))[:MOST_TOLD]
    except Exception as error:
        traceback.print_exc()
        return plain(f"{type(error).__name__}: {error}")[:MOST_TOLD]
    return ""
