"""Dividing a domain among sites."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.clients.data.cache import folder
from fedloom.clients.data.partition import WAYS, divide, sizes
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import generator
from fedloom.conf.sites import PartitionConfig

LABELS = generator(0, "labels").integers(0, 10, 2000)


def way(name: str, min_samples: int = 10, **options: Any) -> PartitionConfig:
    """The way of that name with its own one of these options."""
    own = {key: one for key, one in options.items() if key == WAYS[name].key}
    return PartitionConfig(name=name, min_samples=min_samples, **own)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(WAYS)),
    parts=st.integers(1, 60),
    alpha=st.floats(0.05, 100.0),
    classes=st.integers(1, 10),
    growth=st.floats(0.0, 4.0),
    seed=st.integers(0, 2**40),
)
def test_parts_are_disjoint_and_repeat(name: str, parts: int, alpha: float, classes: int, growth: float, seed: int) -> None:
    how = way(name, min_samples=1, alpha=alpha, classes_per_site=classes, growth=growth)
    try:
        divided = divide(LABELS, parts, how, seed, "x")
    except UserError as error:
        assert name == "dirichlet" and "2000 training examples cannot be divided" in str(error)
        return
    assert len(divided) == parts and all(len(mine) for mine in divided)
    together = np.concatenate(divided)
    assert len(np.unique(together)) == len(together) and set(together) <= set(range(2000))
    assert len(together) == 2000 or name == "classes"
    assert all((np.diff(mine) > 0).all() for mine in divided)
    again = divide(LABELS, parts, how, seed, "x")
    assert all(np.array_equal(one, other) for one, other in zip(divided, again, strict=True))


@pytest.mark.parametrize("name", WAYS)
def test_seed_and_name_make_another_division(name: str) -> None:
    how = way(name, alpha=10.0)
    first, *others = (divide(LABELS, 5, how, seed, words) for seed, words in ((0, "a"), (1, "a"), (0, "b")))
    assert all(any(not np.array_equal(*pair) for pair in zip(first, other, strict=True)) for other in others)


def test_iid_parts_are_equal_and_mixed() -> None:
    divided = divide(np.sort(LABELS), 7, PartitionConfig(), 0, "x")
    assert {len(mine) for mine in divided} <= {285, 286}
    assert all(len(np.unique(np.sort(LABELS)[mine])) == 10 for mine in divided)


def test_a_smaller_alpha_is_more_unequal() -> None:
    def largest_share(alpha: float) -> float:
        divided = divide(LABELS, 5, PartitionConfig(name="dirichlet", alpha=alpha, min_samples=1), 0, "x")
        return float(np.mean([np.bincount(LABELS[mine]).max() / len(mine) for mine in divided]))

    assert largest_share(0.1) > 0.3 > largest_share(100.0)


@pytest.mark.parametrize("classes", [1, 2, 10])
def test_a_site_sees_so_many_classes(classes: int) -> None:
    divided = divide(LABELS, 20, PartitionConfig(name="classes", classes_per_site=classes), 0, "x")
    assert {len(np.unique(LABELS[mine])) for mine in divided} == {classes}


@given(count=st.integers(1, 5000), share=st.floats(0.0, 1.0), growth=st.floats(0.0, 50.0))
def test_sizes_grow_and_sum_up(count: int, share: float, growth: float) -> None:
    parts = max(1, int(count * share))
    given = sizes(count, parts, growth)
    assert sum(given) == count and len(given) == parts and min(given) >= 1
    assert growth == 0 or all(later >= earlier - 1 for earlier, later in pairwise(given))


def test_sizes_in_numbers() -> None:
    assert sizes(100, 4, 1.0) == [11, 20, 30, 39]
    assert sizes(10, 4, 0.0) == [3, 3, 2, 2]


def test_too_many_classes_per_site_and_too_few_images() -> None:
    with pytest.raises(UserError, match=r"classes_per_site=11; use fewer sites or fewer classes_per_site"):
        divide(LABELS, 2, PartitionConfig(name="classes", classes_per_site=11), 0, "x")
    with pytest.raises(UserError, match=r"2000 training examples for 201 sites are fewer than partition.min_samples=10"):
        divide(LABELS, 201, PartitionConfig(), 0, "x")


def test_a_division_is_looked_up_and_a_damaged_file_made_again():
    labels = np.arange(200, dtype=np.int64) % 10
    how = PartitionConfig(name="dirichlet", alpha=5.0, min_samples=1)
    first = divide(labels, 4, how, 77, "kept")
    before = set(folder().iterdir())
    again = divide(labels, 4, how, 77, "kept")
    assert set(folder().iterdir()) == before
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    for path in before:
        path.write_bytes(path.read_bytes()[:50])
    repaired = divide(labels, 4, how, 77, "kept")
    assert all(np.array_equal(one, other) for one, other in zip(first, repaired, strict=True))
    other = divide(labels, 4, how, 78, "kept")
    assert not all(np.array_equal(one, two) for one, two in zip(first, other, strict=True))
