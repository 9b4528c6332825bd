"""The ledger when processes are killed, meet each other, or cannot write: the last commit is always there, whole."""

import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from fedloom.server.ledger import Ledger, LedgerError
from fedloom.server.ledger.audit import check
from tests.server.kills import CHILDREN
from tests.server.ledgers import SITES, Plain, closed, contents, new, problems

NOBODY = 65534


@contextmanager
def child(work: Callable, *arguments) -> Iterator[tuple[BaseProcess, Connection]]:
    """A process of its own that does some work, and what it says."""
    mine, its = CHILDREN.Pipe(duplex=False)
    process = CHILDREN.Process(target=work, args=(its, *arguments))
    process.start()
    its.close()
    try:
        yield process, mine
    finally:
        process.kill()
        process.join()


def asked(round: int) -> list[str]:
    return random.Random(round).sample(SITES, len(SITES) if round == 0 else 2)


def after(round: int) -> Plain:
    """What must be there after a round of `asked`."""
    last = {site: max(number for number in range(round + 1) if site in asked(number)) for site in SITES}
    return Plain("latest", round, {site: [number] for site, number in last.items()})


def commit_for_ever(says: Connection, folder: Path, limit: int | None = None) -> None:
    """Commit round after round, now and then closing the ledger and opening it again, until killed or refused."""
    try:
        while True:
            with Ledger.open(folder) as ledger:
                if limit is not None:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
                for _ in range(7):
                    last = ledger.last_round()
                    plain = after(last.round) if last else Plain()
                    plain.commit(ledger, asked(plain.round + 1))
                    says.send(plain.round)
    except LedgerError as error:
        says.send(str(error))


def hold(says: Connection, folder: Path) -> None:
    with Ledger.open(folder):
        says.send("open")
        time.sleep(60)


def ask(says: Connection, folder: Path) -> None:
    with Ledger.open(folder, server=False) as reader:
        says.send((reader.receive("r1", "forget", ["b"], "asked", {}), reader.last_round()))


def heard(says: Connection) -> list:
    """All that a child said before it ended."""
    said = []
    try:
        while True:
            said.append(says.recv())
    except EOFError:
        return said


def test_a_server_killed_at_any_moment_leaves_its_last_commit(tmp_path: Path):
    new(tmp_path).close()
    moments, announced = random.Random(0), []
    for _ in range(6):
        with child(commit_for_ever, tmp_path) as (process, says):
            announced.append(says.recv())
            time.sleep(moments.uniform(0, 0.3))
            os.kill(process.pid or 0, signal.SIGKILL)
            process.join()
            announced += heard(says)
        assert problems(tmp_path) == []
        with Ledger.open(tmp_path, server=False) as reader:
            last = reader.last_round()
            assert last is not None
            assert announced[-1] <= last.round <= announced[-1] + 1
            after(last.round).agrees(reader)
    assert announced[-1] >= 5
    with Ledger.open(tmp_path) as ledger:
        ledger.prune()
        assert ledger.last_round() is not None
    assert check(tmp_path) == []


def test_a_second_server_is_refused_and_a_reader_is_not(tmp_path: Path):
    plain = closed(tmp_path)
    with child(hold, tmp_path) as (process, says):
        assert says.recv() == "open"
        with pytest.raises(LedgerError, match=f"process {process.pid} is working on it; wait until it ends"):
            Ledger.open(tmp_path)
        with Ledger.open(tmp_path, server=False) as reader:
            plain.agrees(reader)
            reader.receive("r1", "forget", ["a"], "", {})
        assert problems(tmp_path) == []
        os.kill(process.pid or 0, signal.SIGKILL)
        process.join()
    with Ledger.open(tmp_path) as ledger:  # the lock died with it
        assert [request.id for request in ledger.waiting()] == ["r1"]


def test_another_process_queues_a_request_while_a_server_is_open(tmp_path: Path):
    plain = closed(tmp_path)
    with Ledger.open(tmp_path) as ledger:
        plain.commit(ledger, ["a"])
        with child(ask, tmp_path) as (_, says):
            request, last = says.recv()
        assert ledger.waiting() == [request]
        assert last == ledger.last_round()
        plain.commit(ledger, ["b"])
        plain.forget(ledger, ["b"], "r1")
        assert ledger.waiting() == []
    assert problems(tmp_path) == []
    assert (tmp_path / "ledger.sha256").exists()


@pytest.mark.parametrize("limit", [100_000, 33_000])
def test_a_full_disk_is_reported_in_one_line_and_the_last_commit_stays(tmp_path: Path, limit):
    new(tmp_path).close()
    with child(commit_for_ever, tmp_path, limit) as (_, says):
        *rounds, message = heard(says)
    assert "free space and run again" in message
    assert str(tmp_path) in message
    assert "\n" not in message
    assert problems(tmp_path) == []
    with Ledger.open(tmp_path) as ledger:
        plain = after(rounds[-1]) if rounds else Plain()
        plain.agrees(ledger)
        plain.commit(ledger, asked(plain.round + 1))
        ledger.prune()
        plain.agrees(ledger)
    assert check(tmp_path) == []


def put_much(says: Connection, folder: Path) -> None:
    with Ledger.open(folder) as ledger:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
        try:
            ledger.blobs.put({"w": torch.zeros(100_000)})
        except LedgerError as error:
            says.send(str(error))


def test_a_blob_that_does_not_fit_on_the_disk_leaves_nothing(tmp_path: Path):
    closed(tmp_path)
    before = contents(tmp_path)
    with child(put_much, tmp_path) as (_, says):
        (message,) = heard(says)
    assert "File too large; free space and run again" in message
    assert contents(tmp_path) == before


@pytest.fixture
def guarded() -> Iterator[Path]:
    """A folder that this process, whoever runs it, can be kept from writing."""
    folder = Path(tempfile.mkdtemp(prefix="fedloom-"))
    folder.chmod(0o755)
    yield folder
    folder.chmod(0o755)
    shutil.rmtree(folder)


@contextmanager
def reading_only(folder: Path) -> Iterator[None]:
    """The folder cannot be written; root becomes nobody for that, whom permissions bind."""
    root = os.geteuid() == 0
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)


@pytest.mark.parametrize("left", ["closed", "killed"])
def test_a_folder_that_cannot_be_written_can_be_read_and_checked(guarded: Path, left):
    plain = closed(guarded)
    if left == "killed":
        with child(hold, guarded) as (_, says):
            says.recv()
    before = contents(guarded)
    with reading_only(guarded):
        with pytest.raises(LedgerError, match=r"ledger\.lock: Permission denied; check its permissions"):
            Ledger.open(guarded)
        with pytest.raises(LedgerError, match=r"Permission denied|permissions"):
            Ledger.create(guarded / "new", "digits", "", 32, SITES)
        with Ledger.open(guarded, server=False) as reader:
            plain.agrees(reader)
            with pytest.raises(LedgerError, match=r"ledger\.sqlite: .*check the permissions"):
                reader.receive("r1", "forget", ["a"], "", {})
        assert check(guarded) == []
    assert contents(guarded) == before
