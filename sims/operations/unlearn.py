"""Forget sites on request: subtract and delete their contributions, and write a certificate."""

import contextlib
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.clients.data import site_sizes
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.schema import MOST_ROUNDS, Config
from fedloom.conf.sites import BEST
from fedloom.server.evaluation.evaluator import Evaluator, has_data
from fedloom.server.ledger import Ledger, Request
from fedloom.server.ledger.blobs import LedgerError
from fedloom.server.ledger.database import BusyError
from fedloom.server.ledger.records import STOPPED
from fedloom.server.rounds.listener import Listener, Listeners
from fedloom.server.run.experiment import BY_METHOD, check_sums, head
from fedloom.server.run.measurement import measure
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.server.run_folder.layout import TRACKERS
from fedloom.server.run_folder.results_schema import sound_summary
from fedloom.server.unlearning.certificate import CERTIFICATES, names_of, read
from fedloom.server.unlearning.client_erasure import Erasure, outstanding, outstanding_text
from fedloom.server.unlearning.requests import BACK, RESTORE, SHARE_BACK, receive, wants_training
from fedloom.sims.engines import SIMULATED, can_start, open_engine, refuse_engine
from fedloom.sims.operations.site_names import site_names
from fedloom.sims.progress.listeners import Watcher
from fedloom.sims.report.certificates import write_pages
from fedloom.sims.report.report import write_report
from fedloom.sims.tracking import Tracking, trackable


@dataclass(frozen=True)
class UnlearningRequest:
    """A request to forget sites: the options of `fedloom unlearn`.

    Attributes:
        sites: The sites to forget.
        id: The request's id; "": a new one.
        reason: The reason, for the certificate.
        repair: Rounds of training after the subtraction.
        retrain: Whether to train a network without the sites, for comparison.
        rollback: Whether to go back to before the sites participated, and train again.
        recalibrate: Whether to compute a new head from the other sites' statistics.
        without_data: Forget even if the images for measuring are missing. The certificate then has no accuracies.
        by: Who asks, for the ledger and the certificate.
        restore: Rounds after the subtraction in which the remaining sites train the aggregate as one network.
        back: The share of the way by which the aggregate moves back to its initial state before these rounds; None: half.
    """

    sites: Sequence[str]
    id: str = ""
    reason: str = ""
    _: KW_ONLY
    repair: int = 0
    retrain: bool = False
    rollback: bool = False
    recalibrate: bool = False
    without_data: bool = False
    by: str = ""
    restore: int = 0
    back: float | None = None

    def __post_init__(self) -> None:
        for name, rounds in {"repair": self.repair, "restore": self.restore}.items():
            if not 0 <= rounds <= MOST_ROUNDS:
                raise UserError(f"--{name}: got {rounds}, takes a whole number from 0 to {MOST_ROUNDS}")
        if self.back is not None and not self.restore:
            raise UserError("--back: has no effect without --restore; add --restore N")
        if self.back is not None and not 0.0 <= self.back <= 1.0:  # also for NaN
            raise UserError(f"--back: got {self.back}, takes a number from 0 to 1")

    @property
    def options(self) -> dict[str, Any]:
        """The request's options, in the form in which the ledger stores them."""
        always = {"repair": self.repair, "retrain": self.retrain, "rollback": self.rollback}
        more = {"recalibrate": True} if self.recalibrate else {}
        return (
            always
            | more
            | ({RESTORE: self.restore, BACK: SHARE_BACK if self.back is None else self.back} if self.restore else {})
        )


class Unlearned(NamedTuple):
    """The result of a request: a message, and the certificate, or {"request", "state"} until one exists."""

    text: str
    certificate: dict[str, Any]


class CertificateError(FailedError):
    """A request is verified, but its certificate is missing or does not match the run. `result`: the request's result."""

    def __init__(self, fault: str, result: Unlearned) -> None:
        super().__init__(fault)
        self.result = result


def _sound(result: Unlearned, fault: str) -> Unlearned:
    """Return the result. Raises CertificateError if there is a fault."""
    if fault:
        raise CertificateError(fault, result)
    return result


