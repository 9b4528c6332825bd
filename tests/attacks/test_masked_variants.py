"""Further ways to one site's contribution that once worked: each gets nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.clients.privacy.differential import LEAST_PART
from fedloom.clients.privacy.secure_aggregation.contribution import contents
from fedloom.clients.privacy.sketch import ALIKE, BUCKETS, likeness
from fedloom.clients.protocol.messages import IDLE, MEAN, MODEL, ROUND, SITE, TRAIN, to_states
from fedloom.clients.protocol.partial_sums import ONCE, SAMPLES
from tests.attacks.hostile import MASKS, WORDS, Masks, Refused, Server, name_of, summed

FOUR, THREE, ALL = [0, 1, 2, 3], [0, 1, 2], list(range(10))
AGAINST_FEW: dict[str, Any] = {"masks": "required", "min_members": 3}
MOVE, SUM = MASKS, (*MASKS, "objective={name: sum_aggregation, mode: independent}")


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path, **AGAINST_FEW)


@pytest.mark.parametrize("sums", [{SITE: SAMPLES}, {SITE: "twice"}, {}, {SITE: ONCE, ROUND: ONCE}])
def test_each_site_counts_once_and_with_all_that_it_contributes(server: Server, sums: dict[str, str]) -> None:
    """A sum by images is a second equation beside the sum."""
    summed(server, FOUR)
    with pytest.raises(Refused, match="train"):
        Masks(server, FOUR).begin().train(sums=sums)


@pytest.mark.parametrize("record", [ROUND, SITE])
def test_a_tensor_in_two_records_is_not_summed_in_one_of_them(server: Server, record: str) -> None:
    server.change(*SUM)
    with pytest.raises(Refused, match="train"):
        Masks(server, FOUR).begin().train(sums={record: ONCE}, slot="")


def test_a_contribution_counts_as_before_only_if_its_sites_have_agreed_on_it(tmp_path: Path) -> None:
    """Otherwise the others can be prepared in a round that is never ended: what they gave is known, but of one site."""
    server = Server(tmp_path, masks="required")
    others = dict.fromkeys(ALL[:9], (*MASKS, "training.rate=0"))
    masks = Masks(server, ALL, words=others, rounds=9).begin().train()
    with pytest.raises(Refused, match="secure_confirm"):
        masks.confirm()
    with pytest.raises(Refused, match="train"):
        Masks(server, ALL, dict.fromkeys(ALL, 1), round=2, rounds=9).begin().train()


def test_sites_that_continue_from_one_round_have_agreed_on_the_same_in_it(server: Server) -> None:
    """Two lists in one round: the others may be prepared together, and the one site with a few of them."""
    server.change(*MASKS, "training.rate=0")
    Masks(server, [0, 1, 2, 3], rounds=9).begin().train().confirm()
    server.change(*MASKS)
    Masks(server, [4, 5, 6, 7], rounds=9).begin().train().confirm()
    mixed = [0, 1, 2, 4, 5]
    with pytest.raises(Refused, match="secure_confirm"):
        Masks(server, mixed, dict.fromkeys(mixed, 1), round=2, rounds=9).begin().train().confirm()


@pytest.mark.parametrize("step", ["train", "confirm", "unmask"])
@pytest.mark.parametrize("part", ["round", "run", "config", "members", "rounds"])
def test_all_steps_of_an_attempt_have_one_configuration_run_and_round(server: Server, step: str, part: str) -> None:
    masks = Masks(server, FOUR).begin()
    for one in ("train", "confirm", "unmask"):
        if one == step:
            if part == "config":
                server.change(*MASKS, "data.heads=task", "sites=[{domain: digits, count: 9}, {domain: digits, label: x}]")
            elif part == "run":
                server.run = "another"
            else:
                masks.parts[part] = 7
            with pytest.raises(Refused, match=one):
                getattr(masks, one)()
            return
        getattr(masks, one)()


def test_masks_in_common_leave_with_the_record_that_is_summed(server: Server) -> None:
    """The batches of round 1 again, with the mask of one site that is said to leave and does not."""
    summed(server, FOUR)
    with pytest.raises(Refused, match="train"):
        Masks(server, FOUR).begin().train(THREE, {name_of(3): torch.tensor([1])}, slot="")


def test_numbers_that_overflow_do_not_hide_that_two_sums_are_alike() -> None:
    """A float32 norm of such sketches is infinite, and a cosine that is not a number is above nothing."""
    one = np.linspace(1e38, 3e38, BUCKETS).astype(np.float32)
    other = np.ones(BUCKETS, np.float32)
    other[::2] = -1.0
    assert likeness({"a": one}, {"b": (one / 3).astype(np.float32)}) > ALIKE
    assert likeness({"a": one}, {"a": other}) < ALIKE
    for odd in (np.inf, np.nan):
        assert likeness({"a": np.full(BUCKETS, odd, np.float32)}, {"b": other}) > ALIKE


def test_noise_that_the_server_chooses_does_not_make_batches_look_new(server: Server) -> None:
    server.change(*MASKS, "privacy.clip=100", "privacy.noise=0.0001")
    summed(server, FOUR)
    with pytest.raises(Refused, match="summed_before"):
        summed(server, FOUR, THREE)


def test_the_move_is_cut_and_not_the_weight_where_the_server_knows_the_start(server: Server) -> None:
    """Of a network that is sent just beyond the limit, what all but one site give would be known."""
    limit, first = 0.1, type(server).mean.fget(server)  # type: ignore[attr-defined]
    server.change(*MASKS, f"federation.largest_weight={limit}")
    sent = {name: (torch.randint(0, 2, one.shape) * 2 - 1).float() * (limit + 0.02) for name, one in first.items()}
    masks = Masks(server, FOUR).begin()
    original = type(server).mean
    type(server).mean = property(lambda self: sent)  # type: ignore[method-assign, assignment]
    try:
        masks.train()
    finally:
        type(server).mean = original  # type: ignore[method-assign]
    begin = torch.cat([(sent[name].double() * 2**32).round().long().flatten() for name in sorted(sent)])
    moved = server.gave(0) - begin
    assert 0 < int(moved.abs().max()) <= limit * 2**32
    assert int((server.gave(0).abs() == round(limit * 2**32)).sum()) == 0


BUDGET = ("privacy.clip=0.01", "privacy.noise=4.0")


def test_what_is_replaced_under_noise_is_replaced_once(tmp_path: Path) -> None:
    """Otherwise the others' noise in it is averaged away, and the site that did not take part again is left with its own."""
    server = Server(tmp_path, (*MASKS, *BUDGET), masks="required", epsilon=8.0)
    summed(server, ALL, rounds=9, slot="")
    nine = dict.fromkeys(ALL[:9], 1)
    summed(server, ALL[:9], bases=nine, round=2, rounds=9, slot="")
    with pytest.raises(Refused, match="train"):
        summed(server, ALL[:9], bases=nine, round=2, rounds=9, slot="")


