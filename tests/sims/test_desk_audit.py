"""The desk without a writable audit record: it says so, and does nothing that it cannot record."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import portalocker
import pytest

from fedloom.sims.desk.audit import Audit, RecordError
from fedloom.sims.desk.tokens import Tokens
from tests.sims.commands import ONE, Command, refused
from tests.sims.desks import API, Folder, browser, csrf_of, folder_with, log_in

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture
def folder(finished_run: Path, tmp_path: Path) -> Folder:
    return folder_with(finished_run, tmp_path / "runs")


def break_record(folder: Folder) -> None:
    """Make the record a folder, which no one can write, root included."""
    path = folder.root / ".desk" / "audit.jsonl"
    path.unlink(missing_ok=True)
    path.mkdir()


@pytest.mark.parametrize("role", ["", "viewer"])
def test_the_desk_does_nothing_that_it_cannot_record(folder: Folder, role: str):
    client = browser(folder, role)
    break_record(folder)
    if role:
        said = client.post("/logout", data={"csrf": csrf_of(client, "/")})
        assert client.get("/", follow_redirects=False).status_code == 200
    else:
        said = log_in(client, folder.secrets["operator"])
        assert client.get("/", follow_redirects=False).status_code == 303
    assert said.status_code == 503 and "audit.jsonl: cannot be written (Is a directory), so nothing was done." in said.text
    assert str(folder.root) not in said.text


def test_programs_hear_that_the_record_cannot_be_written(folder: Folder, fedloom: Command):
    assert fedloom("unlearn", folder.run, ONE, "--request-id", "r1").code == 0
    break_record(folder)
    client, bearer = browser(folder), folder.bearer("operator")
    asked = {
        "wrong": client.get(f"{API}/runs", headers={"Authorization": "Bearer x"}),
        "role": client.post(f"{API}/runs/digits/requests", headers=folder.bearer("viewer"), json={"sites": [ONE]}),
        "file": client.get(f"{API}/runs/digits/certificates/r1", headers=bearer),
        "proof": client.get(f"{API}/runs/digits/certificates/r1/proof", headers=bearer),
    }
    for said in asked.values():
        assert said.status_code == 503 and "cannot be written" in said.json()["error"]
    assert client.get(f"{API}/runs", headers=bearer).status_code == 200


def test_tokens_are_not_made_and_revoked_without_a_record(folder: Folder, fedloom: Command):
    break_record(folder)
    before = (folder.root / ".desk" / "tokens.json").read_bytes()
    said = fedloom("serve", folder.root, "token", "--role", "viewer", "--name", "new")
    refused(said, "audit.jsonl: cannot be written (Is a directory), so nothing was done")
    refused(fedloom("serve", folder.root, "revoke", "viewer"), "audit.jsonl: cannot be written")
    assert (folder.root / ".desk" / "tokens.json").read_bytes() == before
    assert Tokens(folder.root).find(folder.secrets["viewer"])


@contextmanager
def full_at(size: int) -> Iterator[None]:
    """A disk on which no file can grow beyond a size."""
    before, heard = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, heard)


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path):
    audit = Audit(tmp_path)
    audit.note("logged in", "ada")
    whole = audit.path.read_bytes()
    with full_at(len(whole) + 40), pytest.raises(RecordError, match="cannot be written"):
        audit.note("logged in", "bob")
    assert audit.path.read_bytes() == whole
    audit.note("logged in", "eve")
    assert audit.problem() == "" and [event.body["by"] for event in audit.newest(9)] == ["eve", "ada"]


def test_a_record_that_another_process_holds_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def held(*_: object, **__: object) -> None:
        raise portalocker.LockException("held")

    monkeypatch.setattr(portalocker, "Lock", held)
    with pytest.raises(RecordError, match="another process holds its lock"):
        Audit(tmp_path).note("logged in", "ada")
