"""Certificates that do not match their run or are missing: exit code 1; a folder in place of one: its certificates."""

import os
import shlex
import shutil
from pathlib import Path

import pytest

from fedloom.conf.errors import FailedError
from fedloom.server.ledger import Ledger
from fedloom.server.unlearning.signing import SUFFIX
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.report.certificates import write_pages
from tests.sims.commands import ONE, TWO, Command, last_line, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")


def test_a_certificate_that_does_not_match_the_run_ends_the_command_with_1(
    fedloom: Command, run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FEDLOOM_KEY", str(run / "summary.json"))  # not a key: certificates are not signed
    (run / "certificates").mkdir(exist_ok=True)
    for request in ("r1", "r2", "r3"):
        (run / f"certificates/{request}{SUFFIX}").write_text("of another certificate")
    said = fedloom("unlearn", run, ONE, "--request-id", "r1", "--json")
    assert said.code == 1 and fedloom("verify", run, "r1").code == 1
    assert said.out.startswith("Request 'r1' is verified: ") and last_line(said)["sites"] == [ONE]
    assert said.err.splitlines()[-1].startswith("fedloom: Request 'r1': its certificate does not match the run: signature ")
    assert f"`fedloom verify {run} r1`" in said.err.splitlines()[-1] and (run / "certificates/r1.html").is_file()
    with Ledger.open(run, server=False) as ledger:
        ledger.receive("r2", "unlearn", [TWO], "", {})
    said = fedloom("resume", run)
    assert said.code == 1 and "Request 'r2': its certificate does not match the run: signature " in said.err
    assert fedloom("resume", run).code == 0
    for site in (ONE, TWO):
        assert fedloom("readmit", run, site).code == 0
    with pytest.raises(FailedError, match="Request 'r3': its certificate does not match the run: signature "):
        unlearn(run, UnlearningRequest([ONE], "r3"))


def test_a_known_request_whose_certificate_is_missing_ends_with_1(fedloom: Command, run: Path):
    assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
    assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
    (run / "certificates/r1.json").unlink()
    said = fedloom("unlearn", run, ONE, "--request-id", "r1")
    assert said.code == 1 and said.out.startswith("Request 'r1' was verified before: ")
    assert said.err.splitlines()[-1].endswith("r1.json: this certificate is missing; restore it from a copy")


def test_a_page_shows_the_certificate_that_is_there_also_if_the_clock_was_set_back(fedloom: Command, run: Path):
    assert fedloom("unlearn", run, ONE, "--request-id", "r1", "--without-data", "--reason", "moved away").code == 0
    path, page = run / "certificates/r1.json", run / "certificates/r1.html"
    before, written = page.read_bytes(), path.stat().st_mtime
    path.write_text(path.read_text().replace("moved away", "asked for it"))
    os.utime(path, (written - 3600, written - 3600))
    write_pages(run)
    assert b"asked for it" in page.read_bytes() and b"asked for it" not in before
    page.write_bytes(b"the same certificate")
    shutil.copystat(path, page)
    write_pages(run)
    assert page.read_bytes() == b"the same certificate"


def test_verify_of_a_folder_names_the_certificates_in_it_as_commands(fedloom: Command, run: Path):
    for folder in (run, run.parent):
        refused(
            fedloom("verify", folder), f"{folder}: is a folder; it has no certificates; name a certificate, or a run that"
        )
    for request, site in (("r 1", ONE), ("r2", TWO)):
        assert fedloom("unlearn", run, site, "--request-id", request.replace(" ", "-"), "--without-data").code == 0
    (run / "certificates/r-1.json").rename(run / "certificates/r 1.json")
    for words in ([run], [run / "certificates"], [run, "--key", "none"]):
        refused(said := fedloom("verify", *words), "is a folder; name a certificate in it: `fedloom verify ")
        commands = [shlex.split(part) for part in said.err.split("`")[1::2]]
        assert [command[:2] for command in commands] == [["fedloom", "verify"]] * 2
        assert [Path(command[2]).name for command in commands] == ["r 1.json", "r2.json"]
        assert fedloom(*commands[1][1:]).code == 0
