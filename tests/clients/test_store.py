"""A site's store: what is saved is read back, a round can be repeated, no fault leaves half a file."""

import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load

from fedloom.clients.protocol.failures import LostStateError
from fedloom.clients.storage.sent import Sent
from fedloom.clients.storage.states import _layout, read_metadata, read_state, safetensors_of, state_in, write_state
from fedloom.clients.storage.store import SiteStore
from fedloom.conf import UserError
from fedloom.fusion.state import digest


def state(number: float, entries: int = 5) -> dict[str, torch.Tensor]:
    return {"extractor.weight": torch.full((entries, 3), number), "extractor.count": torch.tensor(7)}


@pytest.fixture
def store(tmp_path: Path) -> SiteStore:
    return SiteStore(tmp_path, "run", "site-0000")


def test_what_is_saved_is_loaded_bit_for_bit(store: SiteStore):
    saved = {
        "float": torch.tensor([0.1, -0.0, float("inf"), 1e-45]),
        "integer": torch.tensor([[2**62, -(2**63)]]),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "transposed": torch.arange(6.0).view(2, 3).T,
    }
    store.save(1, 0, saved)
    assert digest(store.load(1)) == digest(saved)


KINDS = [torch.float32, torch.int64, torch.float64, torch.float16, torch.bool]


@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.lists(st.integers(0, 3), max_size=3)), min_size=1, max_size=4), st.data()
)
def test_a_file_is_read_as_safetensors_reads_it(tensors: list[tuple[torch.dtype, list[int]]], data: st.DataObject):
    state = {f"{number}": torch.randint(-9, 9, shape).to(kind) for number, (kind, shape) in enumerate(tensors)}
    content = safetensors_of(state)
    assert digest(state_in(content)) == digest(load(content)) == digest(state)
    cut = content[: data.draw(st.integers(0, len(content) - 1))]
    with pytest.raises(SafetensorError):
        state_in(cut)


def test_a_damaged_file_with_an_endless_header_is_not_remembered():
    content = safetensors_of(state(1.0, 500))
    before = _layout.cache_info()
    for length in (2**63, 2**62, 2**21):
        with pytest.raises(SafetensorError):
            state_in(length.to_bytes(8, "little") + content[8:].ljust(2**22))
    assert _layout.cache_info() == before


def test_a_round_can_be_repeated_from_the_same_base(store: SiteStore):
    store.save(1, 0, state(1.0))
    store.save(2, 1, state(2.0))
    assert digest(store.load(1)) == digest(state(1.0))
    store.save(2, 1, state(2.5))
    assert digest(store.load(1)) == digest(state(1.0))
    assert digest(store.load(2)) == digest(state(2.5))
    assert store.rounds() == [1, 2]


def test_a_changed_byte_is_a_lost_state(store: SiteStore):
    sent = Sent(store)
    store.save(1, 0, state(1.0))
    sent.save(1, 0, {"weight": torch.arange(9)})
    reads = {"round": store.load, "summed": sent.summed}
    for name, read in reads.items():
        (file,) = store.folder.glob(f"{name}-*.safetensors")
        content = file.read_bytes()
        for place in (0, 20, len(content) - 3):
            file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
            with pytest.raises(LostStateError, match="round 1 is lost"):
                read(1)
        file.write_bytes(content)
        read(1)


def test_a_state_without_a_digest_is_read(store: SiteStore):
    write_state(store.folder / "round-000001.safetensors", state(1.0))  # as an earlier version did
    assert digest(store.load(1)) == digest(state(1.0))


def test_old_and_abandoned_rounds_go_and_the_base_stays(store: SiteStore):
    for round, base, kept in [(1, 0, [1]), (2, 1, [1, 2]), (3, 1, [1, 3]), (4, 3, [3, 4]), (9, 4, [4, 9])]:
        store.save(round, base, state(round))
        assert store.rounds() == kept
    assert digest(store.load(4)) == digest(state(4))


def test_a_lost_state_is_reported_with_the_rounds_that_exist(store: SiteStore):
    with pytest.raises(UserError, match=r"site-0000: its own state after round 3 is lost .*has rounds: none\)"):
        store.load(3)
    store.save(4, 0, state(1.0))
    store.save(5, 4, state(1.0))
    with pytest.raises(UserError, match=r"after round 3 .*has rounds: 4, 5\)"):
        store.load(3)


def test_sites_and_runs_do_not_see_each_other(tmp_path: Path):
    for run in ("a", "b"):
        for site in ("x", "y"):
            SiteStore(tmp_path, run, site).save(1, 0, {"w": torch.tensor([ord(run), ord(site)])})
    assert SiteStore(tmp_path, "a", "y").load(1)["w"].tolist() == [ord("a"), ord("y")]


def test_files_of_others_in_the_folder_are_left_alone(store: SiteStore):
    store.save(1, 0, state(1.0))
    note = store.folder / "round-1.safetensors.bak"
    note.write_text("mine")
    store.save(2, 0, state(2.0))
    assert note.read_text() == "mine"
    assert store.rounds() == [2]


def test_a_save_that_fails_half_way_leaves_the_old_file_and_no_other(store: SiteStore):
    store.save(1, 0, state(1.0))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as a full disk would: the write stops after 4 KiB
    try:
        with pytest.raises(OSError):
            store.save(1, 0, state(2.0, entries=10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert digest(store.load(1)) == digest(state(1.0))
    assert [path.name for path in store.folder.iterdir()] == ["round-000001.safetensors"]


@pytest.mark.parametrize("damage", [lambda b: b[:-1], lambda b: b[:4], lambda b: b"", lambda b: b"\xff" * len(b)])
def test_a_damaged_file_is_reported_by_its_path(store: SiteStore, damage):
    store.save(1, 0, state(1.0))
    path = store.folder / "round-000001.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"round-000001\.safetensors: is not a readable safetensors file"):
        store.load(1)


def test_a_missing_file_is_reported_by_its_path(tmp_path: Path):
    with pytest.raises(UserError, match=r"nothing\.safetensors: the file does not exist"):
        read_state(tmp_path / "nothing.safetensors")


def test_metadata_travels_with_a_state(tmp_path: Path):
    write_state(tmp_path / "deep" / "a.safetensors", state(1.0), site="site-0000", round="3")
    assert read_metadata(tmp_path / "deep" / "a.safetensors") == {"format": "pt", "site": "site-0000", "round": "3"}


def test_a_late_save_of_an_older_round_leaves_newer_ones(store: SiteStore):
    store.save(1, 0, state(1))
    store.save(3, 1, state(3))
    store.save(2, 1, state(2))
    assert store.rounds() == [1, 2, 3]