def unlearn(path: Path, order: UnlearningRequest, *, listener: Watcher | None = None) -> Unlearned:
    """Fulfil a request on a run, or queue it if a server is running. Raises CertificateError as its class says."""
    config, id = read_config(path), order.id or uuid.uuid4().hex[:12]
    order = replace(order, sites=site_names(path, config, order.sites))
    try:
        ledger = Ledger.open(path)
    except BusyError:
        return _queue(path, id, order)
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(listener or Watcher())
        with ledger:
            RunFolder(path).check(ledger.run().config)  # before anything is received
            if ledger.request(id) is None:
                _refuse(config, order)
            request = receive(ledger, id, order.sites, order.reason, order.options, order.by)
            _check_fulfils(ledger, request, order)
            if request.state == "refused" or (request.state == "verified" and not _cut_off(ledger)):
                return _first_result(path, request)
            tracking = stack.enter_context(Tracking(trackable(config, shown.message), shown.message))
            method = TrainingRun(config, RunFolder(path), ledger, Evaluator(config), request_id=id)
            _carry_out(method, Listeners([shown, tracking]))
            request = ledger.request(id) or request
            fault = _fault(ledger, request.id) if request.state == "verified" else ""
        write_pages(path)
        write_report(path)
    if request.state == "refused":
        return _first_result(path, request)
    file = path / CERTIFICATES / f"{id}.json"
    content = read(file)
    text = f"Request '{id}' is verified: {_outcome(content)}. Certificate: {file.with_suffix('.html')}"
    return _sound(Unlearned(f"{text}. {earlier_copies(path, config)}", content), fault)


def earlier_copies(path: Path, config: Config) -> str:
    """Return a sentence on pages and records that show the sites' earlier results, which no request changes."""
    from fedloom.sims.report.compared import pages_near  # imported only here: `fedloom run` does not need it

    own = [str(path / name) for name in TRACKERS if (path / name).is_dir()]
    named, tracked = f" ({', '.join(own)})" if own else "", bool(own or config.tracking)
    shown, elsewhere = pages_near(path)
    if shown:
        records, todo = (f", and trackers' records{named},", ", delete the records") if tracked else ("", "")
        pages = f"Comparison pages written before ({', '.join(map(str, shown))})"
        return f"{pages}{records} still show the earlier results: write the pages again{todo}."
    records = f"Trackers' records{named} still show the earlier results: delete the records. " if tracked else ""
    return f"{records}If a comparison page{' in another folder' if elsewhere else ''} shows this run, write the page again."


def _fault(ledger: Ledger, request: str) -> str:
    from fedloom.server.unlearning.verification import fault_of  # imported only here: slow

    return fault_of(ledger, request)


def _outcome(certificate: dict[str, Any]) -> str:
    from fedloom.server.unlearning.readings import outcome  # imported only here: `fedloom run` does not need it

    return outcome(certificate, names_of(certificate))


def _refuse(config: Config, order: UnlearningRequest) -> None:
    """Raise UserError, before the request is received, if its engine or data is missing."""
    if wants_training(config, order.options):
        refuse_engine(config)
    try:
        if has_data(config) and not order.without_data:
            site_sizes(config)
    except UserError as error:
        raise UserError(f"{error}. Nothing is forgotten yet, since networks cannot be measured. "
                        "--without-data forgets without measuring; the certificate has no accuracies") from None  # fmt: skip


def queue(path: Path, id: str, order: UnlearningRequest, alone: bool = False) -> Request:
    """Queue a request for the server that runs now or next, and return it. A known id returns the first request.

    `alone`: raise LedgerError if another request for one of the sites is open.
    """
    with Ledger.open(path, server=False) as ledger:
        return receive(ledger, id, order.sites, order.reason, order.options, order.by, alone)


def _queue(path: Path, id: str, order: UnlearningRequest) -> Unlearned:
    """Queue a request for the running server, or report its state."""
    request = queue(path, id, order)
    with Ledger.open(path, server=False) as ledger:
        _check_fulfils(ledger, request, order)
    if request.state in ("verified", "refused"):
        return _first_result(path, request)
    if request.state == "received":
        state = "is queued. The server will process it after the current round."
    else:
        state = f"is {request.state}. The server will certify it after the rounds of training that it asks for."
    return Unlearned(f"Request '{id}' {state} {without_server(path)}", _state_of(request))


def without_server(path: Path) -> str:
    """Return a sentence on what to do about a waiting request if the server has stopped."""
    return f"If the server has stopped, run 'fedloom resume {path}'."


def _state_of(request: Request) -> dict[str, Any]:
    return {"request": request.id, "state": request.state}


def _check_fulfils(ledger: Ledger, request: Request, order: UnlearningRequest) -> None:
    """Raise UserError if a known request lacks sites or options of an order, or if its sites participate again."""
    if others := set(order.sites) - set(request.sites):
        raise UserError(f"request '{request.id}' does not forget {', '.join(sorted(others))}; use another --request-id")
    if more := [f"--{name}" for name, value in order.options.items() if value and request.options.get(name) != value]:
        raise UserError(f"request '{request.id}' exists with another value of {', '.join(more)}; use another --request-id")
    again = [site for site, forgotten in ledger.sites().items() if site in order.sites and not forgotten]
    if request.state in ("applied", "verified") and again:
        raise UserError(f"request '{request.id}' forgot {', '.join(again)}, but it was readmitted since; "
                        "use another --request-id")  # fmt: skip


