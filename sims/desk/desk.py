"""What the desk does: read runs, queue requests and withdraw them. Pages and the HTTP interface call these functions."""

import logging
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fastapi import Request

from fedloom.conf.errors import UserError
from fedloom.conf.formatting import count
from fedloom.server.ledger import Ledger
from fedloom.server.ledger import Request as Waiting
from fedloom.server.run_folder.layout import RETRAINED
from fedloom.server.run_folder.listing import read_config
from fedloom.server.run_folder.results_schema import sound_summary
from fedloom.server.unlearning.certificate import COPIES, EVENTS, EXACT, KEPT, MASKED
from fedloom.server.unlearning.requests import KIND, left_of, refuse
from fedloom.server.unlearning.signing import SUFFIX
from fedloom.sims.desk import details
from fedloom.sims.desk.runs import MissingError, Runs
from fedloom.sims.desk.sessions import Gate
from fedloom.sims.desk.tokens import OPERATOR, Token
from fedloom.sims.operations.requests import RequestStatus, requests_of
from fedloom.sims.operations.unlearn import UnlearningRequest, queue
from fedloom.sims.report.proofs import proof_of
from fedloom.sims.report.time_stamps import TimeStampError

TRAINED = ("They were trained together with the sites. Subtraction does not change them, so they may still hold "
           "information from the sites.")  # fmt: skip
MOST_REASON, MOST_ROUNDS = 2000, 1000  # characters of a reason, further rounds
MOST_STAMPS = 3  # proofs that wait for the authority at the same time
ROUNDS = ("restore", "repair")  # options that are numbers of rounds


_stamping = threading.BoundedSemaphore(MOST_STAMPS)


class ConflictError(UserError):
    """A request's id that another request has."""


class AuthorityError(UserError):
    """The time-stamping authority gives no time stamp."""


@dataclass(frozen=True)
class Desk:
    """The runs of a folder, and who may do what with them.

    Attributes:
        runs: The runs.
        gate: Decides who a caller is.
        authority: The URL of a time-stamping authority that stamps proofs; empty without one.
        undelivered: Messages that the webhook has not delivered yet, by run and request (`RUN/REQUEST`).
    """

    runs: Runs
    gate: Gate
    authority: str = ""
    undelivered: dict[str, int] = field(default_factory=dict)

    def requests(self, run: str) -> list[RequestStatus]:
        """Return the requests of a run, oldest first."""
        return self.runs.cached(run, requests_of)

    def request(self, run: str, id: str) -> RequestStatus:
        """Return one request. Raises MissingError if the run has no such request."""
        return _one(self.requests(run), id)

    def submit(self, request: Request, token: Token, run: str, order: UnlearningRequest) -> RequestStatus:
        """Queue a request for the run's server, and return it. The same id with the same content returns the first one.

        Raises DeniedError if the token may not name the sites or order training. Raises ConflictError for an id with other
        content, and LedgerError for a requester's site with another open request.
        """
        path = self.runs.path(run)
        what = f"request to forget {', '.join(order.sites)} in {run}"
        self.gate.require(request, token, token.may_name(order.sites), what)
        trains = any(order.options.values())
        self.gate.require(request, token, not trains or token.may(OPERATOR), f"{what}, with further training")
        self.gate.count_act(token)
        order = checked(replace(order, id=order.id or uuid.uuid4().hex[:12], by=token.name))
        queued = queue(path, order.id, order, alone=not token.may(OPERATOR))
        if (queued.sites, queued.reason, queued.options) != (tuple(order.sites), order.reason, order.options):
            raise ConflictError(f"The request '{order.id}' exists with other sites, options or another reason.")
        return _one(requests_of(path), order.id)

    def cancel(self, request: Request, token: Token, run: str, id: str) -> RequestStatus:
        """Withdraw a waiting request. An operator may withdraw any, others their own."""
        path, known = self.runs.path(run), self.request(run, id)
        self.gate.require(request, token, may_cancel(token, known), f"cancel {id} in {run}")
        self.gate.count_act(token)
        with Ledger.open(path, server=False) as ledger:
            ledger.cancel(id, token.name)
        return _one(requests_of(path), id)

    def certificate(self, request: Request, token: Token, run: str, id: str, suffix: str) -> Path:
        """Return the file of a certificate for a download, and note the download.

        Raises MissingError without it, DeniedError if the token downloads too often.
        """
        file = details.certificate_file(self.runs.path(run), self.request(run, id).id).with_suffix(suffix)
        if not file.is_file() or file.is_symlink():
            raise MissingError("This file does not exist.")
        self.gate.count_act(token)
        self.gate.audit.note("downloaded", token.name, run=run, file=file.name)
        return file

    def proof(self, request: Request, token: Token, run: str, id: str) -> bytes:
        """Return the proof of a request for a download, and note the download.

        Raises MissingError without it, AuthorityError without its time stamp.
        """
        path = self.runs.path(run)
        file = details.certificate_file(path, self.request(run, id).id)
        if not all(part.is_file() and not part.is_symlink() for part in (file, file.with_suffix(SUFFIX))):
            raise MissingError("This request has no signed certificate.")
        self.gate.count_act(token)
        content = self._stamped(run, path, id) if self.authority else proof_of(path, id)
        self.gate.audit.note("downloaded", token.name, run=run, file=f"proof-{id}.zip")
        return content

    def _stamped(self, run: str, path: Path, id: str) -> bytes:
        """Return the proof with an authority's time stamp. Raises AuthorityError without it, or if too many wait for it."""
        if not _stamping.acquire(blocking=False):
            raise AuthorityError("Other proofs wait for the time-stamping authority. Try again in a minute.")
        try:
            return proof_of(path, id, self.authority)
        except TimeStampError as error:
            logging.getLogger("uvicorn.error").error("the proof of request %s in %s: %s", id, run, error)
            raise AuthorityError("The time-stamping authority gives no time stamp. The desk's log says why.") from None
        finally:
            _stamping.release()


