"""Copies of runs: made while a run trains, restored, resumed; and those that are older than a request."""

import dataclasses
import json
import multiprocessing
import os
import shutil
import time
from pathlib import Path

import pytest

from fedloom.server.ledger import Ledger
from fedloom.server.run_folder.layout import APPLIED
from fedloom.server.unlearning.certificate import read
from fedloom.sims.operations.backup import backup
from tests.server.kills import begun, configured, last_round, results
from tests.server.ledgers import problems
from tests.server.parts import folder
from tests.sims.commands import ONE, TWO, Command, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")


def test_a_copy_of_a_training_run_has_no_faults_and_ends_with_the_same_bits(tmp_path: Path):
    config = configured(tmp_path / "there")
    process, copies = begun(config), []
    while process.is_alive():
        if (last_round(config) or 0) > len(copies):
            copies.append(backup(folder(config), tmp_path / f"copy-{len(copies)}"))
        time.sleep(0.01)
    assert process.exitcode == 0 and copies and copies[0] < 4
    whole = results(folder(config))
    for number in range(len(copies)):
        there = dataclasses.replace(config, run=dataclasses.replace(config.run, root=str(tmp_path / f"again-{number}")))
        shutil.copytree(tmp_path / f"copy-{number}", folder(there))
        assert problems(folder(there)) == []
        (again := begun(there)).join(60)
        assert again.exitcode == 0 and results(folder(there)) == whole


def test_a_copy_is_taken_of_one_event_though_a_server_commits_meanwhile(run: Path, tmp_path: Path):
    """Every request is an event: a process adds them while the run is copied."""
    process = multiprocessing.get_context("fork").Process(target=requesting, args=(run,))
    process.start()
    try:
        backup(run, tmp_path / "copy")
    finally:
        process.join()
    assert problems(tmp_path / "copy") == [] and problems(run) == []
    assert not list(tmp_path.glob(".*backup*"))


def requesting(run: Path) -> None:
    with Ledger.open(run, server=False) as ledger:
        for number in range(20):
            ledger.receive(f"r{number}", "unlearn", [ONE], "", {})


def test_a_restored_copy_forgets_a_site_again_if_it_is_older_than_the_request(fedloom: Command, run: Path, tmp_path: Path):
    assert (
        fedloom("backup", run, tmp_path / "copy").out == f"written: {tmp_path}/copy, after round 2; the copy has no faults\n"
    )
    assert fedloom("unlearn", run, ONE, "--request-id", "r1", "--by", "dpo", "--reason", "consent").code == 0
    before = read(run / "certificates" / "r1.json")
    shutil.rmtree(run)
    shutil.copytree(tmp_path / "copy", run)
    checked = fedloom("ledger", run, "--check")
    assert checked.code == 0 and f"is older than request 'r1', which had removed {ONE}. 'fedloom resume" in checked.out
    noted = fedloom("requests", run)
    assert noted.code == 0 and f"note: 1 request waits in {run}" in noted.err
    assert fedloom("resume", run).code == 0
    again = read(run / "certificates" / "r1.json")
    assert (again["by"], again["reason"], again["exact"]) == ("dpo", "consent", before["exact"])
    checked = fedloom("ledger", run, "--check", "--json")
    assert json.loads(checked.out)["notes"] == [] and not list((run / "sites").glob(f"*/{ONE}"))
    assert fedloom("unlearn", run, TWO, "--request-id", "r2").code == 0


def test_a_request_is_asked_again_of_the_restored_run_alone(fedloom: Command, run: Path, tmp_path: Path):
    """A torn line, a site that is forgotten since by another request, and copies under other names change nothing."""
    shutil.copytree(run, tmp_path / "other")
    shutil.copytree(run, tmp_path / "copy")
    with (tmp_path / APPLIED).open("w") as file:
        file.write('{"run": "torn')
    assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
    for name in ("other", "digits"):
        with Ledger.open(tmp_path / name, server=False) as ledger:
            assert ledger.lost() == []
    shutil.rmtree(run)
    (tmp_path / "copy").rename(run)
    with Ledger.open(run, server=False) as ledger:
        assert [(lost["id"], lost["sites"]) for lost in ledger.lost()] == [("r1", [ONE])]
    (tmp_path / APPLIED).rename(tmp_path / "away")
    assert fedloom("unlearn", run, ONE, "--request-id", "r2").code == 0
    (tmp_path / "away").rename(tmp_path / APPLIED)
    with Ledger.open(run) as ledger:
        assert ledger.waiting() == []


@pytest.mark.parametrize("wrong", [{"id": "../../evil"}, {"id": 7}, {"sites": [[1]]}, {"options": 3}, {"more": 1},
                                   {"options": {"restore": -5}}, {"options": {"back": "q"}}])  # fmt: skip
def test_a_line_that_is_not_a_request_is_named_and_writes_nothing(
    fedloom: Command, run: Path, tmp_path: Path, wrong: dict[str, object]
):
    with Ledger.open(run, server=False) as ledger:
        line = {"run": ledger.run().run, "folder": run.name, "id": "r1", "kind": "unlearn", "sites": [ONE], "reason": "",
                "options": {}, "by": ""}  # fmt: skip
    (tmp_path / APPLIED).write_text(f"[1]\n{json.dumps(line | wrong)}\n")
    refused(fedloom("resume", run), f"{APPLIED}: line 2 is not a request; restore the file from a copy")
    assert problems(run) == [] and not list(tmp_path.rglob("*evil*"))
    (tmp_path / APPLIED).write_text(f"[1]\n{json.dumps(line)}\n")
    assert fedloom("resume", run).code == 0 and (run / "certificates" / "r1.json").is_file()


def test_what_cannot_be_copied_is_refused_in_one_line(fedloom: Command, run: Path, tmp_path: Path):
    (tmp_path / "there").mkdir()
    refused(fedloom("backup", run, tmp_path / "there"), "there: exists already; name a new folder")
    refused(fedloom("backup", tmp_path / "there", tmp_path / "new"), "is not a run of fedloom")
    refused(fedloom("backup", run, run / "copy"), "copy: is inside the run, so forgetting a site would miss it")
    (tmp_path / "file").touch()
    refused(fedloom("backup", run, tmp_path / "file" / "new"), "the copy failed (Not a directory); nothing is written")
    blob = next((run / "blobs").iterdir())
    blob.write_bytes(b"damaged")
    refused(fedloom("backup", run, tmp_path / "new"), f"the copy has a fault (blobs/{blob.name}: is damaged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits", "file", "there"]


def test_a_run_in_a_folder_that_cannot_be_written_is_copied(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if os.geteuid() == 0:  # root may write anywhere but on a disk that is read-only
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != run.resolve().parent)
        monkeypatch.setattr(Path, "mkdir", refusing(Path.mkdir, run.resolve().parent))
    out = tmp_path / "elsewhere" / "there" / "copy"
    out.parent.mkdir(parents=True)
    run.parent.chmod(0o500)
    try:
        backup(run, out)
    finally:
        run.parent.chmod(0o700)
    assert problems(out) == [] and [path.name for path in out.parent.iterdir()] == ["copy"]


def refusing(mkdir, place: Path):
    """`mkdir`, but for folders directly in `place`."""

    def other(path: Path, *args, **options) -> None:
        if path.parent == place and path.name.startswith("."):
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, *args, **options)

    return other
