"""Compare a certificate with a run's ledger, or with the operator's public key."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fedloom.clients.networks import Model
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.request_queue import ID
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder, read_config
from fedloom.server.run_folder.layout import CERTIFICATES
from fedloom.server.run_folder.listing import is_run
from fedloom.server.unlearning.certificate import read
from fedloom.server.unlearning.verification import (
    about,
    unbroken,
    unchecked_signature,
    verify,
    verify_accuracy,
    verify_signature,
)
from fedloom.sims.report.tables import Table


class Verification(NamedTuple):
    """The comparisons as a table, and whether all match."""

    table: Table
    good: bool


def verify_certificate(
    certificate: Path, path: Path | None, key: str = "", request: str = "", sites: Sequence[str] = ()
) -> Verification:
    """Compare a certificate with the run in a folder, with the operator's public key, or with both.

    Args:
        certificate: The certificate's file, or a run's folder; then `path` is the id of a request.
        path: The run's folder; None, without a key: the run that has the certificate.
        key: The operator's public key.
        request: The request that the certificate should be about.
        sites: The sites that it should be about.

    Raises:
        UserError: There is neither a run nor a key.
    """
    if path is not None and is_run(certificate):
        if not ID.fullmatch(str(path)):
            raise UserError(f"verify: '{path}' is not the id of a request; `fedloom requests {certificate}` lists them")
        certificate, path = certificate / CERTIFICATES / f"{path}.json", certificate
    elif path is None and not key and certificate.parent.name == CERTIFICATES and is_run(certificate.parent.parent):
        path = certificate.parent.parent
    if path is None and not key:
        read(certificate)
        raise UserError("verify: needs the run's folder (fedloom verify CERTIFICATE RUN, or RUN REQUEST), or "
                        "--key with the operator's public key")  # fmt: skip
    config = read_config(path) if path is not None else None
    findings = about(certificate, request, sites)
    findings += verify_signature(certificate, key) if key else unchecked_signature(certificate)
    if path is not None and config is not None:
        findings.append(chain := unbroken(path))
        if chain.verdict == "match":
            with Ledger.open(path, server=False) as ledger:
                findings += verify(certificate, ledger)
                findings += verify_accuracy(certificate, ledger, lambda: _measured_now(config, path, ledger))
    rows = [[finding.what, finding.verdict, finding.reason] for finding in findings]
    good = all(finding.verdict != "mismatch" for finding in findings)
    verdict = "match" if good else "mismatch"
    return Verification(Table(f"{certificate.name}: {verdict}", ["what", "verdict", ""], rows), good)


def _measured_now(config: Config, path: Path, ledger: Ledger) -> dict[str, float]:
    def read() -> tuple[Evaluator, Model]:
        method = TrainingRun(config, RunFolder(path), ledger, Evaluator(config))
        return method.evaluator, method.state.aggregate()

    evaluator, model = ledger.steady(read)
    return next(iter(evaluator.table(model, "test").values()), {})
