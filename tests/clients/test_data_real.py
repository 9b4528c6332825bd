"""The real data sets of $FEDLOOM_DATA, where that folder exists."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedloom.clients import data
from fedloom.clients.data.domains import locate
from fedloom.clients.data.splits import split
from fedloom.conf.loading import from_mapping
from fedloom.conf.schema import Config, DataConfig
from fedloom.conf.sites import SiteConfig
from tests.data_folder import FOLDER

DATA = DataConfig(root=str(FOLDER))
COUNTS = {
    "mnist": (60000, 10000, (28, 28)),
    "fashion_mnist": (60000, 10000, (28, 28)),
    "usps": (7291, 2007, (16, 16)),
    "mnist_m": (8000, 2000, (28, 28, 3)),
    "svhn": (801, 282, (32, 32, 3)),
    "cifar10": (50000, 10000, (32, 32, 3)),
    "cifar100": (50000, 10000, (32, 32, 3)),
}
pytestmark = pytest.mark.data


def config(*sites: dict[str, Any], **more: Any) -> Config:
    return from_mapping({"experiment": "test", "sites": list(sites), "data": {"root": str(FOLDER), **more}})


@pytest.mark.parametrize("name", COUNTS)
def test_counts_shapes_and_classes(name: str) -> None:
    place = locate(name, DATA)
    train, test, shape = COUNTS[name]
    assert str(FOLDER) in data.where(name, DATA)
    for part, count in {"train": train, "test": test}.items():
        labels = place.labels(part)
        assert len(labels) == count and labels.dtype == np.int64
        assert np.unique(labels).tolist() == list(range(data.num_classes(config({"domain": name}))))
        images = np.asarray(place.images(part, np.array([0, count - 1])))
        assert images.shape == (2, *shape) and images.dtype == np.uint8


@pytest.mark.parametrize("name", COUNTS)
def test_the_three_parts_share_no_image(name: str) -> None:
    train, test, _ = COUNTS[name]
    parts = split(locate(name, DATA), 0, 0.1, 1000)
    held = min(1000, round(0.1 * train))
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (train - held, held, test)
    assert (parts.train.part, parts.validation.part, parts.test.part) == ("train", "train", "test")
    assert not set(parts.train.index.tolist()) & set(parts.validation.index.tolist())
    assert data.site_sizes(config({"domain": name})) == [train - held]


@pytest.mark.parametrize(("name", "classes"), [("cifar10", 10), ("cifar100", 100), ("mnist_m", 10)])
def test_every_prefix_of_the_sheets_is_balanced(name: str, classes: int) -> None:
    for part in ("train", "test"):
        labels = locate(name, DATA).labels(part)
        assert np.array_equal(labels, np.arange(len(labels)) % classes)


def test_tiles_are_found_again_in_any_order() -> None:
    place = locate("cifar10", DATA)
    index = np.array([2999, 0, 1024, 25, 1000])
    together = np.asarray(place.images("train", index))
    for position, image in zip(index, together, strict=True):
        assert np.array_equal(np.asarray(place.images("train", np.array([position])))[0], image)
    assert len({image.tobytes() for image in together}) == 5


@pytest.mark.parametrize(("name", "mean"), [("cifar10", (0.4914, 0.4822, 0.4465)), ("cifar100", (0.5071, 0.4865, 0.4409))])
def test_sheets_have_the_published_colours(name: str, mean: tuple[float, float, float]) -> None:
    images = np.asarray(locate(name, DATA).images("train", np.arange(5000)))
    assert np.abs(images.mean((0, 1, 2)) / 255 - mean).max() < 0.01


def test_mnist_m_is_made_of_mnist_and_its_digits_keep_their_labels() -> None:
    with np.load(FOLDER / "mnistm_regen.npz", allow_pickle=False) as archive:
        index = archive["mnist_index_test"].astype(np.int64)
    assert np.array_equal(locate("mnist_m", DATA).labels("test"), locate("mnist", DATA).labels("test")[index])


def test_sites_of_several_domains() -> None:
    settings = config(
        {"domain": "mnist", "count": 3, "samples": 50, "rotation": 45},
        {"domain": "svhn", "samples": 60},
        {"domain": "cifar100", "samples": 40, "classes": [97, 99]},
        {"domain": "digits"},
        grey=False,
        size=20,
        test_limit=100,
    )
    assert data.site_sizes(settings) == [50, 50, 50, 60, 40, 1294]
    for site in settings.roster:
        images = data.site_examples(settings, site)
        assert images.x.shape[1:] == (3, 20, 20) and images.x.dtype == torch.uint8 and images.x.float().std() > 10
    for label, spec in data.domain_specs(settings).items():
        assert len(data.test_images(settings, spec)) == 100, label
    assert data.num_classes(settings) == 100
    assert data.site_examples(settings, settings.roster[4]).y.unique().tolist() == [97, 99]


@pytest.mark.parametrize("name", ["iid", "classes", "size"])
def test_ten_thousand_sites(name: str) -> None:
    partition = {"name": name, "min_samples": 1}
    settings = config({"domain": "mnist", "count": 10000, "partition": partition})
    sizes = data.site_sizes(settings)
    assert len(sizes) == 10000 and min(sizes) >= 1 and sum(sizes) == 59000
    site = settings.roster[1234]
    assert len(data.site_examples(settings, site)) == sizes[1234]


def test_torchvision_agrees_on_fashion_mnist(tmp_path: Path) -> None:
    import gzip

    from torchvision.datasets import FashionMNIST

    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in (FOLDER / "FashionMNIST" / "raw").glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    theirs = FashionMNIST(tmp_path, train=False)
    ours = data.test_images(config({"domain": "fashion_mnist"}, size=28), SiteConfig(domain="fashion_mnist"))
    assert torch.equal(ours.x[:, 0], theirs.data) and torch.equal(ours.y, theirs.targets)
