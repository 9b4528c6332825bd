"""States by the sha256 of their bytes: whole or not there, never written twice, verified when read."""

import hashlib
import re
from pathlib import Path

import pytest
import torch

from fedloom.clients.storage.states import write_state
from fedloom.fusion.state import digest
from fedloom.server.ledger.blobs import Blobs, LedgerError

STATE = {"w": torch.arange(6).reshape(2, 3), "b": torch.tensor([float("nan"), -0.0, 1e-40])}


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


def test_a_state_comes_back_bit_for_bit_from_a_file_named_by_its_sha256(blobs: Blobs):
    name = blobs.put(STATE)
    assert digest(blobs.get(name)) == digest(STATE)
    assert blobs.names() == {name}
    assert hashlib.sha256((blobs.folder / f"{name}.safetensors").read_bytes()).hexdigest() == name


def test_the_order_of_the_tensors_and_their_strides_do_not_matter(blobs: Blobs):
    turned = {"b": STATE["b"], "w": STATE["w"].t().contiguous().t()}
    assert blobs.put(STATE) == blobs.put(turned)
    assert len(blobs.names()) == 1


def test_a_blob_that_exists_is_not_written_again(blobs: Blobs):
    path = blobs.path(blobs.put(STATE))
    before = path.stat()
    blobs.put(STATE)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


@pytest.mark.parametrize("there", [True, False])
def test_a_file_of_somebody_else_is_moved_in(blobs: Blobs, tmp_path: Path, there):
    if there:
        blobs.put(STATE)
    path = tmp_path / "site.safetensors"
    write_state(path, dict(sorted(STATE.items())))
    assert blobs.adopt(path) == blobs.put(STATE)
    assert not path.exists()
    assert len(blobs.names()) == 1


def test_a_blob_may_adopt_itself(blobs: Blobs):
    name = blobs.put(STATE)
    assert blobs.adopt(blobs.path(name)) == name
    assert blobs.names() == {name}


def test_a_missing_blob_and_a_missing_file_are_named(blobs: Blobs, tmp_path: Path):
    with pytest.raises(LedgerError, match=rf"{'0' * 64}\.safetensors: this blob is missing"):
        blobs.get("0" * 64)
    with pytest.raises(LedgerError, match=r"none\.safetensors: No such file"):
        blobs.adopt(tmp_path / "none.safetensors")


def test_blobs_to_be_flushed_must_be_there(blobs: Blobs):
    blobs.flush([])
    name = blobs.put(STATE)
    blobs.flush([name])
    with pytest.raises(LedgerError, match=rf"{'0' * 64}\.safetensors: this blob is missing; write it"):
        blobs.flush([name, "0" * 64])


def test_a_damaged_blob_is_named_wherever_the_damage_is(blobs: Blobs):
    name = blobs.put(STATE)
    path = blobs.path(name)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(LedgerError, match=rf"{re.escape(str(path))}: is damaged"):
            blobs.get(name)
    path.write_bytes(whole)
    assert digest(blobs.get(name)) == digest(STATE)


def test_an_adopted_file_that_is_not_a_state_is_named_when_read(blobs: Blobs, tmp_path: Path):
    (tmp_path / "junk").write_bytes(b"junk")
    with pytest.raises(LedgerError, match="is not a readable safetensors file"):
        blobs.get(blobs.adopt(tmp_path / "junk"))


def test_temporaries_are_not_blobs_and_are_swept_and_nothing_else_is(blobs: Blobs):
    name = blobs.put(STATE)
    for left in (f".{name}.safetensors-abc", ".tmp-1-2", "notes.txt"):
        (blobs.folder / left).write_bytes(b"half")
    assert blobs.names() == {name}
    assert blobs.sweep() == sorted([f".{name}.safetensors-abc", ".tmp-1-2"])
    assert blobs.strangers() == {"notes.txt"}


def test_removing_is_repeatable_and_an_absent_folder_is_empty(blobs: Blobs):
    assert blobs.names() == set()
    assert blobs.sweep() == []
    name = blobs.put(STATE)
    blobs.remove(name)
    blobs.remove(name)
    assert blobs.names() == set()


def test_a_folder_that_cannot_be_made_is_reported_in_one_line(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match=r"file.*: (Not a directory|File exists)") as raised:
        Blobs(tmp_path / "file" / "blobs").put(STATE)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("left", [b"", b"torn"])
def test_a_file_that_a_loss_of_power_tore_before_it_was_flushed_is_written_again(tmp_path: Path, left: bytes):
    blobs, state = Blobs(tmp_path / "blobs"), {"w": torch.arange(4.0)}
    digest = blobs.put(state)
    blobs.path(digest).write_bytes(left)
    assert blobs.put(state) == digest
    assert torch.equal(blobs.get(digest)["w"], state["w"])
