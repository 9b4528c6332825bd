"""Each site's own test examples: divided as its training examples are. And how many images of each class it has."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedloom.clients import data
from fedloom.clients.data.partition import divide_alike
from fedloom.conf import Config, load
from fedloom.conf.sites import Site

WAYS = ["iid", "dirichlet, alpha: 0.2", "classes", "size, growth: 1.5"]


def config(way: str, *words: str) -> Config:
    entry = f"{{domain: digits, count: 7, classes: [1, 2, 3, 5, 8], relabel: true, partition: {{name: {way}}}}}"
    return load("digits", [f"sites=[{entry}]", "data.size=8", *words])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=12),
    st.lists(st.integers(0, 6), min_size=1, max_size=150),
    st.integers(0, 9),
)
def test_the_parts_share_nothing_cover_every_class_that_is_held_and_follow_its_shares(parts, labels, seed: int):
    has, y = [np.array(part) for part in parts], np.array(labels)
    found = divide_alike(y, has, np.random.default_rng(seed))
    everything = np.concatenate(found)
    assert len(np.unique(everything)) == len(everything)
    assert sorted(everything) == np.flatnonzero(np.isin(y, np.concatenate(has))).tolist()
    for name in np.unique(np.concatenate(has)):
        held, there = np.array([(part == name).sum() for part in has]), int((y == name).sum())
        got = np.array([(y[part] == name).sum() for part in found])
        assert np.all(np.abs(got - there * held / held.sum()) < 1 + 1e-6)
        assert not got[held == 0].any()


def test_a_sites_number_of_test_images_follows_its_number_of_training_images():
    """Of 40 sites with one image of each of ten classes none goes without: what is over goes round."""
    found = divide_alike(np.repeat(np.arange(10), 10), [np.arange(10)] * 40, np.random.default_rng(0))
    assert {len(part) for part in found} <= {2, 3}


@pytest.mark.parametrize("way", WAYS)
def test_the_parts_of_an_entrys_sites_are_its_test_images(way: str):
    settings = config(way)
    sites = settings.roster
    whole, parts = data.test_images(settings, sites[0].spec), [data.own_examples(settings, site, "test") for site in sites]
    trained = {name for site in sites for name in data.class_counts(settings, site)}
    rows = [image.tobytes() for image, label in zip(whole.x.numpy(), whole.y.tolist(), strict=True) if label in trained]
    assert sorted(image.tobytes() for part in parts for image in part.x.numpy()) == sorted(rows)


def test_a_dirichlet_sites_test_part_has_its_own_label_distribution():
    settings = config("dirichlet, alpha: 0.2")
    for site in settings.roster:
        train = data.class_counts(settings, site)
        test = np.bincount(data.own_examples(settings, site, "test").y.numpy(), minlength=5)
        expected = np.array([train.get(name, 0) for name in range(5)]) * 0.25 * 1.12  # a fifth is test, a tenth held out
        assert np.abs(test - expected).max() < 3
        assert set(np.flatnonzero(test)) <= set(train)


@pytest.mark.parametrize("samples", [0, 20])
def test_class_counts_are_those_of_the_images(samples: int):
    settings = config("dirichlet, alpha: 0.2", f"sites.0.samples={samples}")
    for site in settings.roster:
        y, counts = data.site_examples(settings, site).y.tolist(), data.class_counts(settings, site)
        assert counts == {name: y.count(name) for name in sorted(set(y))}
        assert sum(counts.values()) == data.site_size(settings, site)


def test_validation_images_are_dealt_out_as_ever(tmp_path: Path):
    """What sites choose by stays what it was."""
    settings = config("dirichlet, alpha: 0.2")
    sites: list[Site] = settings.roster
    sizes = [len(data.own_examples(settings, site, "validation")) for site in sites]
    assert max(sizes) - min(sizes) <= 1
