"""Runs with a ledger, a certificate or a signature that was changed, or with links: one line says what, and where."""

import base64
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fedloom.server.ledger import Ledger
from tests.sims.commands import ONE, TWO, Command, events, refused
from tests.sims.desks import browser, folder_with

TYPES: list[tuple[tuple[str, ...], Any]] = [
    (("evidence", "before"), 7),
    (("evidence", "after", "accuracy"), {"digits": "x"}),
    (("readings",), {"a": 1}),
    (("goals",), {"timeliness": 1}),
    (("scope",), {"tested": [{}]}),
]


@pytest.fixture(scope="module")
def certified(finished_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a verified request, which no test changes."""
    from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn

    path = Path(shutil.copytree(finished_run, tmp_path_factory.mktemp("certified") / "digits"))
    unlearn(path, UnlearningRequest([ONE], "r1"))
    return path


@pytest.fixture
def forgot(certified: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(certified, tmp_path / "runs" / "digits"))


def changed_event(run: Path, kind: str) -> None:
    """Change one letter of an event's JSON, so that it is not valid JSON."""
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db, db:
        db.execute("PRAGMA ignore_check_constraints=ON")
        db.execute("DROP TRIGGER events_stay")
        db.execute("UPDATE events SET body = replace(body, '{', '[') WHERE kind = ?", (kind,))


@pytest.mark.parametrize("words", [["ledger"], ["requests"], ["proof", "r1"], ["unlearn", TWO], ["resume", "rounds=3"]])
def test_an_event_that_is_not_readable_is_named(fedloom: Command, forgot: Path, words: list[str]):
    changed_event(forgot, "received" if words == ["requests"] else "round")
    refused(fedloom(words[0], forgot, *words[1:]), "ledger.sqlite: the chain is broken at event")


def test_a_certificate_does_not_match_a_ledger_that_is_not_readable(fedloom: Command, forgot: Path):
    changed_event(forgot, "round")
    said = fedloom("verify", forgot / "certificates/r1.json", forgot)
    assert said.code == 1 and "the ledger's events follow each other | mismatch" in said.out


def test_a_request_that_is_not_readable_is_named(fedloom: Command, forgot: Path):
    with closing(sqlite3.connect(forgot / "ledger.sqlite")) as db, db:
        db.execute("PRAGMA ignore_check_constraints=ON")
        db.execute("UPDATE requests SET options = '{'")
    refused(fedloom("requests", forgot), "ledger.sqlite: is damaged: a row has '{'; restore it")


def tampered(run: Path, *statements: str) -> None:
    """Change rows as no program of this project does."""
    with closing(sqlite3.connect(run / "ledger.sqlite")) as db, db:
        db.execute("PRAGMA ignore_check_constraints=ON")
        for statement in ("DROP TRIGGER events_stay", *statements):
            db.execute(statement)


@pytest.mark.parametrize(
    "row",
    ["sites = '5'", "sites = '[1]'", f"options = '{'[' * 100_000}'", "options = '[]'", "result = '5'", "reason = x'00'"],
)
def test_a_request_of_other_types_is_one_line(fedloom: Command, forgot: Path, row: str):
    tampered(forgot, f"UPDATE requests SET {row}")
    refused(fedloom("requests", forgot), "ledger.sqlite: is damaged: a row has")
    said = fedloom("verify", forgot / "certificates/r1.json", forgot)
    assert said.code and "Traceback" not in said.err and fedloom("runs", forgot.parent).code == 0
    assert fedloom("ledger", forgot, "--check").code == 1


def test_a_ledger_without_its_run_is_a_finding_and_stops_no_list(fedloom: Command, forgot: Path):
    tampered(forgot, "PRAGMA foreign_keys=OFF", "DELETE FROM runs")
    assert fedloom("runs", forgot.parent).code == 0
    said = fedloom("ledger", forgot, "--check")
    assert said.code == 1 and "table 'runs': row" in said.out and "Traceback" not in said.err


def test_a_finding_is_one_line_whatever_the_names_in_it(fedloom: Command, forgot: Path):
    tampered(forgot, "UPDATE events SET kind = 'x' || char(10) || char(27) || '[31my' WHERE id = 3")
    (forgot / "blobs" / "a\nb").write_text("")
    said = fedloom("ledger", forgot, "--check")
    assert said.code == 1 and "event 3 ('x" in said.out and "\x1b" not in said.out
    lines = [line for line in said.out.splitlines() if "event 3" in line or "blobs/a" in line]
    assert len(lines) == 2 and all("is not a blob" in line or "does not match" in line for line in lines)


@pytest.mark.parametrize(("place", "value"), TYPES)
def test_a_certificate_of_other_types_stops_no_other_request(
    fedloom: Command, forgot: Path, place: tuple[str, ...], value: Any
):
    file = forgot / "certificates/r1.json"
    content = json.loads(file.read_text())
    inside = content
    for name in place[:-1]:
        inside = inside[name]
    inside[place[-1]] = value
    file.write_text(json.dumps(content))
    refused(fedloom("proof", forgot, "r1", "--out", forgot / "p.zip"), "differs from what the server wrote")
    folder = folder_with(forgot, forgot.parent / "desk")
    page = browser(folder, "viewer").get("/runs/digits/certificates/r1")
    assert page.status_code == 422 and "was changed" in page.text
    assert fedloom("unlearn", forgot, TWO, "--request-id", "r2").code == 0
    assert "certificates/r1.json: differs" in fedloom("ledger", forgot, "--check").out


def test_a_changed_signature_is_found(fedloom: Command, forgot: Path):
    file = forgot / "certificates/r1.sig"
    beside = json.loads(file.read_text())
    signature = bytearray(base64.b64decode(beside["signature"]))
    signature[5] ^= 1
    file.write_text(json.dumps({**beside, "signature": base64.b64encode(signature).decode()}))
    refused(fedloom("proof", forgot, "r1", "--out", forgot / "p.zip"), "r1.sig: is not the signature of r1.json")
    assert not (forgot / "p.zip").exists()
    said = fedloom("ledger", forgot, "--check")
    assert said.code == 1 and "certificates/r1.sig: is not the signature of its certificate" in said.out


@pytest.mark.parametrize("name", ["states", "baselines", "own store"])
def test_what_a_link_leads_to_is_not_deleted(fedloom: Command, run: Path, tmp_path: Path, name: str):
    link = next(run.glob(f"sites/*/{ONE}")) if name == "own store" else run / name
    elsewhere = tmp_path / "elsewhere"
    link.rename(elsewhere) if link.exists() else elsewhere.mkdir()
    (elsewhere / "mine").write_text("precious")
    link.symlink_to(elsewhere)
    before = events(run)
    refused(fedloom("unlearn", run, ONE, "--request-id", "r1"), f"{link.name}: is a link", "put the files themselves")
    assert events(run) == before and (elsewhere / "mine").read_text() == "precious"
    link.unlink()
    shutil.move(elsewhere, link)
    assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
    with Ledger.open(run, server=False) as ledger:
        assert ledger.request("r1").state == "verified"  # type: ignore[union-attr]


def test_a_link_to_another_run_among_the_baselines_is_refused_and_not_followed(fedloom: Command, run: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(run, other)
    (run / "baselines").mkdir(exist_ok=True)
    (run / "baselines" / "mine").symlink_to(other)
    refused(fedloom("unlearn", run, ONE, "--request-id", "r1"), "baselines/mine: is a link", "put the files themselves")
    (run / "baselines" / "mine").unlink()
    assert events(other) == events(run) and (other / "states").is_dir()


def test_files_of_the_user_outlive_a_request(fedloom: Command, run: Path):
    mine = [run / name for name in ("states/mine.safetensors", "certificates/mine.json", "retrained/notes.txt", "notes.txt")]
    for file in mine:
        file.parent.mkdir(exist_ok=True)
        file.write_text("precious")
    assert fedloom("unlearn", run, ONE, "--request-id", "r1").code == 0
    assert all(file.read_text() == "precious" for file in mine)
    assert not (run / "states" / f"{ONE}.safetensors").exists()
    said = fedloom("rm", run)
    refused(said, "certificates/mine.json", "states/mine.safetensors", "retrained/notes.txt")
