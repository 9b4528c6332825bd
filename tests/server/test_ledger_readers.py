"""Readers beside a server that commits: what they read is of one and the same state."""

import contextlib
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedloom.conf.errors import UserError
from fedloom.fusion.state import State, digest
from fedloom.server.ledger import Ledger, LedgerError, audit
from fedloom.server.ledger.database import LEDGER, Database
from tests.server.ledgers import SITES, Plain, new


def reading(reader: Ledger, meanwhile: Callable[[int], object]) -> State:
    """The sum by its row; `meanwhile` is what happens between row and blob in each try."""
    tries = iter(range(100))

    def read() -> State:
        last = reader.last_round()
        assert last is not None
        meanwhile(next(tries))
        return reader.blobs.get(last.states["sum"])

    return reader.steady(read)


def test_a_blob_that_a_server_has_just_replaced_is_read_by_the_newer_row(tmp_path: Path):
    plain = Plain()
    with new(tmp_path) as server, Ledger.open(tmp_path, server=False) as reader:
        plain.commit(server, SITES)
        found = reading(reader, lambda tried: plain.commit(server, SITES) if tried == 0 else None)
        assert digest(found) == digest(plain.total())


def test_a_blob_that_is_lost_is_reported_at_once(tmp_path: Path):
    plain, tries = Plain(), []
    with new(tmp_path) as server, Ledger.open(tmp_path, server=False) as reader:
        plain.commit(server, SITES)
        server.blobs.remove_all(server.blobs.names())
        with pytest.raises(LedgerError, match="this blob is missing"):
            reading(reader, tries.append)
    assert tries == [0]


def test_a_server_that_commits_during_every_try_is_reported(tmp_path: Path):
    plain = Plain()
    with new(tmp_path) as server, Ledger.open(tmp_path, server=False) as reader:
        plain.commit(server, SITES)
        with pytest.raises(UserError, match="commits round after round"):
            reading(reader, lambda tried: plain.commit(server, SITES))


@pytest.mark.parametrize("fault", [None, sqlite3.DatabaseError("database disk image is malformed")])
def test_a_closed_ledger_is_read_again_if_a_process_has_written_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Exception | None
):
    with new(tmp_path) as server:
        Plain().commit(server, SITES)
    rows, late = Database._rows, [True]

    def read(self: Database, sql: str, values: tuple[object, ...]) -> list[tuple]:
        found = rows(self, sql, values)
        if late and late.pop():  # another process writes after this one has read, and before it looks at the file again
            with Ledger.open(tmp_path, server=False) as other:
                monkeypatch.setattr(Database, "_rows", rows)
                other.receive("r1", "unlearn", [SITES[0]], "", {})
                monkeypatch.setattr(Database, "_rows", read)
            if fault is not None:
                raise fault
        return found

    with Ledger.open(tmp_path, server=False) as reader:
        monkeypatch.setattr(Database, "_rows", read)
        assert [request.id for request in reader.requests()] == ["r1"]


@pytest.mark.parametrize("opened", [False, True])
def test_a_page_that_is_half_written_is_read_again_although_the_files_time_stays(tmp_path: Path, opened: bool):
    """File systems give two writes of a few milliseconds the same time."""
    with new(tmp_path) as server:
        Plain().commit(server, SITES)
    path = tmp_path / LEDGER
    whole = path.read_bytes()
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(Ledger.open(tmp_path, server=False)) if opened else None
        path.write_bytes(whole[:100] + b"\xff" * 300 + whole[400:])
        stamp = path.stat().st_mtime_ns

        def finish() -> None:
            path.write_bytes(whole)
            os.utime(path, ns=(stamp, stamp))

        timer = threading.Timer(0.03, finish)
        timer.start()
        reader = reader or stack.enter_context(Ledger.open(tmp_path, server=False))
        assert sorted(reader.sites()) == sorted(SITES)
        timer.join()


def test_a_closed_ledger_that_is_damaged_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with new(tmp_path) as server:
        Plain().commit(server, SITES)

    def damaged(self: Database, sql: str, values: tuple[object, ...]) -> list[tuple]:
        raise sqlite3.DatabaseError("database disk image is malformed")

    with Ledger.open(tmp_path, server=False) as reader:
        monkeypatch.setattr(Database, "_rows", damaged)
        with pytest.raises(LedgerError, match="malformed"):
            reader.requests()


def test_a_check_of_a_closed_ledger_is_repeated_if_a_process_writes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with new(tmp_path) as server:
        Plain().commit(server, SITES)
    tables, tried = audit._tables, []

    def torn(folder: Path, refers: list) -> Iterator[audit.Problem]:
        tried.append(folder)
        if len(tried) == 1:
            with Ledger.open(tmp_path, server=False) as other:
                other.receive("r1", "unlearn", [SITES[0]], "", {})
            yield audit.Problem("ledger.sqlite", "database disk image is malformed")
        else:
            yield from tables(folder, refers)

    monkeypatch.setattr(audit, "_tables", torn)
    assert audit.check(tmp_path) == [] and len(tried) == 2
