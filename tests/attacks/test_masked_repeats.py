"""A server repeats a training in disguise: the same images, but another network or recipe whose effect it can compute."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch

from fedloom.clients.privacy.draws import MOST, WHOLE, Draws, repeated
from fedloom.clients.privacy.memory import FILE
from fedloom.fusion.state import State
from tests.attacks.hostile import MASKS, Refused, Server, name_of, summed

ALL = list(range(10))
WHOLES = (*MASKS, "training.batch=1000")


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path, masks="required")


def permuted(state: State) -> State:
    """The same function, with its hidden units in another order."""
    order = torch.tensor([2, 0, 3, 1])
    hidden = {name: state[name][order].contiguous() for name in ("extractor.1.weight", "extractor.1.bias")}
    return {**state, **hidden, "head.weight": state["head.weight"][:, order].contiguous()}


@pytest.mark.parametrize("words", [MASKS, (*MASKS, "training.steps=4"), WHOLES])
def test_a_network_with_permuted_units_is_not_trained_for_another_sum(
    server: Server, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.change(*words)
    summed(server, ALL, rounds=9)
    sent = permuted(server.mean)
    monkeypatch.setattr(Server, "mean", property(lambda _: sent))
    with pytest.raises(Refused, match="summed_before"):
        summed(server, ALL, ALL[:9], run="other", rounds=9)


@pytest.mark.parametrize("word", ["training.weight_decay=0.5", "training.rate=0.3", "training.batch=16", "data.size=4"])
def test_another_recipe_for_the_same_images_is_not_trained_for_another_sum(server: Server, word: str) -> None:
    summed(server, ALL, rounds=9)
    server.change(*MASKS, word)
    with pytest.raises(Refused, match="summed_before"):
        summed(server, ALL, ALL[:9], run="other", rounds=9)


@pytest.mark.parametrize("words", [MASKS, WHOLES])
def test_a_later_run_over_the_same_sites_is_summed(server: Server, words: tuple[str, ...]) -> None:
    server.change(*words)
    summed(server, ALL, rounds=9)
    server.change(*words, "seed=5", "training.rate=0.3")
    summed(server, ALL, run="other", rounds=9)


def test_other_images_are_summed_over_fewer_sites(server: Server) -> None:
    summed(server, ALL, rounds=9)
    server.change(*MASKS, "seed=5")
    summed(server, ALL, ALL[:9], run="other", rounds=9)


def test_a_memory_of_an_earlier_version_is_read_and_continued(server: Server) -> None:
    summed(server, ALL, rounds=9)
    file = server.folder / "stores" / name_of(0) / FILE
    with closing(sqlite3.connect(file)) as db, db:
        db.execute("alter table sums drop column draws")
    server.change(*MASKS, "seed=5")
    summed(server, ALL, ALL[:9], run="other", rounds=9)
    with closing(sqlite3.connect(file)) as db:
        old, new = (row[0] for row in db.execute("select draws from sums order by rowid"))
    assert old is None and new.split()[1:]


def noted(images: int, batch: int, seed: int, steps: int = 10) -> list[str]:
    draws, generator = Draws(), torch.Generator().manual_seed(seed)
    for _ in range(steps):
        draws.note(torch.randperm(images, generator=generator)[:batch], images)
    return draws.digests()


def test_draws_are_compared_by_their_images() -> None:
    one = noted(100, 8, seed=1)
    assert repeated(one, noted(100, 8, seed=1), whole=True)
    assert repeated(one, noted(100, 8, seed=1, steps=3), whole=True)
    assert not repeated(one, noted(100, 8, seed=2), whole=True)
    assert not repeated(one, [], whole=True) and Draws().digests() == []
    assert len(noted(100, 8, seed=1, steps=3 * MOST)) == MOST + 1
    everything = noted(8, 8, seed=1), noted(8, 8, seed=2)
    assert set(everything[0][1:]) == {WHOLE}
    assert repeated(*everything, whole=True) and not repeated(*everything, whole=False)
    single = noted(1, 1, seed=1), noted(1, 1, seed=2)  # one image: the order is the same, too
    assert repeated(*single, whole=True) and not repeated(*single, whole=False)
    assert WHOLE not in noted(100, 1, seed=1, steps=MOST)  # a batch of the first image alone is not the whole
