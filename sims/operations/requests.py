"""The commands on a run that is there: resume, unlearn, verify, ledger."""

import contextlib
import dataclasses
import uuid
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.clients.data import site_sizes
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.schema import Config
from fedloom.server.evaluation.evaluator import Evaluator, has_data
from fedloom.server.ledger import Ledger, Request
from fedloom.server.ledger.audit import check
from fedloom.server.ledger.blobs import LedgerError
from fedloom.server.ledger.database import LEDGER, BusyError
from fedloom.server.rounds.listener import Listener, Listeners
from fedloom.server.run.experiment import BY_METHOD, check_sums, head
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.server.run_folder.results_schema import sound_summary
from fedloom.server.unlearning.certificate import CERTIFICATES, changed, read
from fedloom.server.unlearning.client_erasure import Erasure, outstanding
from fedloom.server.unlearning.requests import receive, wants_training
from fedloom.server.unlearning.verification import about, verify, verify_accuracy, verify_signature
from fedloom.sims.engines import SIMULATED, can_start, open_engine, refuse_engine
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.certificates import write_pages
from fedloom.sims.report.report import write_report
from fedloom.sims.report.tables import Table
from fedloom.sims.tracking import Tracking, trackable

MOST_NAMED, DIGITS = 5, 16  # of a list in a table, of a key's digest
WITHOUT_SERVER = "where no server runs (any more), 'fedloom resume' does"


def resume(
    path: Path,
    *,
    quiet: bool = False,
    json_output: bool = False,
    tracking: Sequence[Any] | None = None,
    listeners: Sequence[Listener] = (),
    began: float | None = None,
) -> dict[str, Any]:
    """Go on with a run after its last committed round; its summary. `tracking`: other trackers than it began with. `began`:
    as sims.operations.simulate.simulate says."""
    config = read_config(path)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
    if tracking is not None:
        config = dataclasses.replace(config, tracking=list(tracking))
    return simulate(config, quiet=quiet, json_output=json_output, listeners=listeners, began=began)


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


def unlearn(path: Path, wish: UnlearningRequest, *, quiet: bool = False) -> tuple[str, dict[str, Any]]:
    """Fulfil a request on a run, or queue it where a server is at work; what to tell, and the certificate.

    Where there is none (yet), {"request", "state"} stands for it.
    """
    config, id = read_config(path), wish.id or uuid.uuid4().hex[:12]
    try:
        ledger = Ledger.open(path)
    except BusyError:
        return _queue(path, id, wish)
    with contextlib.ExitStack() as stack:
        shown = stack.enter_context(listener_for(quiet))
        with ledger:
            RunFolder(path).check(ledger.run().config)  # before anything is received
            if ledger.request(id) is None:
                _refuse(config, wish)
            request = receive(ledger, id, wish.sites, wish.reason, wish.options)
            if request.state == "refused" or (request.state == "verified" and not _cut_off(ledger)):
                return _first_result(path, request, wish)
            listener = Listeners([shown, stack.enter_context(Tracking(trackable(config, shown.message), shown.message))])
            method = TrainingRun(config, RunFolder(path), ledger, Evaluator(config), request_id=id)
            try:
                _fulfil(method, listener)
            except LedgerError as error:
                raise LedgerError(f"{error} (request '{id}' waits, and 'fedloom resume' goes on with it)") from None
            _tell_sites(method, listener)
            request = ledger.request(id) or request
        write_pages(path)
        write_report(path)
    if request.state == "refused":
        return _first_result(path, request, wish)
    file = path / CERTIFICATES / f"{id}.json"
    told = f"request '{id}' verified: {', '.join(request.sites)} forgotten; certificate: {file.with_suffix('.html')}"
    return told, read(file)


def _refuse(config: Config, wish: UnlearningRequest) -> None:
    """UserError, before anything is received, for what the request takes and is not there."""
    if wants_training(config, wish.options):
        refuse_engine(config)
    try:
        if has_data(config) and not wish.without_data:
            site_sizes(config)
    except UserError as error:
        raise UserError(f"{error}; nothing is forgotten yet: networks could not be measured "
                        "(--without-data: all the same; the certificate tells no accuracies then)") from None  # fmt: skip


def verify_certificate(
    certificate: Path, path: Path | None, key: str = "", request: str = "", sites: Sequence[str] = ()
) -> tuple[Table, bool]:
    """What was compared, and whether nothing differs: with the run, by the operator's public key, or both.

    `request`, `sites`: what the certificate should be about.
    """
    if path is None and not key:
        raise UserError("verify: takes a certificate, and the run's folder behind it (fedloom verify CERTIFICATE RUN), or "
                        "--key, the operator's public key")  # fmt: skip
    config = read_config(path) if path is not None else None
    findings = about(certificate, request, sites)
    findings += verify_signature(certificate, key) if key else []
    if path is not None and config is not None:
        with Ledger.open(path, server=False) as ledger:
            findings += verify(certificate, ledger)
            findings += verify_accuracy(certificate, ledger, lambda: _accuracy_now(config, path, ledger))
    rows = [[finding.what, finding.verdict, finding.told] for finding in findings]
    good = all(finding.verdict != "mismatch" for finding in findings)
    verdict = "match" if good else "mismatch"
    return Table(f"{certificate.name}: {verdict}", ["what", "verdict", ""], rows), good


