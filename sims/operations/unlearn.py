"""Sites that are forgotten on request: what they gave is subtracted and deleted, and a certificate says so."""

import contextlib
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from fedloom.clients.data import site_sizes
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.schema import Config
from fedloom.server.evaluation.evaluator import Evaluator, has_data
from fedloom.server.ledger import Ledger, Request
from fedloom.server.ledger.blobs import LedgerError
from fedloom.server.ledger.database import BusyError
from fedloom.server.rounds.listener import Listener, Listeners
from fedloom.server.run.experiment import BY_METHOD, check_sums, head
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.server.run_folder.results_schema import sound_summary
from fedloom.server.unlearning.certificate import CERTIFICATES, read
from fedloom.server.unlearning.client_erasure import Erasure, outstanding
from fedloom.server.unlearning.requests import receive, wants_training
from fedloom.sims.engines import SIMULATED, can_start, open_engine, refuse_engine
from fedloom.sims.progress.listeners import Watcher
from fedloom.sims.report.certificates import write_pages
from fedloom.sims.report.report import write_report
from fedloom.sims.tracking import Tracking, trackable

WITHOUT_SERVER = "where no server runs (any more), 'fedloom resume' does"


@dataclass(frozen=True)
class UnlearningRequest:
    """What is asked: sites to forget, the request's id (empty: a new one), and what is done after the subtraction.

    `without_data`: also where the images to measure with are not there; the certificate tells no accuracies then.
    """

    sites: Sequence[str]
    id: str = ""
    reason: str = ""
    repair: int = 0
    retrain: bool = False
    rollback: bool = False
    recalibrate: bool = False
    without_data: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """As the ledger keeps them."""
        always = {"repair": self.repair, "retrain": self.retrain, "rollback": self.rollback}
        return always | ({"recalibrate": True} if self.recalibrate else {})


class Unlearned(NamedTuple):
    """What came of a request: a text for its author, and the certificate, or {"request", "state"} while there is none."""

    text: str
    certificate: dict[str, Any]


def unlearn(path: Path, asked: UnlearningRequest, *, listener: Watcher | None = None) -> Unlearned:
    """Fulfil a request on a run, or queue it where a server is at work."""
    config, id = read_config(path), asked.id or uuid.uuid4().hex[:12]
    try:
        ledger = Ledger.open(path)
    except BusyError:
        return _queue(path, id, asked)
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(listener or Watcher())
        with ledger:
            RunFolder(path).check(ledger.run().config)  # before anything is received
            if ledger.request(id) is None:
                _refuse(config, asked)
            request = receive(ledger, id, asked.sites, asked.reason, asked.options)
            if request.state == "refused" or (request.state == "verified" and not _cut_off(ledger)):
                return _first_result(path, request, asked)
            tracking = stack.enter_context(Tracking(trackable(config, shown.message), shown.message))
            method = TrainingRun(config, RunFolder(path), ledger, Evaluator(config), request_id=id)
            _carry_out(method, Listeners([shown, tracking]))
            request = ledger.request(id) or request
        write_pages(path)
        write_report(path)
    if request.state == "refused":
        return _first_result(path, request, asked)
    file = path / CERTIFICATES / f"{id}.json"
    text = f"request '{id}' verified: {', '.join(request.sites)} forgotten; certificate: {file.with_suffix('.html')}"
    return Unlearned(text, read(file))


def _refuse(config: Config, asked: UnlearningRequest) -> None:
    """UserError, before anything is received, for what the request takes and is not there."""
    if wants_training(config, asked.options):
        refuse_engine(config)
    try:
        if has_data(config) and not asked.without_data:
            site_sizes(config)
    except UserError as error:
        raise UserError(f"{error}; nothing is forgotten yet: networks could not be measured "
                        "(--without-data: all the same; the certificate tells no accuracies then)") from None  # fmt: skip


def _queue(path: Path, id: str, asked: UnlearningRequest) -> Unlearned:
    """Queue a request beside a running server, or say how far it is with it."""
    with Ledger.open(path, server=False) as ledger:
        request = receive(ledger, id, asked.sites, asked.reason, asked.options)
    if request.state in ("verified", "refused"):
        return _first_result(path, request, asked)
    when = (
        "takes it after its present round" if request.state == "received" else "certifies it after the rounds it asked for"
    )
    return Unlearned(f"request '{id}' {request.state}: the running server {when}; {WITHOUT_SERVER}", _state_of(request))


