"""Ways to divide from outside: functions of other packages, what they give checked."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedloom.clients import data
from fedloom.conf import Config, UserError, load

MODULE = '''
import numpy as np


def halves(labels, parts, generator, share=0.5):
    """The first site gets a share of all, the others the rest."""
    order = generator.permutation(len(labels))
    first = int(share * len(labels))
    return [order[:first], *np.array_split(order[first:], parts - 1)]


def by_label(labels, parts):
    return tuple(np.flatnonzero(labels % parts == part).tolist() for part in range(parts))


def overlapping(labels, parts):
    return [np.arange(100)] * parts


def twice(labels, parts):
    return [np.zeros(20, int) + part for part in range(parts)]


def outside(labels, parts):
    return [np.arange(100) + len(labels) * part for part in range(parts)]


def floats(labels, parts):
    return [np.arange(100) + 100.0 * part for part in range(parts)]


def ragged(labels, parts):
    return [[[1], [2, 3]]] + [np.arange(20)] * (parts - 1)


def few(labels, parts):
    return [np.arange(9) + 9 * part for part in range(parts)]


def one(labels, parts):
    return [np.arange(100)]


def nothing(labels, parts):
    return None


def other(y, n):
    return []


def failing(labels, parts):
    labels[:] = 0
    return [labels[len(labels)]]


number = 3
'''


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module outside of this project, and its entry point, on the search path."""
    (tmp_path / "my_ways.py").write_text(MODULE)
    info = tmp_path / "my_ways-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-ways\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedloom.partitioners]\nuneven = my_ways:halves\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_ways", None)


def of(name: str, *words: str, count: int = 4) -> Config:
    sites = f"sites=[{{domain: digits, count: {count}, partition: {{name: '{name}'}}}}]"
    return load("digits", [sites, "data.size=8", *words])


def test_a_function_divides_by_its_options_and_by_the_seed():
    assert data.site_sizes(of("my_ways:halves")) == [647, 216, 216, 215]
    assert data.site_sizes(of("uneven", "sites.0.partition.options={share: 0.7}")) == [905, 130, 130, 129]
    first, again, other = (of("uneven", f"seed={seed}") for seed in (0, 0, 1))
    labels = [data.site_examples(config, config.roster[0]).y for config in (first, again, other)]
    assert labels[0].equal(labels[1]) and not labels[0].equal(labels[2])


def test_a_function_need_not_take_the_generator_nor_give_arrays():
    config = of("my_ways:by_label")
    for place, site in enumerate(config.roster):
        assert set(np.unique(data.site_examples(config, site).y % 4)) == {place}


@pytest.mark.parametrize(
    "name, message",
    [
        ("overlapping", r"assigned an image twice, to two sites or to one"),
        ("twice", r"assigned an image twice, to two sites or to one"),
        ("outside", r"returned positions that are not whole numbers from 0 to 1293"),
        ("floats", r"returned positions that are not whole numbers"),
        ("ragged", r"returned positions that are not whole numbers from 0 to 1293"),
        ("few", r"'my_ways:few' assigned 9 images to site 0 of 4, fewer than partition\.min_samples=10"),
        ("one", r"returned 1 parts, takes a list of positions for each of 4 sites"),
        ("nothing", r"returned a NoneType, takes a list"),
        ("other", r"partition\.options\.y: missing; 'my_ways:other' needs it"),
        ("failing", r"partition\.options: 'my_ways:failing' failed \(IndexError: .*\)"),
        ("number", r"partition\.name: 'my_ways:number' has the type int; it must be a function"),
        ("halfs", r"partition\.name: 'my_ways:halfs' has no 'halfs'; did you mean 'halves'\?"),
    ],
)
def test_what_it_gives_is_checked(name: str, message: str):
    with pytest.raises(UserError, match=rf"^site-0000 \(digits\): .*{message}") as caught:
        data.site_sizes(of(f"my_ways:{name}"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("count", [1, 4])
def test_unknown_names_and_options_are_reported_with_the_nearest_one(count: int):
    for name, message in {
        "drichlet": r"site-0000 \(digits\): unknown partitioner 'drichlet'; did you mean 'dirichlet'\?",
        "unevn": r"unknown partitioner 'unevn'; did you mean 'uneven'\? \(known: classes, column, dirichlet, .*uneven\)",
    }.items():
        with pytest.raises(UserError, match=message):
            data.site_sizes(of(name, count=count))
    with pytest.raises(UserError, match=r"partition\.options: are only for a function of your own"):
        data.site_sizes(of("iid", "sites.0.partition.options={share: 0.7}", count=count))


def test_an_option_that_a_function_does_not_take_is_named():
    with pytest.raises(
        UserError, match=r"unknown option of 'uneven' 'partition\.options\.shar'; did you mean .*options\.share"
    ):
        data.site_sizes(of("uneven", "sites.0.partition.options={shar: 0.7}"))