def _accuracy_now(config: Config, path: Path, ledger: Ledger) -> dict[str, float]:
    evaluator = Evaluator(config)
    model = ledger.steady(lambda: TrainingRun(config, RunFolder(path), ledger, evaluator).state.aggregate())
    return evaluator.accuracy(model, "test")


def audit(path: Path) -> dict[str, Any]:
    """`fedloom ledger --check`: {"ok", "digest", "problems", "notes"}; requests that wait are among the notes."""
    if not path.is_dir():
        raise UserError(f"{path}: no such run folder; give the folder of a run, such as runs/digits")
    found = check(path)
    told: dict[str, list[str]] = {"problem": [], "note": []}
    for one in found:
        told[one.severity].append(f"{one.file}: {one.what}")
    digest: dict[str, str] = {}
    with contextlib.suppress(UserError), Ledger.open(path, server=False) as ledger:
        last = ledger.last_round()
        digest = last.digest if last else {}
        told["problem"] += [f"{CERTIFICATES}/{name}: is not as the server wrote it" for name in changed(ledger)]
        told["note"] += [f"{LEDGER}: request '{each.id}' is {each.state}, not verified: the running server goes on with it;"
                         f" {WITHOUT_SERVER}" for each in ledger.waiting(applied=True)]  # fmt: skip
    return {"ok": not told["problem"], "digest": digest, "problems": told["problem"], "notes": told["note"]}


def events(path: Path) -> list[dict[str, Any]]:
    """The ledger's events, oldest first: {"id", "time", "kind", "body", "previous", "digest"}."""
    with Ledger.open(path, server=False) as ledger:
        return [dataclasses.asdict(event) for event in ledger.events()]


def events_table(path: Path, given: Sequence[dict[str, Any]]) -> Table:
    """The same as a table."""
    rows = [[one["id"], one["time"], one["kind"], _told(one["body"]), one["digest"][:12]] for one in given]
    return Table(f"Ledger of {path}", ["#", "time", "event", "what", "digest"], rows)


def prune(path: Path) -> list[str]:
    """`fedloom ledger --prune`: the names of what was removed."""
    with Ledger.open(path) as ledger:
        return ledger.prune()


def _told(body: dict[str, Any]) -> str:
    """The short parts of an event's body."""
    parts = {key: body[key] for key in ("round", "id", "request", "sites", "reason") if body.get(key) not in (None, "", [])}
    words = {key: _row(item) if isinstance(item, list) else str(item) for key, item in parts.items()}
    if spent := (body.get("record") or {}).get("epsilon"):
        words["epsilon"] = _row([f"{site} {one:.3g}" for site, one in spent.items()])
    if isinstance(joined := body.get("nodes"), dict):
        keys = {site: f" (key {key[:DIGITS]})" for site, key in (body.get("keys") or {}).items()}
        words["nodes"] = _row([f"{site} {node}{keys.get(site, '')}" for site, node in joined.items()])
        words |= {"by": body["by"]} if "by" in body else {}
    return "; ".join(f"{key} {word}" for key, word in words.items())


def _row(items: Sequence[str]) -> str:
    return ", ".join(items[:MOST_NAMED]) + (", ..." if len(items) > MOST_NAMED else "")


def _queue(path: Path, id: str, wish: UnlearningRequest) -> tuple[str, dict[str, Any]]:
    """Queue a request beside a running server, or say how far it is with it."""
    with Ledger.open(path, server=False) as ledger:
        request = receive(ledger, id, wish.sites, wish.reason, wish.options)
    if request.state in ("verified", "refused"):
        return _first_result(path, request, wish)
    when = (
        "takes it after its present round" if request.state == "received" else "certifies it after the rounds it asked for"
    )
    return f"request '{id}' {request.state}: the running server {when}; {WITHOUT_SERVER}", _state_of(request)


def _state_of(request: Request) -> dict[str, Any]:
    return {"request": request.id, "state": request.state}


def _first_result(path: Path, request: Request, wish: UnlearningRequest) -> tuple[str, dict[str, Any]]:
    """What came of a request earlier. Raises UserError if it was refused."""
    if request.state == "refused":
        raise UserError(f"request '{request.id}' was refused: {(request.result or {}).get('reason')}; ask under another id")
    write_pages(path)
    file = path / CERTIFICATES / f"{request.id}.json"
    done = read(file) if file.is_file() else None
    told = f"request '{request.id}' was verified before: {', '.join(request.sites)} forgotten; certificate: {file}"
    told += "" if done else ", which is not there any more: put it back from a copy"
    if others := set(wish.sites) - set(request.sites):
        told += f"\nnothing is done about {', '.join(sorted(others))}: ask under another id"
    return told, done or _state_of(request)


def _cut_off(ledger: Ledger) -> bool:
    """Whether a request was verified last of all: the results were not measured again."""
    return deque(ledger.events(), maxlen=1)[0].kind == "verified"


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
    old = {key: one for key, one in old.items() if key not in gone}
    members = {site.name for site in method.state.members()}
    if counts := old.get("classes"):
        old["classes"] = {site: one for site, one in counts.items() if site in members}
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