def _state_of(request: Request) -> dict[str, Any]:
    return {"request": request.id, "state": request.state}


def _first_result(path: Path, request: Request, asked: UnlearningRequest) -> Unlearned:
    """What came of a request earlier. Raises UserError if it was refused."""
    if request.state == "refused":
        raise UserError(f"request '{request.id}' was refused: {(request.result or {}).get('reason')}; ask under another id")
    write_pages(path)
    file = path / CERTIFICATES / f"{request.id}.json"
    certificate = read(file) if file.is_file() else None
    text = f"request '{request.id}' was verified before: {', '.join(request.sites)} forgotten; certificate: {file}"
    text += "" if certificate else ", which is not there any more: put it back from a copy"
    if others := set(asked.sites) - set(request.sites):
        text += f"\nnothing is done about {', '.join(sorted(others))}: ask under another id"
    return Unlearned(text, certificate or _state_of(request))


def _cut_off(ledger: Ledger) -> bool:
    """Whether a request was verified last of all: the results were not measured again."""
    return deque(ledger.events(), maxlen=1)[0].kind == "verified"


def _carry_out(method: TrainingRun, listener: Listener) -> None:
    """Fulfil all requests, and have sites delete what they keep."""
    try:
        _fulfil(method, listener)
    except LedgerError as error:
        waits = f"request '{method.request_id}' waits, and 'fedloom resume' goes on with it"
        raise LedgerError(f"{error} ({waits})") from None
    _tell_sites(method, listener)


def _fulfil(method: TrainingRun, listener: Listener) -> None:
    """Apply and certify all requests, also those that come meanwhile, train what they ask for, and measure again.

    Where sites can only be trained by a real federation, requests that want that are left to it as they are.
    """
    unlearning = method.unlearning()

    def can(request: Request) -> bool:
        return can_start(method.config) or not wants_training(method.config, request.options)

    unlearning.screen(listener.note, method.request_id)
    while (due := list(filter(can, unlearning.under_way()))) or _cut_off(method.ledger):
        changed = False
        if any(wants_training(method.config, request.options) for request in due):
            with open_engine(method.config) as grid:  # before anything is subtracted: it may not start
                method.train(method.joined(grid), listener, rounds=unlearning.last_round())
                _measure_again(method, listener)  # sites may have to measure, too
            method.loop = None
        else:
            changed = unlearning.take(listener.note, can=can, mine=method.request_id)
        if changed or _cut_off(method.ledger):
            _measure_again(method, listener)


def _tell_sites(method: TrainingRun, listener: Listener) -> None:
    """Have the nodes of forgotten sites delete what they keep, where a federation can be reached; say so where not."""
    if not outstanding(method.ledger):
        return
    try:
        with open_engine(method.config) as grid:
            method.erasure = Erasure(method.config, method.ledger, grid, listener.message)
            method.unlearning().tell_sites()
    except UserError as error:
        listener.message(str(error))
    if waiting := outstanding(method.ledger):
        listener.message(f"outstanding: {', '.join(sorted(waiting))} must still delete what its node keeps; "
                         "'fedloom resume' asks it again")  # fmt: skip


@contextlib.contextmanager
def _measuring(method: TrainingRun, listener: Listener) -> Iterator[None]:
    """The sites at hand, where accuracies are theirs to tell and they are simulated; else nothing is begun for it."""
    if method.loop is not None or not method.measured_by_sites or method.config.engine.name not in SIMULATED:
        yield
        return
    with open_engine(method.config) as grid:
        method.begin(method.joined(grid), listener)
        yield
    method.loop = None


def _measure_again(method: TrainingRun, listener: Listener) -> None:
    """The run's metrics, summary and networks as they are without the sites."""
    method.complete_metrics()
    old = {"status": "interrupted", "seconds": 0.0, **sound_summary(method.folder.path)}
    gone = {*BY_METHOD, "class_names"}  # they tell of sites that are gone
    old = {key: value for key, value in old.items() if key not in gone}
    members = {site.name for site in method.state.members()}
    if counts := old.get("classes"):
        old["classes"] = {site: numbers for site, numbers in counts.items() if site in members}
    listener.note("measuring on the test images")
    with _measuring(method, listener):
        summary = {**old, **head(method.config, method.ledger), **method.measure()}
    try:
        check_sums(method.folder.path, summary)
    except FailedError:
        summary["status"] = "failed"
        raise
    finally:
        method.folder.write_summary(summary)
        method.ledger.note(summary["status"], {"files": method.folder.results()})
