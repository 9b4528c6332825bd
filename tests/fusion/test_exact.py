"""Exact sums: whatever the order of adds and subtracts, the bits are the same; what cannot be exact is refused."""

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedloom.fusion.exact import ExactSum, ExactSumError, dequantise, quantise
from fedloom.fusion.flat import flattened
from fedloom.fusion.state import digest

BITS = 32
floats = st.floats(-128, 128, width=32)
states = st.integers(1, 6).flatmap(
    lambda n: st.lists(hnp.arrays(np.float32, (2, 3), elements=floats), min_size=n, max_size=n)
)


def integers(arrays: list[np.ndarray]) -> list[dict[str, torch.Tensor]]:
    return [quantise({"w": torch.from_numpy(array)}, BITS) for array in arrays]


def total(parts: list[dict[str, torch.Tensor]]) -> ExactSum:
    result = ExactSum(BITS)
    for part in parts:
        result.add(part)
    return result


@given(states, st.randoms(use_true_random=False))
def test_order_does_not_matter(arrays, random):
    parts = integers(arrays)
    ahead = digest(total(parts).totals)
    random.shuffle(parts)
    assert digest(total(parts).totals) == ahead


@given(states, st.randoms(use_true_random=False))
def test_any_order_of_adds_and_subtracts_equals_the_sum_without(arrays, random):
    parts = integers(arrays)
    gone = {index for index in range(len(parts)) if random.random() < 0.5}
    result, added, todo = (
        ExactSum(BITS),
        set(),
        [("add", i) for i in range(len(parts))] + [("subtract", i) for i in gone],
    )
    while todo:
        what, index = todo.pop(random.randrange(len(todo)))
        if what == "subtract" and index not in added:
            todo.append((what, index))
            continue
        getattr(result, what)(parts[index])
        added.add(index)
    rest = total([part for index, part in enumerate(parts) if index not in gone])
    assert result.addends == rest.addends
    if rest.addends:
        assert torch.equal(result.totals["w"], rest.totals["w"])
    else:
        assert not result.totals["w"].any()


@given(states)
def test_replace_is_subtract_and_add(arrays):
    parts = integers(arrays)
    result = total(parts[:-1] + parts[:1])
    result.replace(parts[0], parts[-1])
    other = total(parts[:-1] + parts[-1:])
    assert torch.equal(result.totals["w"], other.totals["w"])
    assert result.addends == other.addends


@given(hnp.arrays(np.float32, 20, elements=floats), st.integers(8, 48))
def test_quantisation_error_is_at_most_half_a_unit(array, bits):
    tensor = torch.from_numpy(array)
    back = quantise({"w": tensor}, bits)["w"].double() * 2.0**-bits
    assert (back - tensor.double()).abs().max() <= 2.0 ** -(bits + 1)


def test_mean_and_total_are_what_they_say():
    parts = integers([np.full((2, 3), value, np.float32) for value in (1.0, 2.0, 6.0)])
    result = total(parts)
    assert torch.equal(result.total()["w"], torch.full((2, 3), 9.0))
    assert torch.equal(result.mean()["w"], torch.full((2, 3), 3.0))


def test_float32_is_not_exact_where_integers_are():
    generator = torch.Generator().manual_seed(0)
    big, small = (torch.randn(1000, generator=generator) * scale for scale in (3.0, 0.1))
    assert not torch.equal((big + small) - small, big)
    result = total([quantise({"w": big}, BITS)])
    before = digest(result.totals)
    result.add(quantise({"w": small}, BITS))
    assert digest(result.totals) != before
    result.subtract(quantise({"w": small}, BITS))
    assert digest(result.totals) == before


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused_by_name(bad):
    with pytest.raises(ExactSumError, match=r"'layer\.bias'.*not finite"):
        quantise({"layer.weight": torch.ones(2), "layer.bias": torch.tensor([1.0, bad])}, BITS)


def test_what_is_too_large_is_refused_by_name():
    with pytest.raises(ExactSumError, match="'w' has an entry"):
        quantise({"w": torch.tensor([2.0**31])}, BITS)