def test_what_has_all_of_its_own_noise_is_replaced_again(tmp_path: Path) -> None:
    """Otherwise one site that deals shares of no secret, which shows when a sum is read, ends the run for all others."""
    server = Server(tmp_path, (*MASKS, *BUDGET), masks="required", epsilon=8.0)
    summed(server, ALL, rounds=9)
    found = []
    for tried in range(2):
        nine = ALL[tried:9]
        masks = Masks(server, nine, dict.fromkeys(nine, 1), round=2, rounds=9).begin().train().confirm().unmask()
        found.append(server.gave(8, round=2) - server.gave(8))
        assert float(masks.metrics[8]["epsilon"]) > 0
    assert all(float(one.double().std()) > 0.8 * 2**0.5 * 0.01 * 4 * 2**32 for one in found)


def test_noise_is_not_rounded_away_by_large_weights(tmp_path: Path) -> None:
    """Every entry of the sum has the noise that was promised: float32 has steps of two clips beside 2**17."""
    clip, noise = 0.0085, 0.8
    words = (*MASKS, f"privacy.clip={clip}", f"privacy.noise={noise}", "training.rate=0")
    server, first = Server(tmp_path, words, masks="required", epsilon=60.0), Server.mean
    sent = {name: torch.full_like(one, 2.0**17 + 8.0) for name, one in server.mean.items()}
    Server.mean = property(lambda self: sent)  # type: ignore[method-assign, assignment]
    try:
        total = summed(server, ALL).double() / 2**32 - 10 * (2**17 + 8.0)
    finally:
        Server.mean = first  # type: ignore[method-assign]
    assert float(total.std()) > 0.95 * noise * clip


