"""Reading a ledger's file leaves SQLite its locks, and nothing open in the end."""

import os
import subprocess
import sys
from pathlib import Path

from fedloom.server.ledger import Ledger
from fedloom.server.ledger.blobs import file_digest
from fedloom.server.ledger.connection import Connection
from fedloom.server.ledger.database import LEDGER, SEAL
from tests.server.ledgers import SITES, Plain, closed, new, problems

SHARED = 0x40000002, 510  # the bytes on which SQLite's readers have their lock
TAKE = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB, {1}, {0})".format(*SHARED)


def locked(path: Path) -> bool:
    """Whether this process has SQLite's lock on a file, as another process sees it."""
    done = subprocess.run([sys.executable, "-c", TAKE, str(path)], capture_output=True, text=True)
    assert not done.returncode or "BlockingIOError" in done.stderr
    return bool(done.returncode)


def descriptors(path: Path) -> int:
    """How many descriptors of a file this process has."""
    links = (os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd"))
    return sum(os.path.samefile(link, path) for link in links if os.path.exists(link))


def test_a_server_that_is_sealed_still_has_its_locks(tmp_path: Path):
    file = tmp_path / LEDGER
    with new(tmp_path) as ledger:
        ledger._database.seal()
        assert (tmp_path / SEAL).read_text() == f"{file_digest(file)}  {LEDGER}\n"
    with Ledger.open(tmp_path) as ledger:
        ledger._database.seal()
        assert locked(file)
    assert not locked(file)
    assert not descriptors(file)


def test_what_one_connection_reads_costs_no_other_its_locks(tmp_path: Path):
    file, plain = tmp_path / LEDGER, Plain()
    with new(tmp_path) as ledger:
        plain.commit(ledger, SITES)
        reader = Connection(file, "mode=ro")
        assert len(reader.file_digest()) == 64
        reader.close()
        reader.close()
        assert locked(file)
        plain.commit(ledger, SITES)
    assert not descriptors(file)
    assert problems(tmp_path) == []


def test_a_reader_that_queues_a_request_and_ends_leaves_a_server_its_locks(tmp_path: Path):
    closed(tmp_path)
    reader = Ledger.open(tmp_path, server=False)
    reader.receive("r1", "unlearn", ["a"], "", {})  # sealed again, without a server
    with Ledger.open(tmp_path):
        reader.close()
        assert locked(tmp_path / LEDGER)
    assert not descriptors(tmp_path / LEDGER)
