"""Requests to forget that wait: for a run's first contribution, for another command, or beside a running server."""

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from fedloom.conf.errors import UserError
from fedloom.server.ledger import Ledger, LedgerError
from fedloom.server.ledger.audit import check
from fedloom.server.unlearning.requests import receive
from tests.sims.commands import FEDLOOM, ONE, SMALL, TWO, Command, last_line, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")


def test_a_request_before_the_first_contribution_waits_and_one_to_a_method_that_keeps_none_is_refused(tmp_path: Path):
    for name, slots in (("some", ["networks"]), ("none", [])):
        with Ledger.create(tmp_path / name, "run", "", 32, [ONE, TWO], {}, slots) as ledger:
            ledger.commit_round(0, {}, {}, {}, None, "latest")
            if slots:
                assert receive(ledger, "r", [ONE], "", {}).state == "received"
            else:
                with pytest.raises(UserError, match="the method stores no contributions"):
                    receive(ledger, "r", [ONE], "", {})


def test_resuming_fulfils_what_was_asked_meanwhile_and_writes_its_page(fedloom: Command, run: Path):
    with Ledger.open(run, server=False) as ledger:
        receive(ledger, "r1", [ONE], "", {"repair": 1})
    said = fedloom("resume", run, "--quiet")
    assert said.code == 0, said.err
    assert f"Request 'r1' is verified: the contributions of {ONE} are removed." in said.out
    assert "What is exact" in (run / "certificates/r1.html").read_text()
    assert json.loads((run / "summary.json").read_text())["rounds"] == 3
    assert check(run) == []


def test_requests_that_wait_are_reported_and_fulfilled_with_the_next(fedloom: Command, run: Path):
    """One that was queued while another command held the ledger, which has ended since."""
    with Ledger.open(run, server=False) as ledger:
        receive(ledger, "r1", [ONE], "", {"retrain": True})
        receive(ledger, "r2", [ONE], "", {})
    found = last_line(fedloom("ledger", run, "--check", "--json"))
    assert found["ok"] and ["'r1' is received" in note for note in found["notes"]] == [True, False]
    said = fedloom("unlearn", run, TWO, "--request-id", "r3")
    assert said.code == 0, said.err
    assert all((run / "certificates" / f"{id}.html").is_file() for id in ("r1", "r3"))
    assert json.loads((run / "summary.json").read_text())["unlearned"] == [ONE, TWO]
    refused(fedloom("unlearn", run, ONE, "--request-id", "r2"), "'r2' was refused", "already forgotten")
    for id, reason in {"r1": "is already verified, so", "r2": "is already refused, so it cannot be cancelled: "}.items():
        with Ledger.open(run, server=False) as ledger, pytest.raises(LedgerError, match=f"request '{id}': {reason}"):
            ledger.cancel(id, "ada")
    assert check(run) == [] and last_line(fedloom("ledger", run, "--check", "--json"))["notes"] == []


def test_a_cancelled_request_that_is_sent_again_says_who_cancelled_it(fedloom: Command, run: Path):
    with Ledger.open(run, server=False) as ledger:
        receive(ledger, "r1", [ONE], "", {})
        ledger.cancel("r1", "ada")
        with pytest.raises(LedgerError, match=r"^request 'r1': is already cancelled, by ada$"):
            ledger.cancel("r1", "bob")
    refused(fedloom("unlearn", run, ONE, "--request-id", "r1"), "request 'r1' was cancelled by ada. A new try needs a new")


def test_a_crash_before_the_results_are_measured_again_is_made_good(
    fedloom: Command, run: Path, monkeypatch: pytest.MonkeyPatch
):
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr("fedloom.sims.operations.unlearn._measure_again", killed)
        assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 130
    assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
    assert json.loads((run / "summary.json").read_text())["unlearned"] == [ONE]
    assert (run / "states/aggregate.safetensors").is_file()
    assert check(run) == []


def test_no_one_is_readmitted_whom_a_request_is_still_about(fedloom: Command, run: Path, monkeypatch: pytest.MonkeyPatch):
    from fedloom.server.unlearning.fulfilment import Unlearning

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(Unlearning, "certify", killed)
        assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 130
    refused(fedloom("readmit", run, ONE), "request 'r1' to forget 'site-0001' is not finished")
    assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
    assert fedloom("readmit", run, ONE).code == 0


def test_a_refused_request_leaves_the_results_under_watch(fedloom: Command, run: Path):
    said = fedloom("unlearn", run, ONE, "--rollback")
    refused(said, "federation.history=all")
    assert (said.out + said.err).count("federation.history=all") == 1  # the reason appears once
    (run / "summary.json").write_text("{}")
    assert fedloom("ledger", run, "--check").code == 1


def until(what: Callable[[], bool], server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not what():
        assert server.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@contextmanager
def going_on(path: Path, out: IO[str]) -> Iterator[subprocess.Popen]:
    """A process that resumes a run; it is killed at the end."""
    with subprocess.Popen([FEDLOOM, "resume", str(path)], stderr=out, stdout=out) as server:
        try:
            yield server
        finally:
            server.kill()


@pytest.mark.slow
def test_beside_a_running_server_a_request_is_queued_and_a_second_server_refused(fedloom: Command, tmp_path: Path):
    path = tmp_path / "digits"
    metrics, certificate = path / "metrics.jsonl", path / "certificates/r1.json"

    def lines() -> int:
        return len(metrics.read_text().splitlines()) if metrics.is_file() else 0

    words = [FEDLOOM, "run", *SMALL, "rounds=5000", "evaluation.every=5000", f"run.root={tmp_path}", "--quiet"]
    with subprocess.Popen(words, stderr=subprocess.PIPE) as first:
        until(lambda: lines() >= 2, first)
        first.kill()
    begun = lines()
    output = tmp_path / "output"
    with output.open("w") as out, going_on(path, out) as server:
        until(lambda: lines() > begun + 1, server)
        refused(fedloom("resume", path, "--quiet"), f"process {server.pid} is working on it")
        refused(fedloom("readmit", path, ONE), f"process {server.pid} is working on it")
        refused(fedloom("unlearn", path, "site-001"), "did you mean")
        said = fedloom("unlearn", path, ONE, "--request-id", "r1", "--repair", 2, "--retrain")
        assert said.code == 0 and "Request 'r1' is queued. The server will process it" in said.out
        until(certificate.is_file, server)
        assert json.loads(certificate.read_text())["evidence"]["retrained"]["distance"]
        again = fedloom("unlearn", path, ONE, "--request-id", "r1")
        assert again.code == 0 and "Request 'r1' was verified before" in again.out
        assert "What is exact" in certificate.with_suffix(".html").read_text()
        assert fedloom("verify", certificate, path).code == 0
        assert fedloom("ledger", path).code == 0
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    assert server.returncode == 130
    assert f"Request 'r1' is verified: the contributions of {ONE} are removed." in output.read_text()
    assert [
        found for found in check(path) if found.severity == "problem"
    ] == []  # leftover files of a broken round are not problems
