"""Domains of the user's own: folders of images; their labels and places; what is damaged or missing."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedloom.clients import data
from fedloom.clients.data.found import absolute, short
from fedloom.clients.data.own import contents
from fedloom.conf import UserError
from tests.clients.own_data import colours, config, images, right


def test_a_folder_with_train_and_test_keeps_its_split_and_the_names_of_its_classes(tmp_path: Path):
    colours(tmp_path / "flags" / "train", 10)
    colours(tmp_path / "flags" / "test", 4)
    (tmp_path / "flags" / "train" / ".hidden").mkdir()
    (tmp_path / "flags" / "train" / "empty").mkdir()
    (tmp_path / "flags" / "train" / "red" / "notes.txt").write_text("no image")
    domain = f"images:{tmp_path}/flags/"
    settings = config({"domain": domain})
    found = data.site_examples(settings, settings.roster[0])
    spec = settings.roster[0].spec
    assert (len(found), len(data.test_images(settings, spec)), len(data.validation_images(settings, spec))) == (27, 12, 3)
    assert right(found) and right(data.test_images(settings, spec))
    assert data.class_names(spec) == ("blue", "green", "red") and data.num_classes(settings) == 3
    assert data.label(spec) == "flags"
    assert data.where(domain, settings.data) == f"{tmp_path}/flags/"


def test_a_folder_of_classes_alone_is_split_by_us_and_depends_on_its_name_and_not_on_its_place(tmp_path: Path):
    first, other = (colours(tmp_path / place / "flags", 20, suffix=".jpg") for place in ("here", "there"))
    found, again = images(f"images:{first}"), images(f"images:{other}")
    assert len(found) == 43 and right(found)
    assert torch.equal(found.x, again.x) and torch.equal(found.y, again.y)
    grey = images(f"images:{first}", grey=True)
    assert grey.x.shape == (43, 1, 6, 6)


def test_images_of_many_modes_and_sizes_become_alike(tmp_path: Path):
    for number, mode in enumerate(["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"] * 3):
        folder = tmp_path / "mixed" / ("a" if number % 2 else "b")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new(mode, (5 + number, 9)).save(folder / f"{number}.{'tif' if mode == 'CMYK' else 'png'}")
    assert images(f"images:{tmp_path}/mixed", size=8).x.shape == (17, 3, 8, 8)


@pytest.mark.parametrize("ending", ["jpg", "png", "tif", "webp"])
def test_images_are_turned_as_their_exif_orientation_says(tmp_path: Path, ending: str):
    pixels = np.zeros((16, 32), np.uint8)
    pixels[:8, :16] = 255  # white at the upper left
    for name, orientation in (("upright", 1), ("turned", 6), ("odd", 99)):
        (folder := tmp_path / "photos" / name).mkdir(parents=True)
        (exif := Image.Exif())[0x0112] = orientation
        Image.fromarray(pixels).save(folder / f"1.{ending}", exif=exif)
    read = {name: contents(f"images:{tmp_path}/photos").images["all"](np.array([place]))
            for place, name in enumerate(("odd", "turned", "upright"))}  # fmt: skip
    shown = {name: np.asarray(next(iter(images))) for name, images in read.items()}
    assert shown["upright"].shape[:2] == shown["odd"].shape[:2] == (16, 32) and shown["turned"].shape[:2] == (32, 16)
    assert shown["turned"][4, 12].mean() > 200 > 50 > shown["turned"][4, 4].mean(), "a quarter turn clockwise"


def test_variants_and_divisions_work_as_for_shipped_domains(tmp_path: Path):
    domain = f"images:{colours(tmp_path / 'flags', 40)}"
    settings = config(
        {"domain": domain, "count": 3, "partition": {"name": "dirichlet", "min_samples": 1}},
        {"domain": domain, "classes": [0, 2], "relabel": True, "rotation": 90},
    )
    specs = data.domain_specs(settings)
    assert list(specs) == ["flags", "flags_r90_c0-2"]
    assert data.class_names(specs["flags_r90_c0-2"]) == ("blue", "red")
    assert sum(data.site_sizes(settings)[:3]) == 86
    with pytest.raises(UserError, match=r"classes: got 3, but flags has the classes 0 to 2"):
        data.site_sizes(config({"domain": domain, "classes": [3]}))


def test_damaged_and_missing_files_are_named(tmp_path: Path):
    path = colours(tmp_path / "flags", 12) / "green" / "4.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=r"domain 'flags': .*green/4\.png cannot be read \(.*\)\. Replace it with an intact"):
        settings = config({"domain": f"images:{tmp_path}/flags"}, data={"validation": 0.0, "size": 6})
        data.site_examples(settings, settings.roster[0])
        data.test_images(settings, settings.roster[0].spec)
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and no more")
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "none.npz").touch()
    for domain, message in {
        f"npz:{tmp_path}/text.npz": r"domain 'text': .*text\.npz is not an npz file; takes one of images and labels",
        f"npz:{tmp_path}/none.npz": r"none\.npz is not an npz file",
        f"npz:{tmp_path}/cut.npz": r"domain 'cut': .*cut\.npz cannot be read",
        f"npz:{tmp_path}/one.npy": r"is a single array; takes an npz file",
        f"npz:{tmp_path}/no.npz": r"no\.npz does not exist\. Correct the path in",
        f"images:{tmp_path}/nowhere": r"nowhere does not exist\. Correct the path",
        f"images:{tmp_path}/flags/red/deeper": r"has no images in class folders",
        f"images:{tmp_path}/cut.npz": r"is not a folder\. Name a folder that has one folder of images per class",
        f"dataset:{tmp_path}/flags": r"domain 'flags': .*flags cannot be read \(",
        "images:": r"unknown domain 'images:'; did you mean 'images:PATH'",
        "imges:/data": r"unknown domain 'imges:/data'; did you mean 'images:PATH'",
    }.items():
        with pytest.raises(UserError, match=message):
            data.num_classes(config({"domain": domain}))


def cut(path: Path) -> None:
    Image.linear_gradient("L").save(path)
    path.write_bytes(path.read_bytes()[:-60])


def dangling(path: Path) -> None:
    path.symlink_to("/nowhere")


def huge(path: Path) -> None:
    Image.new("1", (20_000, 20_000)).save(path)


@pytest.mark.parametrize(
    "make, name, message",
    [
        (Path.mkdir, "x.png", "has the name of an image, but is not a regular file; remove it"),
        (dangling, "x.png", "has the name of an image, but is not a regular file; remove it"),
        (os.mkfifo, "x.png", "has the name of an image, but is not a regular file; remove it"),
        (Path.touch, "x.png", r"cannot be read \(UnidentifiedImageError"),
        (cut, "x.png", r"cannot be read \("),
        (cut, "x.jpg", r"cannot be read \(OSError: image file is truncated"),
        (huge, "x.png", r"cannot be read \(DecompressionBombError"),
    ],
)
def test_a_file_that_is_not_an_image_is_named_before_anything_starts(
    tmp_path: Path, make: Callable[[Path], None], name: str, message: str
):
    path = colours(tmp_path / "flags", 3) / "green" / name
    make(path)
    with pytest.raises(UserError, match=rf"domain 'flags': {path} {message}"):
        data.site_sizes(config({"domain": f"images:{tmp_path}/flags", "partition": {"min_samples": 1}}))


def test_hidden_files_are_not_images_and_a_pipe_is_not_a_file(tmp_path: Path):
    folder = colours(tmp_path / "flags", 20)
    (folder / "green" / "._1.png").write_text("x")
    (folder / "green" / ".thumbs").mkdir()
    (folder / "green" / ".thumbs" / "1.png").write_text("x")
    assert data.site_sizes(config({"domain": f"images:{folder}"})) == [43]
    os.mkfifo(tmp_path / "pipe.npz")
    for domain, message in {
        f"npz:{tmp_path}/pipe.npz": "is not a regular file",
        f"dataset:{tmp_path}/pipe.npz": "is not a folder",
        "images:~nobody-of-this-name/x": r"~nobody-of-this-name/x does not exist\. Correct the path",
    }.items():
        with pytest.raises(UserError, match=message):
            data.num_classes(config({"domain": domain}))


def test_a_train_folder_without_a_test_folder_is_not_taken_for_a_class(tmp_path: Path):
    colours(tmp_path / "flags" / "train", 3)
    with pytest.raises(
        UserError, match=r"has a folder train but no folder test\. Add it, or use only images:.*/flags/train"
    ):
        data.num_classes(config({"domain": f"images:{tmp_path}/flags"}))
    assert data.num_classes(config({"domain": f"images:{tmp_path}/flags/train"})) == 3


def test_paths_are_made_absolute_and_labels_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert absolute("images:a/../b/") == f"images:{tmp_path}/b"
    assert absolute("npz:~/x.npz") == f"npz:{Path.home()}/x.npz"
    assert [absolute(domain) for domain in ("digits", "my.images:load", "images:")] == [
        "digits",
        "my.images:load",
        "images:",
    ]
    assert [short(domain) for domain in ("digits", "my.images:load", "images:.", "npz:/a/b.c.npz")] == [
        "digits",
        "load",
        tmp_path.name,
        "b.c",
    ]


def test_two_domains_of_one_label_are_distinguished_by_their_paths(tmp_path: Path):
    first, other = (colours(tmp_path / place / "flags", 3) for place in ("here", "there"))
    settings = config({"domain": f"images:{first}"}, {"domain": f"images:{other}"})
    with pytest.raises(
        UserError, match=r"the label 'flags' stands for images:.*here/flags and images:.*there/flags\. Set a different"
    ):
        data.domain_specs(settings)
    (tmp_path / "here" / "flags").rename(tmp_path / "union")
    with pytest.raises(UserError, match=r"label 'union' is reserved for all domains together"):
        data.domain_specs(config({"domain": f"images:{tmp_path}/union"}))