def test_overflow_is_refused_and_changes_nothing():
    huge = quantise({"a": torch.tensor([1.0]), "w": torch.tensor([2.0**29])}, BITS)
    result = total([huge] * 3)
    before, bound = digest(result.totals), result.addends
    with pytest.raises(ExactSumError, match="'w' would overflow"):
        result.add(huge)
    assert digest(result.totals) == before
    assert result.addends == bound


def test_bounds_do_not_refuse_what_fits():
    """Adding and subtracting for ever must not exhaust the conservative bound."""
    huge = quantise({"w": torch.tensor([2.0**29])}, BITS)
    result = ExactSum(BITS)
    for _ in range(20):
        result.add(huge)
        result.subtract(huge)
    assert not result.totals["w"].any()


def test_other_names_shapes_and_types_are_refused():
    result = total([quantise({"w": torch.ones(2)}, BITS)])
    with pytest.raises(ExactSumError, match="'v' is on one side only"):
        result.add(quantise({"v": torch.ones(2)}, BITS))
    with pytest.raises(ExactSumError, match=r"shape \[3\], the sum has \[2\]"):
        result.add(quantise({"w": torch.ones(3)}, BITS))
    with pytest.raises(ExactSumError, match="not int64"):
        result.add({"w": torch.ones(2)})
    with pytest.raises(ExactSumError, match="cannot subtract 2 from a sum of 1"):
        result.subtract(quantise({"w": torch.ones(2)}, BITS), times=2)
    with pytest.raises(ExactSumError, match="mean of no states"):
        ExactSum(BITS).mean()


@settings(max_examples=30)
@given(hnp.arrays(np.float32, (3, 2), elements=floats), st.sampled_from(["name", "dtype", "shape", "value"]))
def test_digest_sees_every_difference(array, what):
    state = {"w": torch.from_numpy(array)}
    other = {
        "name": {"v": state["w"]},
        "dtype": {"w": state["w"].double()},
        "shape": {"w": state["w"].reshape(2, 3)},
        "value": {"w": torch.from_numpy(np.nextafter(array, np.float32(1e9)))},
    }[what]
    assert digest(state) == digest({"w": state["w"].clone()})
    assert digest(state) != digest(other)


def test_dequantise_divides_once():
    state = {"w": torch.tensor([3 * 2**32], dtype=torch.int64)}
    assert dequantise(state, 32, 3)["w"].item() == 1.0


@given(
    addends=st.lists(st.tuples(st.integers(-(2**62), 2**62), st.integers(1, 2**31 - 1)), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_whatever_was_added_can_be_subtracted_in_any_order(addends, order):
    """Also where others cancel most of it, so that the rest is large in between."""
    result, added = ExactSum(bits=0), []
    for value, times in addends:
        with contextlib.suppress(ExactSumError):
            result.add({"w": torch.tensor([value])}, times)
            added.append((value, times))
    order.shuffle(added)
    while added:
        value, times = added.pop()
        result.subtract({"w": torch.tensor([value])}, times)
        rest = sum(value * times for value, times in added)
        if abs(rest) < 2**63:
            assert not result.totals or int(result.totals["w"]) == rest
    assert result.addends == 0


def test_a_replacement_that_overflows_changes_nothing():
    result = ExactSum(bits=0)
    result.add({"w": torch.tensor([2**61])})
    result.add({"w": torch.tensor([5])})
    with pytest.raises(ExactSumError, match="'w' would overflow"):
        result.replace({"w": torch.tensor([-(2**62)])}, {"w": torch.tensor([2**62])})
    assert int(result.totals["w"]) == 2**61 + 5 and result.addends == 2


@given(st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_what_was_replaced_can_be_undone(before: int, times: int, flat: bool):
    """Also where a state counts 0 times, and is empty."""
    old = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}
    new = {"w": torch.tensor([0.5, -2.0]), "b": torch.tensor([7.0])}
    parts = [quantise(flattened(state) if flat else state, 8) for state in (old, new)]
    total = ExactSum(8)
    total.add(parts[0], 3)
    start = digest(total.totals)
    replaced = ({} if not before else parts[0], {} if not times else parts[1], before, times)
    total.replace(*replaced)
    assert total.addends == 3 - before + times
    total.undo(*replaced)
    assert (digest(total.totals), total.addends) == (start, 3)
