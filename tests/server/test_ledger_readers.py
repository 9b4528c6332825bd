"""Readers beside a server that commits: what they read is of one and the same state."""

from collections.abc import Callable
from pathlib import Path

import pytest

from fedloom.conf.errors import UserError
from fedloom.fusion.state import State, digest
from fedloom.server.ledger import Ledger, LedgerError
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


def test_a_blob_that_is_lost_is_told_at_once(tmp_path: Path):
    plain, tries = Plain(), []
    with new(tmp_path) as server, Ledger.open(tmp_path, server=False) as reader:
        plain.commit(server, SITES)
        server.blobs.remove_all(server.blobs.names())
        with pytest.raises(LedgerError, match="this blob is missing"):
            reading(reader, tries.append)
    assert tries == [0]


def test_a_server_that_commits_during_every_try_is_told(tmp_path: Path):
    plain = Plain()
    with new(tmp_path) as server, Ledger.open(tmp_path, server=False) as reader:
        plain.commit(server, SITES)
        with pytest.raises(UserError, match="commits round after round"):
            reading(reader, lambda tried: plain.commit(server, SITES))