def test_parts_of_noise_are_not_so_small_that_they_add_up_to_less(tmp_path: Path) -> None:
    few = LEAST_PART / 2.0**32
    server = Server(tmp_path, (*MASKS, f"privacy.clip={few}", "privacy.noise=1"), masks="required", epsilon=60.0)
    with pytest.raises(Refused, match="train"):
        summed(server, ALL, slot="")


HIDDEN = {"noise": ("privacy.clip=1", "privacy.noise=2"), "masks": ("federation.secure_aggregation=true",)}
QUESTIONS = {
    "composed": "layer_selection",
    "moments": "fedavg",
    "class_statistics": "fedavg",
    "prototypes": "fedproto",
    "labels": "heterofl",
    "recombine": "components",
}


@pytest.mark.parametrize("words", HIDDEN.values(), ids=HIDDEN)
@pytest.mark.parametrize(("kind", "objective"), QUESTIONS.items())
def test_where_a_run_hides_no_question_is_answered_that_tells_more(
    tmp_path: Path, words: tuple[str, ...], kind: str, objective: str
) -> None:
    rest = [word for word in WORDS if not word.startswith(("objective", "strategy"))]
    server = Server(tmp_path, (*rest, f"objective={{name: {objective}}}", *words))
    with pytest.raises(Refused, match=r"RefusedError at order\.kind"):
        server.ask(0, kind, {MODEL: server.mean, MEAN: server.mean}, split="test")


def test_the_least_batch_is_of_the_images_that_are_trained_on(tmp_path: Path) -> None:
    rest = [word for word in WORDS if not word.startswith(("objective", "strategy", "sites"))]
    choice = "objective={name: layer_selection, held_out: 0.9}"
    words = (*rest, "sites=[{domain: digits, samples: 10}]", "strategy={name: layer_selection}", choice)
    with pytest.raises(Refused, match=r"RefusedError at sites\.samples"):
        server = Server(tmp_path, words, min_batch=8)
        server.ask(0, TRAIN, {MEAN: server.mean})


@pytest.mark.parametrize("policy", [{"masks": "required"}, {"epsilon": 5.0}])
def test_how_many_images_of_chosen_classes_a_site_has_is_not_said(tmp_path: Path, policy: dict[str, Any]) -> None:
    server = Server(tmp_path, (*MASKS, "sites=[{domain: digits, count: 10, classes: [3]}]"), **policy)
    with pytest.raises(Refused, match=r"RefusedError at sites\[0\]\.classes"):
        server.ask(0, "enrol")


def test_no_one_trains_is_no_way_around(server: Server) -> None:
    """A round at a rate of 0, or idle, replaces what counts: over the same sites, and of what they have agreed on."""
    summed(server, FOUR, rounds=9)
    with pytest.raises(Refused, match="secure_confirm"):
        summed(server, FOUR, THREE, bases=dict.fromkeys(FOUR, 1), round=2, rounds=9, again=IDLE)


def test_two_networks_that_are_joined_otherwise_are_not_the_same(server: Server) -> None:
    """Names of tensors are the server's: a name can hold what looks like another tensor."""
    first = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    for second in (
        {"a": torch.tensor([1.0, 2.0]), "b|torch.float32|(1,)|": torch.tensor([3.0])},
        {"a|torch.float32|(2,)|": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])},
        {"a": torch.tensor([1.0, 2.0, 3.0])},
        {"a": torch.tensor([1.0, 2.0], dtype=torch.float64), "b": torch.tensor([3.0])},
        {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3.0])},
    ):
        assert contents(first) != contents(second)
    assert contents(first) == contents({"b": first["b"].clone(), "a": first["a"].clone()})


@pytest.mark.parametrize(
    "augment",
    ["{name: RandomPosterize, bits: 0, p: 0.9}", "{name: RandomErasing, p: 1}", "{name: RandomCrop, size: 8, padding: 8}",
     "{name: Resize, size: 1500}", "Grayscale"],
)  # fmt: skip
def test_images_are_not_changed_so_that_nothing_of_most_is_left(server: Server, augment: str) -> None:
    server.change(*MASKS, f"training.augment=[{augment}]")
    with pytest.raises(Refused, match=r"RefusedError at training\.augment"):
        summed(server, FOUR)
    server.change(*MASKS, "training.augment=[RandomHorizontalFlip, {name: RandomVerticalFlip}]")
    summed(server, FOUR)


