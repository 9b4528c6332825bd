"""Images that would become black or flat in silence: transparency, part of the range, one colour for all."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.clients import data
from fedloom.conf import UserError
from tests.clients.own_data import config, images

INK = np.zeros((12, 12), bool)
INK[3:9, 5:7] = True


def folder(root: Path, make: Callable[[int], Image.Image], ending: str = "png") -> str:
    for number in range(20):
        place = root / "ab"[number % 2] / f"{number}.{ending}"
        place.parent.mkdir(parents=True, exist_ok=True)
        make(number).save(place)
    return f"images:{root}"


def rgba(level: int = 0) -> Image.Image:
    """Ink on transparency."""
    pixels = np.full((12, 12, 4), level, np.uint8)
    pixels[..., 3] = INK * 255
    return Image.fromarray(pixels, "RGBA")


def palette(_: int) -> Image.Image:
    """Index 0 is transparent, 1 is black ink; both are black in the palette."""
    image = Image.fromarray(INK.astype(np.uint8), "P")
    image.putpalette([0, 0, 0] * 256)
    image.info["transparency"] = 0
    return image


def keyed(mode: str) -> Image.Image:
    """One colour stands for transparent."""
    image = Image.fromarray(np.where(INK, 40, 0).astype(np.uint8)).convert(mode)
    image.info["transparency"] = 0 if mode == "L" else (0, 0, 0)
    return image


MAKES = {
    "RGBA": lambda _: rgba(),
    "LA": lambda _: rgba().convert("LA"),
    "P": palette,
    "L key": lambda _: keyed("L"),
    "RGB key": lambda _: keyed("RGB"),
}


@pytest.mark.parametrize("kind", MAKES)
@pytest.mark.parametrize("grey", [True, False])
def test_ink_on_transparency_is_seen_on_white(tmp_path: Path, kind: str, grey: bool):
    found = images(folder(tmp_path / "ink", MAKES[kind]), size=12, grey=grey).x
    assert int(found[0, 0, 0, 0]) == 255 and int(found[0, 0, 4, 5]) <= 40


def test_images_that_are_opaque_stay_as_they_are(tmp_path: Path):
    pixels = np.random.default_rng(0).integers(0, 256, (12, 12, 3), np.uint8)
    opaque = np.dstack([pixels, np.full((12, 12), 255, np.uint8)])
    with_alpha = images(folder(tmp_path / "one", lambda _: Image.fromarray(opaque, "RGBA")), size=12)
    without = images(folder(tmp_path / "two", lambda _: Image.fromarray(pixels)), size=12)
    assert torch.equal(with_alpha.x[0], without.x[0])
    levels = np.arange(144, dtype=np.uint8).reshape(12, 12)
    gray = Image.merge("LA", (Image.fromarray(levels), Image.new("L", (12, 12), 255)))
    assert np.array_equal(images(folder(tmp_path / "la", lambda _: gray), size=12, grey=True).x[0, 0], levels)


def twelve_bits(number: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(number).integers(0, 4096, (12, 12)).astype(np.uint16))


def test_the_level_that_is_white_is_the_top_of_the_range(tmp_path: Path):
    site = {"domain": folder(tmp_path / "scans", twelve_bits)}
    (line,) = data.remarks(config(site, size=12))
    assert "of 0 to 65535; set data.white to the level that is white" in line
    assert not data.remarks(config(site, data={"size": 12, "white": 4095}))


@pytest.mark.parametrize("make, ending, message", [
    (lambda _: rgba(255), "png", "show only the same single colour"),
    (lambda _: Image.new("L", (12, 12), 7), "png", "show only the same single colour"),
])  # fmt: skip
def test_images_that_became_flat_or_dark_are_refused_before_the_run_and_at_a_site(
    tmp_path: Path, make: Callable[[int], Image.Image], ending: str, message: str
):
    domain = folder(tmp_path / "dark", make, ending)
    with pytest.raises(UserError, match=message):
        data.site_sizes(config({"domain": domain}, size=12))
    with pytest.raises(UserError, match=message):
        images(domain, size=12)


@pytest.mark.parametrize("array", [
    np.full((40, 6, 6), 0.5, np.float32),
    np.random.default_rng(0).random((40, 6, 6)).astype(np.float32) / 16,
    np.random.default_rng(0).integers(0, 17, (40, 6, 6)),
    np.random.default_rng(0).integers(0, 2, (40, 6, 6)).astype(np.uint8),
    np.r_[np.zeros((38, 6, 6)), np.random.default_rng(0).random((2, 6, 6))],
])  # fmt: skip
def test_arrays_that_show_nothing_or_use_a_small_part_of_the_range_are_refused(tmp_path: Path, array: np.ndarray):
    np.savez(tmp_path / "flat.npz", x=array, y=np.arange(40) % 2)
    with pytest.raises(UserError, match=r"domain 'flat': .*(the same single colour|use only the levels)"):
        data.site_sizes(config({"domain": f"npz:{tmp_path}/flat.npz"}))


def test_images_of_a_single_colour_each_are_reported(tmp_path: Path):
    x = np.repeat(np.arange(40, dtype=np.uint8) * 6, 36).reshape(40, 6, 6)
    np.savez(tmp_path / "tones.npz", x=x, y=np.arange(40) % 2)
    settings = config({"domain": f"npz:{tmp_path}/tones.npz"})
    assert data.site_sizes(settings)
    assert "have a single colour each; check that this is intended" in data.remarks(settings)[0]


@pytest.mark.parametrize(("y", "name"), [(np.zeros(40, int), "class 0"), (np.array(["cat"] * 40), "class 'cat'")])
def test_labels_of_a_single_class_are_reported(y: np.ndarray, name: str, tmp_path: Path):
    x = np.random.default_rng(0).integers(0, 256, (40, 6, 6)).astype(np.uint8)
    np.savez(tmp_path / "cats.npz", x=x, y=y)
    (line,) = data.remarks(settings := config({"domain": f"npz:{tmp_path}/cats.npz"}))
    assert line == f"Warning: domain 'cats': all 40 examples of part 'all' have the same label ({name}); check the labels"
    np.savez(tmp_path / "cats.npz", x=x, y=np.r_[y[1:], np.array(["dog"] if y.dtype.kind == "U" else [1])])
    assert not data.remarks(settings)


def test_deep_colours_of_sixteen_bits_are_looked_at_as_well(tmp_path: Path):
    """PIL reads them with eight."""
    x = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 3)).astype(np.uint8) // 16
    np.savez(tmp_path / "deep.npz", x=x, y=np.arange(40) % 2)
    with pytest.raises(UserError, match=r"only the levels 0 to 15 of 0 to 255"):
        data.site_sizes(config({"domain": f"npz:{tmp_path}/deep.npz"}))
