"""Images that are there and are not read: links, endings, places. What is left out is named."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedloom.clients import data
from fedloom.conf import UserError
from tests.clients.own_data import config
from tests.clients.test_data_changed import picture


def pets(root: Path, count: int = 10) -> Path:
    for name in ("cats", "dogs"):
        for number in range(count):
            picture(root / name / f"{number}.png", 100 + number)
    return root


def found(root: Path) -> tuple[int, str]:
    """How many images there are in all, and what is said of what is left out."""
    settings = config({"domain": f"images:{root}", "partition": {"min_samples": 1}}, grey=True)
    spec = settings.roster[0].spec
    parts = (
        data.site_examples(settings, settings.roster[0]),
        data.validation_images(settings, spec),
        data.test_images(settings, spec),
    )
    return sum(map(len, parts)), "\n".join(data.remarks(settings))


def test_linked_folders_and_files_are_followed_at_whatever_depth(tmp_path: Path):
    root, away = pets(tmp_path / "pets"), tmp_path / "away"
    picture(away / "deep" / "100.PNG", 90)
    picture(tmp_path / "one.png", 91)
    (root / "cats" / "more").symlink_to(away, target_is_directory=True)
    (root / "dogs" / "one.png").symlink_to(tmp_path / "one.png")
    picture(tmp_path / "birds" / "1.png", 92)
    (root / "birds").symlink_to(tmp_path / "birds", target_is_directory=True)
    assert found(root) == (23, "")


@pytest.mark.parametrize("place, target", [("cats/loop", "."), ("cats/up", ".."), ("dogs/same", "cats"), ("birds", "dogs")])
def test_a_loop_of_links_or_a_folder_that_exists_twice_is_refused(tmp_path: Path, place: str, target: str):
    root = pets(tmp_path / "pets")
    goal = {".": root / "cats", "..": root}.get(target, root / target)
    (root / place).symlink_to(goal, target_is_directory=True)
    with pytest.raises(
        UserError, match=r"domain 'pets': .* is a link to .*, so the same images would count twice; remove one"
    ):
        found(root)


def test_what_is_not_read_is_named_by_number_and_ending(tmp_path: Path):
    root = pets(tmp_path / "pets")
    for number in range(3):
        (root / "cats" / f"{number}.HEIC").write_bytes(b"x")
    (root / "dogs" / "README").write_text("x")
    (root / "dogs" / "gone").symlink_to("/nowhere/at/all")
    (root / "dogs" / "._1.png").write_text("x")
    (root / "fish").mkdir()
    (root / "newts").mkdir()
    (root / "newts" / "1.heic").write_text("x")
    picture(root / "lost.png")
    (root / "notes.txt").write_text("x")
    number, said = found(root)
    assert number == 20
    assert said == (
        "domain 'pets': left out: 4 files ending in .heic, 2 files without an ending, 1 file ending in .txt, "
        "1 hidden image, 1 image outside the class folders, the class 'fish', whose folder has no images, "
        "the class 'newts', whose folder has no images"
    )


def test_a_domain_without_a_single_image_that_is_read_says_what_is_there(tmp_path: Path):
    (tmp_path / "pets" / "cats").mkdir(parents=True)
    (tmp_path / "pets" / "cats" / "1.heic").write_text("x")
    with pytest.raises(UserError, match=r"has no images in class folders .*; left out: 1 file ending in \.heic"):
        found(tmp_path / "pets")


def test_parts_beside_train_and_test_are_named(tmp_path: Path):
    for part in ("train", "test", "val"):
        pets(tmp_path / "pets" / part)
    (tmp_path / "pets" / "test" / "fish").mkdir()
    assert found(tmp_path / "pets") == (
        40,
        "domain 'pets': left out: the class 'fish', whose folder has no images, the folder 'val' next to train and test",
    )


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look into every folder")
def test_a_folder_that_may_not_be_looked_into_is_named(tmp_path: Path):
    root = pets(tmp_path / "pets")
    (root / "cats").chmod(0)
    with pytest.raises(UserError, match=r"domain 'pets': .* cannot be read \(PermissionError"):
        found(root)
    (root / "cats").chmod(0o700)


def test_arrays_and_splits_that_are_not_read_are_named(tmp_path: Path):
    from datasets import Array2D, ClassLabel, Dataset, DatasetDict, Features

    x = np.random.default_rng(0).integers(0, 256, (40, 6, 6), np.uint8)
    y = np.arange(40) % 2
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y, x_val=x, y_val=y)
    assert data.remarks(config({"domain": f"npz:{tmp_path}/a.npz"})) == [
        "domain 'a': left out: the array 'x_val', the array 'y_val'"
    ]
    kinds = Features({"image": Array2D((6, 6), "uint8"), "label": ClassLabel(names=["a", "b"])})
    rows = Dataset.from_dict({"image": list(x), "label": y}, features=kinds)
    DatasetDict({"train": rows, "test": rows, "extra": rows}).save_to_disk(tmp_path / "b")
    assert data.remarks(config({"domain": f"dataset:{tmp_path}/b"})) == [
        "domain 'b': left out: the split 'extra' of 40 rows"
    ]
    np.savez(tmp_path / "two.npz", x=x, y=y, images=x, labels=1 - y)
    with pytest.raises(UserError, match=r"has x, y and images, labels\. Remove all but one pair of images and labels"):
        data.site_sizes(config({"domain": f"npz:{tmp_path}/two.npz"}))