def test_no_site_starts_at_a_network_of_its_own(server: Server) -> None:
    """With a seed chosen for it, all first networks but one are dead."""
    server.change(*MASKS, "objective={name: sum_aggregation, mode: independent, initialisation: own}")
    with pytest.raises(Refused, match="train: HiddenError"):
        Masks(server, FOUR).begin().train()


def test_an_order_that_fails_leaves_what_repetitions_are_compared_with(server: Server) -> None:
    summed(server, FOUR)
    server.change(*MASKS, "training.rate=0")
    masks = Masks(server, FOUR, dict.fromkeys(FOUR, 1), round=2).begin()
    for site in FOUR:
        with pytest.raises(Refused, match="train"):
            masks.train([site], base=0)  # and the others hear of 1
    with pytest.raises(Refused, match="summed_before"):
        summed(server, FOUR, THREE, bases=dict.fromkeys(FOUR, 1), round=2)


def test_what_replaces_a_contribution_is_the_same_record(server: Server) -> None:
    summed(server, FOUR)
    server.change(*MASKS, "objective={name: sum_aggregation, mode: fedavg}", "training.rate=0")
    masks = Masks(server, FOUR, dict.fromkeys(FOUR, 1), round=2).begin()
    with pytest.raises(Refused, match="train"):
        masks.train(THREE, sums={ROUND: ONCE}, slot=ROUND)


def test_units_are_fine_enough_that_repetitions_are_seen(server: Server) -> None:
    server.change(*MASKS, "federation.scale_bits=8")
    with pytest.raises(Refused, match=r"train: UserError at federation\.scale_bits"):
        summed(server, FOUR)
    server.change(*MASKS)
    first, large = Server.mean, {name: one + 2000.0 for name, one in server.mean.items()}
    Server.mean = property(lambda self: large)  # type: ignore[method-assign, assignment]
    try:
        with pytest.raises(Refused, match="train"):
            summed(server, FOUR)
    finally:
        Server.mean = first  # type: ignore[method-assign]


def test_shares_that_cannot_be_opened_cost_nothing_of_a_budget(tmp_path: Path) -> None:
    server = Server(tmp_path, (*MASKS, *BUDGET), masks="required", epsilon=8.0)
    masks = Masks(server, ALL, rounds=9).begin()
    masks.sealed[9] = {name: one.flip(0) for name, one in masks.sealed[9].items()}
    for site in ALL[:9]:
        with pytest.raises(Refused, match="blamed"):
            masks.train([site])
    masks = Masks(server, ALL[:9], rounds=9).begin().train()
    once = masks.metrics[0]["epsilon"]
    other = Server(tmp_path / "other", (*MASKS, *BUDGET), masks="required", epsilon=8.0)
    assert Masks(other, ALL[:9], rounds=9).begin().train().metrics[0]["epsilon"] == once


def test_what_is_left_of_a_pass_is_not_a_batch_of_its_own(tmp_path: Path) -> None:
    """The only step with a rate above 0 would be on one image."""
    words = [word for word in WORDS if not word.startswith(("sites", "training.batch"))]
    rows = "sites=[{domain: digits, count: 2, samples: 65}]"
    plan = ("training.batch=64", "training.momentum=0", "training.schedule={name: constant, warm_up: 1, start_factor: 0}")
    server = Server(tmp_path, (*words, rows, *plan), sites=2, min_batch=32)
    found = to_states(server.ask(0, TRAIN, {MEAN: server.mean}, slot=SITE))[SITE]
    assert all(torch.equal(found[name], one) for name, one in server.mean.items())


def test_how_many_sites_share_a_domain_is_alike(server: Server) -> None:
    words = [word for word in MASKS if not word.startswith("sites")]
    server.change(*words, "sites=[{domain: digits, count: 9}, {domain: digits, count: 1}]")
    with pytest.raises(Refused, match="secure_shares: UserError"):
        summed(server, [*THREE, 9])


@pytest.mark.parametrize("partition", ["{name: classes, classes_per_site: 1}", "{name: dirichlet, alpha: 0.1}"])
def test_images_are_not_divided_by_label_where_labels_are_hidden(tmp_path: Path, partition: str) -> None:
    server = Server(tmp_path, (*MASKS, f"sites=[{{domain: digits, count: 10, partition: {partition}}}]"), masks="required")
    with pytest.raises(Refused, match=r"RefusedError at sites\[0\]\.partition"):
        server.ask(0, "enrol")
