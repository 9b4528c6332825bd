"""Servers that lie about masked sums, against the real code of sites: none comes to what one site gave."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.clients.protocol.messages import BEFORE, ERASE, IDLE, OWN, SECURE_CONFIRM, SECURE_UNMASK, SITE, SUBSET, TRAIN
from fedloom.clients.protocol.partial_sums import ONCE
from tests.attacks.hostile import MASKS, SITES, WORDS, Masks, Refused, Server, name_of, summed

FOUR, THREE = [0, 1, 2, 3], [0, 1, 2]


@pytest.fixture
def server(tmp_path: Path) -> Server:
    """Ten sites that want masks; sums over three are allowed, so that these tests are small."""
    return Server(tmp_path, masks="required", min_members=3)


def test_an_honest_sum_is_that_of_what_the_sites_gave(server: Server) -> None:
    assert torch.equal(summed(server, FOUR), sum(server.gave(site) for site in FOUR))  # type: ignore[arg-type]


def again(server: Server) -> None:
    summed(server, FOUR, THREE)


def another_run(server: Server) -> None:
    summed(server, FOUR, THREE, run="other")


def with_an_empty_lift(server: Server) -> None:
    summed(server, FOUR, THREE, lift={})


def with_a_lift_of_no_rounds(server: Server) -> None:
    summed(server, FOUR, THREE, lift={name_of(3): torch.zeros(0, dtype=torch.int64)})


def with_a_lift(server: Server) -> None:
    summed(server, FOUR, THREE, lift={name_of(3): torch.tensor([1])})


def a_round_between(server: Server) -> None:
    summed(server, FOUR, round=2, rounds=2)
    summed(server, FOUR, THREE)


def a_later_round_that_starts_from_nothing(server: Server) -> None:
    server.change(*MASKS, "training.batch=1000", "training.schedule=constant")  # no order of images, no rate that falls
    summed(server, FOUR, run="full")
    summed(server, FOUR, THREE, run="full", round=2, rounds=2)


def erased_between(server: Server) -> None:
    for site in THREE:
        server.ask(site, ERASE)
    summed(server, FOUR, THREE)


def another_key_that_changes_nothing(server: Server) -> None:
    server.change(*MASKS, "evaluation.every=3", "run.name=x")
    summed(server, FOUR, THREE, run="x")


def a_rate_that_is_hardly_another(server: Server) -> None:
    server.change(*MASKS, "training.rate=0.0300001")
    summed(server, FOUR, THREE, run="x")


def twice_the_rate(server: Server) -> None:
    server.change(*MASKS, "training.steps=1", "training.rate=0.001")
    summed(server, FOUR, run="x")
    server.change(*MASKS, "training.steps=1", "training.rate=0.002")
    summed(server, FOUR, THREE, run="y")


MEAN = Server.__dict__["mean"]


@pytest.mark.parametrize(
    "attack",
    [again, another_run, with_an_empty_lift, with_a_lift_of_no_rounds, with_a_lift, a_round_between,
     a_later_round_that_starts_from_nothing, erased_between, another_key_that_changes_nothing,
     a_rate_that_is_hardly_another, twice_the_rate],
)  # fmt: skip
def test_what_was_summed_is_not_summed_over_other_sites(server: Server, attack: Callable[[Server], None]) -> None:
    summed(server, FOUR)
    with pytest.raises(Refused, match=r"summed_before|UserError"):
        attack(server)


def test_the_same_sites_may_be_summed_again_and_others_with_other_training(server: Server) -> None:
    server.change(*MASKS, "training.rate=0.1", "training.batch=16")
    first = summed(server, FOUR)
    assert torch.equal(summed(server, FOUR), first) and torch.equal(summed(server, FOUR, run="other"), first)
    summed(server, FOUR, THREE, round=2, rounds=2, again=1)


def test_sites_that_are_sent_different_lists_take_no_masks_off(tmp_path: Path) -> None:
    server = Server(tmp_path, masks="required")
    masks, drop = Masks(server, range(SITES)).begin().train(), [0, 1, 2, 3]
    lists = {site: [one for one in range(SITES) if one == site or one not in _gone(site, drop)] for site in range(SITES)}
    masks.confirm(lists)
    with pytest.raises(Refused, match="UserError; the site's own log says more"):
        masks.unmask()
    with pytest.raises(Refused):
        masks.total(range(4, SITES))


def _gone(site: int, drop: list[int]) -> list[int]:
    """Three of those that are dropped, other ones for each site."""
    return [one for one in drop if one != drop[site % 4]]


def test_a_site_signs_one_list(server: Server) -> None:
    masks = Masks(server, FOUR).begin().train().confirm()
    masks.confirm()
    with pytest.raises(Refused, match=SECURE_CONFIRM):
        masks.confirm(dict.fromkeys(FOUR, THREE))


def test_forged_signatures_and_those_of_another_attempt_count_for_nothing(server: Server) -> None:
    other = Masks(server, FOUR).begin().train().confirm()
    for spoil in (lambda one: torch.zeros_like(one), lambda one: one.flip(0)):
        masks = Masks(server, FOUR).begin().train().confirm()
        masks.signed = {site: spoil(one) for site, one in masks.signed.items()}
        with pytest.raises(Refused, match=SECURE_UNMASK):
            masks.unmask()
    masks.signed = other.signed
    with pytest.raises(Refused, match=SECURE_UNMASK):
        masks.unmask()


@pytest.mark.parametrize("words", [("training.rate=0",), ("rounds=3",), ("training.label_smoothing=0.5",)])
def test_a_sum_is_of_sites_that_trained_by_the_same_order(server: Server, words: tuple[str, ...]) -> None:
    """Otherwise the others could be made to give what the server knows."""
    masks = Masks(server, FOUR, words=dict.fromkeys(THREE, (*MASKS, *words))).begin().train()
    with pytest.raises(Refused, match=SECURE_CONFIRM):
        masks.confirm()
    masks = Masks(server, FOUR).begin().train([3])
    server.change(*MASKS, *words)
    with pytest.raises(Refused, match="train"):  # all steps of an attempt have one configuration
        masks.train(THREE)


def test_a_sum_is_of_sites_that_were_sent_the_same_network(server: Server) -> None:
    masks = Masks(server, FOUR).begin().train([3])
    type(server).mean = property(lambda self: {name: one * 2 for name, one in MEAN.fget(self).items()})  # type: ignore
    try:
        masks.train(THREE)
    finally:
        type(server).mean = MEAN  # type: ignore[method-assign]
    with pytest.raises(Refused, match=SECURE_CONFIRM):
        masks.confirm()


def test_one_site_does_not_train_otherwise_although_the_others_are_enough_without_it(server: Server) -> None:
    """The difference of two sums would be what it gave: with a rate of 0 it gives nothing that is not known."""
    summed(server, FOUR)
    masks = Masks(server, FOUR, words={3: (*MASKS, "training.rate=0")}).begin().train()
    counted = dict.fromkeys(THREE, FOUR)
    with pytest.raises(Refused, match=SECURE_CONFIRM):
        masks.confirm(counted)
    masks.trained[3] = masks.trained[2]
    with pytest.raises(Refused, match=SECURE_CONFIRM):
        masks.confirm(counted)


FULL = (*MASKS, "training.batch=1000", "training.schedule=constant")  # every round trains nearly the same


def test_one_site_does_not_continue_from_another_round_than_before(server: Server) -> None:
    server.change(*FULL)
    for number in (1, 2):
        Masks(server, FOUR, dict.fromkeys(FOUR, number - 1), round=number, rounds=3).begin().train().confirm()
    summed(server, FOUR, bases=dict.fromkeys(FOUR, 2), round=3, rounds=3)
    with pytest.raises(Refused, match="secure_confirm: summed_before"):
        summed(server, FOUR, bases={**dict.fromkeys(FOUR, 2), 3: 0}, round=3, rounds=3)
    masks = Masks(server, FOUR, dict.fromkeys(FOUR, 2), round=3, rounds=3).begin()
    with pytest.raises(Refused, match="train: UserError"):
        masks.train([3], base=0)  # and the others hear of 2


def test_what_a_site_continues_from_is_not_prepared_between_two_sums(server: Server) -> None:
    server.change(*FULL)
    later: dict[str, Any] = {"round": 2, "rounds": 2, "bases": dict.fromkeys(FOUR, 1)}
    Masks(server, FOUR, rounds=2).begin().train()
    with pytest.raises(Refused, match="train"):  # what was sent in a round counts when its sites have agreed on it
        summed(server, FOUR, **later)
    server.run = "another"
    Masks(server, FOUR, rounds=2).begin().train().confirm()
    summed(server, FOUR, **later)
    for erased in (False, True):
        if erased:
            server.ask(3, ERASE)
        masks = Masks(server, FOUR, rounds=2).begin()
        with pytest.raises(Refused, match="train: UserError"):
            masks.train([3])
    server.run = "other"
    Masks(server, FOUR, rounds=2).begin().train().confirm()
    with pytest.raises(Refused, match="summed_before"):
        summed(server, FOUR, **later)


NOT_ALIKE = {
    "another network": "{domain: digits, count: 3, network: {name: mlp, widths: [4, 4]}}",
    "networks in turn": "{domain: digits, count: 3, networks: [{name: mlp, widths: [4]}, {name: mlp, widths: [4, 4]}]}",
    "an inverted one": "{domain: digits, count: 3, invert: true}",
    "other classes": "{domain: digits, count: 3, classes: [0, 1]}",
    "outputs of its own": "{domain: digits, count: 3, label: x}",
    "more images": "{domain: digits, count: 3, samples: 9}",
    "another way to divide": "{domain: digits, count: 3, partition: {name: size, growth: 3}}",
}


@pytest.mark.parametrize("row", NOT_ALIKE.values(), ids=NOT_ALIKE)
def test_a_configuration_does_not_say_other_things_of_single_sites(server: Server, row: str) -> None:
    """The server may know what the others give, such as those of a network that is dead."""
    words = [word for word in MASKS if not word.startswith("sites")]
    server.change(*words, "data.heads=task", f"sites=[{{domain: digits, count: 7}}, {row}]")
    with pytest.raises(Refused, match=r"secure_shares: UserError|secure_keys: RefusedError"):
        summed(server, [0, 1, 2, 8, 9])
    summed(server, FOUR)


@pytest.mark.parametrize("record", [SUBSET + name_of(3), OWN, BEFORE])
def test_no_record_is_for_a_single_site(server: Server, record: str) -> None:
    masks = Masks(server, FOUR).begin()
    with pytest.raises(Refused, match="train: UserError"):
        server.ask(0, TRAIN, {record: server.mean}, secure=masks.id, sums={SITE: ONCE}, slot=SITE)


INDEPENDENT = (*MASKS, "objective={name: sum_aggregation, mode: independent}")


@pytest.mark.parametrize("again", [0, IDLE])
def test_networks_of_the_sites_own_are_not_summed_whole_over_other_sites(server: Server, again: int) -> None:
    """Nothing is trained, so that a sketch of the change would be of nothing."""
    server.change(*INDEPENDENT)
    Masks(server, FOUR, rounds=9).begin().train(slot="").confirm()
    server.change(*INDEPENDENT, "training.rate=0")
    summed(server, FOUR, THREE, bases=dict.fromkeys(FOUR, 1), round=2, rounds=9, again=again, slot="")
    with pytest.raises(Refused, match="secure_confirm"):
        summed(server, FOUR, bases={0: 2, 1: 2, 2: 2, 3: 1}, round=3, rounds=9, again=again, slot="")


def test_a_round_does_not_take_the_last_one_back_over_other_sites(server: Server) -> None:
    """Where nothing is trained, what replaces the last contribution is the last change, reversed."""
    summed(server, FOUR)
    server.change(*MASKS, "training.rate=0")
    with pytest.raises(Refused, match="summed_before"):
        summed(server, FOUR, THREE, bases=dict.fromkeys(FOUR, 1), round=2)


def test_another_configuration_does_not_have_one_site_train_otherwise(server: Server) -> None:
    """Such as by a limit that one site alone is above: the others train the same as before."""
    summed(server, FOUR)
    server.change(*MASKS, "evaluation.every=3")
    with pytest.raises(Refused, match="summed_before"):
        summed(server, FOUR, run="other")


def test_masks_in_common_with_a_site_that_leaves_are_taken_out_once(server: Server) -> None:
    """Otherwise the noise of the others could be averaged away."""
    summed(server, FOUR)
    lift = {name_of(3): torch.tensor([1])}
    for _ in range(2):  # the same round may begin again
        summed(server, FOUR, THREE, bases=dict.fromkeys(FOUR, 1), round=2, rounds=3, again=IDLE, lift=lift)
    with pytest.raises(Refused, match="train"):
        summed(server, FOUR, THREE, bases=dict.fromkeys(THREE, 2), round=3, rounds=3, again=IDLE, lift=lift)


def test_a_server_does_not_choose_with_how_few_a_site_is_summed(tmp_path: Path) -> None:
    server = Server(tmp_path / "a", masks="required")
    for few in ([3, 7], [0, 1, 2, 3, 4]):
        with pytest.raises(Refused, match="secure_shares"):
            summed(server, few)
    with pytest.raises(Refused, match="secure_confirm"):  # nine begin, and six of them would do for the protocol
        summed(Server(tmp_path / "b", masks="required", min_members=9), range(9), range(7))
    summed(server, range(6))


def test_a_site_that_wants_masks_wants_to_know_with_whom(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="secure_shares"):
        summed(Server(tmp_path / "a", keys=False, masks="required"), FOUR)
    summed(Server(tmp_path / "b", keys=False, masks="required", min_known=0), FOUR)
    with pytest.raises(Refused, match="secure_shares"):
        summed(Server(tmp_path / "c", keys=False), [0, 1])


def test_a_site_that_the_others_do_not_know_takes_no_part(tmp_path: Path) -> None:
    server, strange = Server(tmp_path / "a", masks="required"), Server(tmp_path / "b", masks="required")
    server.keys[9] = {**strange.keys[9], "peers": server.keys[0]["peers"]}
    with pytest.raises(Refused, match="secure_shares"):
        summed(server, range(SITES))


def test_what_is_not_masked_is_not_answered(tmp_path: Path) -> None:
    server = Server(tmp_path, (*WORDS,), masks="required")
    with pytest.raises(Refused, match=r"RefusedError at order\.kind"):
        server.ask(0, "train", {"mean": server.mean}, sums={SITE: ONCE}, slot=SITE)
