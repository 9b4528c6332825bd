"""List the requests to forget sites of a run: their states, who asked and why, and what is outstanding."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.server.ledger import Ledger, Request
from fedloom.server.unlearning.client_erasure import at_sites
from fedloom.sims.report.tables import Table, when

CANCELLED = "cancelled"
OPEN = ("received", "applied")  # states of requests that are not finished


@dataclass(frozen=True)
class RequestStatus:
    """A request, and how far it is.

    Attributes:
        id: The request's id.
        state: "received", "applied", "verified", "refused" or "cancelled".
        sites: The sites to forget.
        by: Who asked; may be empty.
        reason: The reason that was written.
        options: Options such as `repair`, without those that are not set.
        times: When it reached each state.
        answer: Why it was refused or cancelled; else empty.
        outstanding: Sites whose machines have not deleted their stores yet.
    """

    id: str
    state: str
    sites: tuple[str, ...]
    by: str
    reason: str
    options: dict[str, Any]
    times: dict[str, str]
    answer: str
    outstanding: tuple[str, ...]

    @property
    def is_open(self) -> bool:
        """Whether it waits, or its certificate is not written yet."""
        return self.state in OPEN


def requests_of(path: Path) -> list[RequestStatus]:
    """Return the requests of a run, oldest first. Raises UserError if it has no readable ledger."""
    with Ledger.open(path, server=False) as ledger:
        dates = ledger.dates()
        return [_status(ledger, request, dates.get(request.id, {})) for request in ledger.requests()]


def _status(ledger: Ledger, request: Request, times: dict[str, str]) -> RequestStatus:
    result = request.result or {}
    refused = request.state == "refused"
    applied = request.state in ("applied", "verified")
    answers = at_sites(ledger, request.id, request.sites) if applied else {}
    return RequestStatus(
        id=request.id,
        state=CANCELLED if refused and result.get(CANCELLED) else request.state,
        sites=request.sites,
        by=request.by,
        reason=request.reason,
        options={name: value for name, value in request.options.items() if value},
        times=times,
        answer=str(result.get("reason") or "") if refused else "",
        outstanding=tuple(site for site, answer in answers.items() if answer is None),
    )


def plain_values(status: RequestStatus) -> dict[str, Any]:
    """Return a request as values for JSON."""
    return dataclasses.asdict(status)


def table(path: Path, found: Sequence[RequestStatus]) -> Table:
    """Return requests as a table."""
    rows = [[one.id, one.state, ", ".join(one.sites), one.by or "-", when(one.times.get("received", "")),
             one.answer or one.reason or "-", ", ".join(one.outstanding) or "-"] for one in found]  # fmt: skip
    columns = ["request", "state", "sites", "by", "received (UTC)", "reason", "outstanding at"]
    return Table(f"Requests of {path}", columns, rows)
