"""Domains of the user's own: folders of images, npz files, data sets on disk, functions; what is refused."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from clients import data
from clients.data import domains
from clients.data.images import Images
from clients.data.own import absolute, contents, short
from conf import Config, UserError
from conf.load import from_mapping
from conf.sites import roster

COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}

MODULE = '''
import numpy as np
import torch
from PIL import Image

X = np.repeat(np.arange(60, dtype=np.uint8) % 3 * 100, 36).reshape(60, 6, 6)
Y = np.arange(60) % 3


class Set:
    """As torch has them: PIL images and labels."""

    classes = ["none", "some", "much"]

    def __init__(self, train=True):
        self.count = 60 if train else 30

    def __len__(self):
        return self.count

    def __getitem__(self, place):
        return Image.fromarray(X[place]), int(Y[place])


def arrays():
    return X, Y


def split(split):
    return (X, Y) if split == "train" else (X[:30], Y[:30])


def mapping():
    return {"train": (X, Y), "test": (X[:30], Y[:30])}


def batches():
    for start in range(0, 60, 20):
        yield torch.from_numpy(X[start : start + 20, None] / 255), torch.from_numpy(Y[start : start + 20])


def samples():
    return ((np.tile(X[place][..., None], 3), f"class {Y[place]}") for place in range(60))


def nothing():
    return None


def other():
    return {"a": 1}


def needing(folder):
    return X, Y


def failing():
    raise RuntimeError("the disk is gone\\nreally")


number = 3
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module outside of this project, on the search path."""
    (tmp_path / "my_images.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    contents.cache_clear()
    domains._outside.cache_clear()
    yield "my_images"
    sys.modules.pop("my_images", None)


def config(*sites: dict[str, Any], grey: bool = False, size: int = 6, **more: Any) -> Config:
    return from_mapping({"experiment": "test", "sites": list(sites), "data": {"size": size, "grey": grey}, **more})


def images(domain: str, **more: Any) -> Images:
    settings = config({"domain": domain}, **more)
    return data.site_images(settings, roster(settings)[0])


def colours(root: Path, count: int, size: int = 6, suffix: str = ".png") -> Path:
    """A folder of `count` images of one colour in each class folder."""
    for name, colour in COLOURS.items():
        (root / name / "deeper").mkdir(parents=True)
        for number in range(count):
            place = root / name / ("deeper" if number % 2 else "") / f"{number}{suffix}"
            Image.new("RGB", (size + number % 3, size), colour).save(place)
    return root


def right(found: Images) -> bool:
    """Whether each image has the colour of its class."""
    channel = torch.tensor([2, 1, 0])[found.y]
    return bool((found.x.float().mean((2, 3)).argmax(1) == channel).all())


def test_a_folder_with_train_and_test_keeps_its_split_and_the_names_of_its_classes(tmp_path: Path):
    colours(tmp_path / "flags" / "train", 10)
    colours(tmp_path / "flags" / "test", 4)
    (tmp_path / "flags" / "train" / ".hidden").mkdir()
    (tmp_path / "flags" / "train" / "empty").mkdir()
    (tmp_path / "flags" / "train" / "red" / "notes.txt").write_text("no image")
    domain = f"images:{tmp_path}/flags/"
    settings = config({"domain": domain})
    found = data.site_images(settings, roster(settings)[0])
    spec = roster(settings)[0].spec
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
    with pytest.raises(UserError, match=r"classes: 3 is not among flags's 0 to 2"):
        data.site_sizes(config({"domain": domain, "classes": [3]}))


@pytest.mark.parametrize("form", ["uint8", "float32", "int64", "bool"])
@pytest.mark.parametrize(
    "names", [("x", "y"), ("x_train", "y_train"), ("X_train", "Y_train"), ("train_images", "train_labels")]
)
def test_npz_files_of_several_spellings_and_kinds_of_numbers(tmp_path: Path, form: str, names: tuple[str, str]):
    x = np.zeros((60, 6, 6, 1) if form == "bool" else (60, 6, 6), form)
    x[::2] = 1 if form in ("float32", "bool") else 255
    y = (np.arange(60) % 2)[:, None]
    arrays = {names[0]: x, names[1]: y}
    if "train" in names[0]:
        arrays |= {name.replace("train", "test"): array[:20] for name, array in arrays.items()}
    np.savez(tmp_path / "mine.npz", **arrays)
    found = images(f"npz:{tmp_path}/mine.npz", grey=True)
    assert len(found) == (54 if "train" in names[0] else 43)
    assert torch.equal(found.x[:, 0, 0, 0], torch.where(found.y == 0, 255, 0).to(torch.uint8))
    assert data.num_classes(config({"domain": f"npz:{tmp_path}/mine.npz"})) == 2


def test_labels_may_be_names_and_the_label_in_tables_is_the_files(tmp_path: Path):
    np.savez_compressed(tmp_path / "pets.v1.npz", x=np.zeros((30, 5, 7, 3), np.uint8), y=["dog", "cat", "axolotl"] * 10)
    spec = roster(config({"domain": f"npz:{tmp_path}/pets.v1.npz"}))[0].spec
    assert data.class_names(spec) == ("axolotl", "cat", "dog")
    assert data.label(spec) == "pets.v1"


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"x": np.zeros((9, 4), np.uint8), "y": np.zeros(9)}, r"has images of shape \[9, 4\], takes \[n, h, w\]"),
        (
            {"x": np.zeros((9, 3, 4, 4), np.uint8), "y": np.zeros(9)},
            r"shape \[9, 3, 4, 4\], takes .* \[n, h, w, c\] with 1 or 3",
        ),
        ({"x": np.zeros((9, 4, 4)), "y": np.zeros(8)}, r"has 9 images and 8 labels"),
        (
            {"x": np.full((9, 4, 4), 2.0), "y": np.zeros(9)},
            r"float64 images with entries from 2 to 2, takes them from 0 to 1",
        ),
        ({"x": np.full((9, 4, 4), np.nan), "y": np.zeros(9)}, r"entries from nan to nan"),
        ({"x": np.full((9, 4, 4), 256), "y": np.zeros(9)}, r"int64 images .* takes them from 0 to 255"),
        ({"x": np.zeros((9, 4, 4)), "y": np.full(9, -1)}, r"has labels from -1 to -1, takes class numbers from 0"),
        ({"x": np.zeros((9, 4, 4)), "y": np.full(9, 2**40)}, r"takes class numbers from 0 to 99999"),
        ({"x": np.zeros((9, 4, 4)), "y": np.full(9, 0.5)}, r"has labels of float64 that are no whole numbers"),
        ({"x": np.zeros((9, 4, 4)), "y": np.eye(9)}, r"has labels of shape \[9, 9\], takes one for each image"),
        ({"x": np.zeros((0, 4, 4)), "y": np.zeros(0)}, r"has labels of shape \[0\]"),
        ({"images": np.zeros((9, 4, 4)), "y": np.zeros(9)}, r"has images, y; takes x and y, or x_train"),
        (
            {"x": np.array([{}] * 9), "y": np.zeros(9)},
            r"mine\.npz cannot be read \(ValueError: Object arrays cannot be loaded",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_told_in_one_line(tmp_path: Path, arrays: dict[str, Any], message: str):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(UserError, match=message) as caught:
        data.num_classes(config({"domain": f"npz:{tmp_path}/mine.npz"}))
    assert "mine.npz" in str(caught.value) and "\n" not in str(caught.value)


def test_damaged_and_missing_files_are_named(tmp_path: Path):
    path = colours(tmp_path / "flags", 12) / "green" / "4.png"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(UserError, match=r"domain 'flags': .*flags/green/4\.png cannot be read \(.*\); put an intact copy"):
        settings = config({"domain": f"images:{tmp_path}/flags"}, data={"validation": 0.0, "size": 6})
        data.site_images(settings, roster(settings)[0])
        data.test_images(settings, roster(settings)[0].spec)
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04 and no more")
    np.save(tmp_path / "one.npy", np.zeros(3))
    for domain, message in {
        f"npz:{tmp_path}/cut.npz": r"domain 'cut': .*cut\.npz cannot be read",
        f"npz:{tmp_path}/one.npy": r"is a single array; takes an npz file",
        f"npz:{tmp_path}/no.npz": r"there is no .*no\.npz; correct the path in",
        f"images:{tmp_path}/nowhere": r"there is no .*nowhere; correct the path",
        f"images:{tmp_path}/cut.npz": r"cannot be read \(NotADirectoryError",
        f"images:{tmp_path}/flags/red/deeper": r"has no images in class folders",
        f"dataset:{tmp_path}/flags": r"domain 'flags': .*flags cannot be read \(",
        "images:": r"unknown domain 'images:'; did you mean 'images:PATH'",
        "imges:/data": r"unknown domain 'imges:/data'; did you mean 'images:PATH'",
    }.items():
        with pytest.raises(UserError, match=message):
            data.num_classes(config({"domain": domain}))


def test_a_train_folder_without_a_test_folder_is_not_taken_for_a_class(tmp_path: Path):
    colours(tmp_path / "flags" / "train", 3)
    with pytest.raises(
        UserError, match=r"has a folder train but no folder test; add it, or take images:.*/flags/train alone"
    ):
        data.num_classes(config({"domain": f"images:{tmp_path}/flags"}))
    assert data.num_classes(config({"domain": f"images:{tmp_path}/flags/train"})) == 3


@pytest.fixture(scope="module")
def rows() -> dict[str, Any]:
    pixels = [Image.new("RGB", (6 + number % 2, 6), list(COLOURS.values())[number % 3]) for number in range(60)]
    return {"number": list(range(60)), "picture": pixels, "kind": [number % 3 for number in range(60)]}


def test_a_data_set_on_disk_is_read_by_the_types_of_its_columns(tmp_path: Path, rows: dict[str, Any]):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
    from datasets import Image as Picture

    kinds = Features({"number": Value("int64"), "picture": Picture(), "kind": ClassLabel(names=list(COLOURS))})
    whole = Dataset.from_dict(rows, features=kinds)
    whole.save_to_disk(tmp_path / "whole")
    DatasetDict({"train": whole, "test": whole.select(range(0, 60, 2))}).save_to_disk(tmp_path / "split")
    DatasetDict({"train": whole, "validation": whole}).save_to_disk(tmp_path / "odd")
    whole.remove_columns("kind").save_to_disk(tmp_path / "none")
    for name, counts in {"whole": (43, 12), "split": (54, 30)}.items():
        settings = config({"domain": f"dataset:{tmp_path}/{name}"})
        spec = roster(settings)[0].spec
        found, test = data.site_images(settings, roster(settings)[0]), data.test_images(settings, spec)
        assert (len(found), len(test)) == counts and right(found) and right(test)
        assert data.class_names(spec) == tuple(COLOURS) and data.label(spec) == name
    for name, message in {
        "odd": r"has the splits train, validation; takes train and test",
        "none": r"has the columns",
    }.items():
        with pytest.raises(UserError, match=message):
            data.num_classes(config({"domain": f"dataset:{tmp_path}/{name}"}))


def test_a_data_set_of_plain_columns_is_read_by_their_names(tmp_path: Path):
    from datasets import Array2D, Dataset, Features, Value

    kinds = Features({"image": Array2D((6, 6), "uint8"), "label": Value("string")})
    columns = {"image": [np.full((6, 6), number % 2 * 200, np.uint8) for number in range(40)], "label": ["a", "b"] * 20}
    Dataset.from_dict(columns, features=kinds).save_to_disk(tmp_path / "plain")
    found = images(f"dataset:{tmp_path}/plain", grey=True)
    assert torch.equal(found.x[:, 0, 0, 0].long(), found.y * 200)


@pytest.mark.parametrize("name", ["arrays", "split", "mapping", "batches", "samples", "Set"])
def test_a_function_of_another_package_gives_images(package: str, name: str):
    domain = f"{package}:{name}"
    found = images(domain, grey=True)
    assert len(found) == (43 if name in ("arrays", "batches", "samples") else 54)
    assert torch.equal(found.x[:, 0, 0, 0].long(), found.y * 100)
    spec = roster(config({"domain": domain}))[0].spec
    assert data.label(spec) == name
    expected = {"Set": ("none", "some", "much"), "samples": ("class 0", "class 1", "class 2")}
    assert data.class_names(spec) == expected.get(name, ("0", "1", "2"))


@pytest.mark.parametrize(
    "name, message",
    [
        ("nothing", r"domain 'nothing': my_images:nothing gave a NoneType; takes arrays \(images, labels\)"),
        ("other", r"gave a; takes train and test"),
        ("needing", r"domain\.folder: missing; 'my_images:needing' needs it"),
        ("failing", r"domain: 'my_images:failing' failed \(RuntimeError: the disk is gone\)"),
        ("number", r"domain 'my_images:number': is of the type int, takes a function"),
        ("array", r"domain: 'my_images:array' has no 'array'; did you mean 'arrays'\?"),
    ],
)
def test_a_function_that_gives_none_is_told_in_one_line(package: str, name: str, message: str):
    with pytest.raises(UserError, match=message) as caught:
        data.num_classes(config({"domain": f"{package}:{name}"}))
    assert "\n" not in str(caught.value)


def test_a_package_offers_a_domain_by_entry_point(package: str, tmp_path: Path):
    info = tmp_path / "my_images-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-images\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fedloom.domains]\nthrees = my_images:arrays\n")
    sys.path.append(str(tmp_path / "nowhere"))  # what is offered is looked up once for each search path
    try:
        assert data.num_classes(config({"domain": "threes"})) == 3
        assert data.label(roster(config({"domain": "threes"}))[0].spec) == "threes"
        with pytest.raises(UserError, match=r"unknown domain 'threse'; did you mean 'threes'"):
            data.num_classes(config({"domain": "threse"}))
    finally:
        sys.path.remove(str(tmp_path / "nowhere"))


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


def test_two_domains_of_one_label_are_told_apart_by_their_paths(tmp_path: Path):
    first, other = (colours(tmp_path / place / "flags", 3) for place in ("here", "there"))
    settings = config({"domain": f"images:{first}"}, {"domain": f"images:{other}"})
    with pytest.raises(
        UserError, match=r"the label 'flags' stands for images:.*here/flags and images:.*there/flags; give each"
    ):
        data.domain_specs(settings)
    (tmp_path / "here" / "flags").rename(tmp_path / "union")
    with pytest.raises(UserError, match=r"label 'union' stands for all domains together"):
        data.domain_specs(config({"domain": f"images:{tmp_path}/union"}))