def _first_result(path: Path, request: Request) -> Unlearned:
    """Return the earlier result of a request. Raises UserError if the request was refused."""
    if request.state == "refused":
        result = request.result or {}
        outcome = f"was cancelled by {by}" if (by := result.get("cancelled")) else f"was refused: {result.get('reason')}"
        raise UserError(f"request '{request.id}' {outcome}. A new try needs a new --request-id, or none")
    write_pages(path)
    file = path / CERTIFICATES / f"{request.id}.json"
    certificate = read(file) if file.is_file() else None
    words = _outcome(certificate) if certificate else f"the contributions of {', '.join(request.sites)} are removed"
    text = f"Request '{request.id}' was verified before: {words}. Certificate: {file}"
    fault = "" if certificate else f"{file}: this certificate is missing; restore it from a copy"
    return _sound(Unlearned(text, certificate or _state_of(request)), fault)


def _cut_off(ledger: Ledger) -> bool:
    """Whether the last event is a verified request, so that results were not measured after it."""
    return deque(ledger.events(), maxlen=1)[0].kind == "verified"


def _carry_out(method: TrainingRun, listener: Listener) -> None:
    """Fulfil all requests, and ask nodes of forgotten sites to delete their data."""
    try:
        _fulfil(method, listener)
    except LedgerError as error:
        hint = f"request '{method.request_id}' waits; 'fedloom resume {method.folder.path}' continues it"
        raise LedgerError(f"{error} ({hint})") from None
    _tell_sites(method, listener)


def _fulfil(method: TrainingRun, listener: Listener) -> None:
    """Apply and certify all requests, also new ones, train the rounds that they ask for, and measure again.

    If only a real federation can train the sites, requests with training wait for it.
    """
    unlearning = method.unlearning()

    def can(request: Request) -> bool:
        return can_start(method.config) or not wants_training(method.config, request.options)

    unlearning.screen(listener.note, method.request_id)
    while (due := list(filter(can, unlearning.under_way()))) or _cut_off(method.ledger):
        changed = False
        if any(wants_training(method.config, request.options) for request in due):
            with open_engine(method.config) as grid:  # before the subtraction, since the engine may fail to start
                method.train(method.joined(grid), listener, rounds=unlearning.last_round())
                _measure_again(method, listener)  # sites may have to measure, too
            method.loop = None
        else:
            changed = unlearning.take(listener.note, can=can, mine=method.request_id)
        if changed or _cut_off(method.ledger):
            _measure_again(method, listener)


def _tell_sites(method: TrainingRun, listener: Listener) -> None:
    """Ask the nodes of forgotten sites to delete their data, and report those that could not be reached."""
    if not outstanding(method.ledger):
        return
    try:
        with open_engine(method.config) as grid:
            method.erasure = Erasure(method.config, method.ledger, grid, listener.message)
            method.unlearning().tell_sites()
    except UserError as error:
        listener.message(str(error))
    if line := outstanding_text(method.ledger):
        listener.message(line)


@contextlib.contextmanager
def _measuring(method: TrainingRun, listener: Listener) -> Iterator[None]:
    """Start the simulated sites if they measure the accuracies; otherwise start nothing."""
    if method.loop is not None or not method.measured_by_sites or method.config.engine.name not in SIMULATED:
        yield
        return
    with open_engine(method.config) as grid:
        method.begin(method.joined(grid), listener)
        yield
    method.loop = None


def _measure_again(method: TrainingRun, listener: Listener) -> None:
    """Write the run's metrics, summary and networks without the forgotten sites."""
    method.complete_metrics()
    old = {"status": "interrupted", "seconds": 0.0, **sound_summary(method.folder.path)}
    gone = {*BY_METHOD, "class_names", BEST, STOPPED}  # these contain the forgotten sites, or may have changed
    old = {key: value for key, value in old.items() if key not in gone}
    members = {site.name for site in method.state.members()}
    if counts := old.get("classes"):
        old["classes"] = {site: numbers for site, numbers in counts.items() if site in members}
    listener.note("measuring on the test examples")
    with _measuring(method, listener):
        summary = {**old, **head(method.config, method.ledger), **measure(method, listener.message)}
    try:
        check_sums(method.folder.path, summary)
    except FailedError:
        summary["status"] = "failed"
        raise
    finally:
        method.folder.write_summary(summary)
        method.ledger.note(summary["status"], {"files": method.folder.results()})