def _one(requests: Sequence[RequestStatus], id: str) -> RequestStatus:
    if (found := next((one for one in requests if one.id == id), None)) is None:
        raise MissingError("This request does not exist.")
    return found


def may_cancel(token: Token, known: RequestStatus) -> bool:
    """Return whether a token may withdraw a request."""
    return token.may(OPERATOR) or (token.may_name(known.sites) and known.by == token.name)


def checked(order: UnlearningRequest) -> UnlearningRequest:
    """Return the order. Raises UserError for a value that is too long, too large or missing."""
    if not order.sites:
        raise UserError("Choose at least one site.")
    if len(order.reason) > MOST_REASON:
        raise UserError(f"The reason is too long: at most {MOST_REASON} characters.")
    for name in ROUNDS:
        if not 0 <= getattr(order, name) <= MOST_ROUNDS:
            raise UserError(f"`{name}` must be a number of rounds from 0 to {MOST_ROUNDS}.")
    return order


@dataclass(frozen=True)
class Preview:
    """What a request would do, before it is sent.

    Attributes:
        steps: What happens, in order.
        exact: What the result guarantees.
        not_exact: By part, why it may still have traces.
        deleted: Paths in the run's folder that are deleted.
        cost: What it costs.
    """

    steps: list[str]
    exact: str
    not_exact: dict[str, str]
    deleted: list[str]
    cost: list[str]


def preview(path: Path, order: UnlearningRequest, running: bool) -> Preview:
    """Return what a request would do to a run. Nothing is changed. Raises UserError for a request that is not valid."""
    checked(order)
    config, summary, training = read_config(path), sound_summary(path), details.training_of(path)
    with Ledger.open(path, server=False) as ledger:
        refuse(ledger, order.sites)
        sums, contributions = bool(ledger.sums()), sum(len(ledger.history(site)) for site in order.sites)
    request = Waiting(order.id, KIND, tuple(order.sites), order.reason, order.options, "received", None)
    traces: Any = summary.get("traces")
    not_exact = dict(traces) if isinstance(traces, dict) else {"the networks": TRAINED}
    masked = {"masks": MASKED} if config.federation.secure_aggregation else {}
    paths = left_of(path, request, order.sites)
    return Preview(
        _steps(order, running, f"{path.resolve().parent.name}/{path.name}"),
        EXACT if sums else KEPT,
        {**not_exact, **masked, "events of the ledger": EVENTS, "copies": COPIES},
        [*([f"{contributions} contributions in the ledger"] if contributions else []),
         *(f"{one.relative_to(path)}{'/' if one.is_dir() else ''}" for one in paths)],
        _cost(order, training, config.rounds),
    )  # fmt: skip


def _steps(order: UnlearningRequest, running: bool, run: str) -> list[str]:
    when = ("after the current round" if running else
            f"when an operator runs `fedloom resume {run}`: no server is working on this run now")  # fmt: skip
    sites = ", ".join(order.sites)
    return [
        f"The request is written to the ledger, with your name. The run's server processes it {when}.",
        *(["The run goes back to the round before the sites joined."] if order.rollback else []),
        f"The contributions of {sites} are subtracted and deleted, in one transaction.",
        "The sites' stores on the server's machine are deleted. In a real federation, the sites' machines delete theirs.",
        *(["The rounds since then are trained again without the sites."] if order.rollback else []),
        *([_restored(order.restore)] if order.restore else []),
        *([f"{order.repair} further rounds are trained without the sites."] if order.repair else []),
        *(["A new head is computed from sums of the other sites."] if order.recalibrate else []),
        *([f"A second network is trained without the sites, for comparison, in {RETRAINED}/."] if order.retrain else []),
        "The networks are measured again. A certificate is written and signed.",
        "The sites are not asked again, unless an operator readmits them.",
    ]


def _restored(rounds: int) -> str:
    return (
        f"The aggregate moves part of the way back to its initial state; the others train it for {count(rounds, 'round')}."
    )


def _cost(order: UnlearningRequest, training: details.Training, rounds: int) -> list[str]:
    """Return estimates from the run's own rounds."""
    done, pace = max((round for round, _ in training.loss), default=0), training.pace
    more = (
        order.restore
        + order.repair
        + bool(order.recalibrate)
        + (done if order.rollback else 0)
        + (rounds if order.retrain else 0)
    )
    trained = (
        f"{count(more, 'round')} of training, about {more * pace:,.0f} s at this run's pace." if more else "No training."
    )
    return [
        trained,
        "The subtraction takes under a second for networks of a few megabytes; measuring takes as long as at the run's end.",
        "Accuracy on the forgotten sites' own kind of data usually falls. On other data it may fall as well.",
        "It cannot be undone: the contributions are deleted. The request can be cancelled until the server begins with it.",
    ]
