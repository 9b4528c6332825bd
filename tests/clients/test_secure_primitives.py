"""The mathematics of secure aggregation: masks that cancel, secrets that enough shares tell, messages nobody can change."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedloom.clients.privacy.secure_aggregation.primitives import (
    agreed,
    check_room,
    commitment,
    mask,
    places,
    public_key,
    rebuilt,
    seal,
    secret,
    shared_out,
    sign,
    threshold_of,
    unseal,
)
from fedloom.conf.errors import UserError
from fedloom.fusion.exact import ExactSum

secrets = st.binary(min_size=16, max_size=16)
vectors = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=4, max_size=4)


@given(st.lists(vectors, min_size=2, max_size=5), st.data())
def test_common_masks_cancel_in_the_sum(given: list[list[int]], data: st.DataObject) -> None:
    names = [f"site-{place}" for place in range(len(given))]
    seeds = {name: data.draw(secrets) for name in names}
    whole, plain = ExactSum(modular=True), ExactSum(modular=True)
    for name, vector in zip(names, given, strict=True):
        one = torch.tensor(vector)
        plain.add({"x": one})
        for other in set(names) - {name}:
            one = one + sign(name, other) * mask(agreed(seeds[name], public_key(seeds[other]), "round"), "x", 4)
        whole.add({"x": one})
    assert torch.equal(whole.totals["x"], plain.totals["x"])


@given(secrets, st.integers(2, 6), st.data())
def test_any_so_many_shares_tell_a_secret(one: bytes, count: int, data: st.DataObject) -> None:
    threshold = data.draw(st.integers(2, count))
    shares = dict(enumerate(shared_out(one, threshold, count), 1))
    for chosen in itertools.combinations(shares, threshold):
        assert rebuilt({place: shares[place] for place in chosen}) == one
    fewer = {place: shares[place] for place in list(shares)[: threshold - 1]}
    assert rebuilt(fewer) != one


@given(st.floats(0.5, 1.0), st.integers(1, 2000))
def test_more_than_two_thirds_must_answer_and_at_most_all(share: float, sites: int) -> None:
    assert 2 * sites < 3 * threshold_of(share, sites) <= 3 * sites
    assert threshold_of(share, sites) >= share * sites - 1e-9


def test_masks_look_drawn_and_differ_by_key_and_record() -> None:
    key, other = bytes(32), bytes([1]) * 32
    one = mask(key, "site", 100_000)
    assert torch.equal(one, mask(key, "site", 100_000)) and torch.equal(one[:10], mask(key, "site", 10))
    assert not torch.equal(one, mask(key, "round", 100_000)) and not torch.equal(one, mask(other, "site", 100_000))
    bits = torch.stack([(one >> place) & 1 for place in range(64)]).double().mean(1)
    assert bool(((bits - 0.5).abs() < 0.01).all())  # six standard deviations


def test_both_agree_on_a_key_that_a_third_has_not() -> None:
    a, b, c = secret(), secret(), secret()
    assert agreed(a, public_key(b), "x") == agreed(b, public_key(a), "x")
    assert len({agreed(a, public_key(b), "x"), agreed(a, public_key(b), "y"), agreed(c, public_key(b), "x")}) == 3
    assert commitment(a) == commitment(a) != commitment(b)
    for bad in (bytes(32), b"", bytes(31)):
        with pytest.raises(UserError, match="a site's public key is not valid"):
            agreed(a, bad, "x")


@given(st.binary(max_size=64), st.binary(max_size=64))
def test_what_is_sealed_is_opened_by_its_key_alone_and_unchanged(text: bytes, noise: bytes) -> None:
    key, sealed = bytes(32), seal(bytes(32), text, "from a to b")
    assert unseal(key, sealed, "from a to b") == text
    assert unseal(key, sealed, "from a to c") is None and unseal(bytes([1]) * 32, sealed, "from a to b") is None
    assert unseal(key, noise, "from a to b") is None
    assert unseal(key, bytes([sealed[0] ^ 1]) + sealed[1:], "from a to b") is None


def test_places_do_not_depend_on_the_order() -> None:
    assert places(["b", "a"]) == places(["a", "b"]) == {"a": 1, "b": 2}
    assert sign("a", "b") == -sign("b", "a")


def test_sums_have_room_in_the_integers() -> None:
    check_room(2**40, 2**22)
    check_room(0, 2**62)
    with pytest.raises(UserError, match=r"federation\.scale_bits: sums over all sites would not fit"):
        check_room(2**40, 2**23)
