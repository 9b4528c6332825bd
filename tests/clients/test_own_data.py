"""Domains of the user's own that are arrays: npz files and data sets on disk; what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from fedloom.clients import data
from fedloom.clients.data.arrays import images_of
from fedloom.clients.data.domains import find
from fedloom.conf import UserError
from tests.clients.own_data import COLOURS, config, images, right


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
    white, black, kind = (1.0, -1.0, torch.float32) if form == "float32" else (255, 0, torch.uint8)
    assert torch.equal(found.x[:, 0, 0, 0], torch.where(found.y == 0, white, black).to(kind))
    assert data.num_classes(config({"domain": f"npz:{tmp_path}/mine.npz"})) == 2


def test_labels_may_be_names_and_the_label_in_tables_is_the_files(tmp_path: Path):
    np.savez_compressed(tmp_path / "pets.v1.npz", x=np.zeros((30, 5, 7, 3), np.uint8), y=["dog", "cat", "axolotl"] * 10)
    spec = config({"domain": f"npz:{tmp_path}/pets.v1.npz"}).roster[0].spec
    assert data.class_names(spec) == ("axolotl", "cat", "dog")
    assert data.label(spec) == "pets.v1"


def test_sites_of_one_domain_share_its_test_images_by_chance_in_whatever_order_these_are(tmp_path: Path):
    x, y = np.tile((np.arange(400) % 251).astype(np.uint8)[:, None, None], (4, 4)), np.arange(400) % 2
    np.savez(tmp_path / "in_turn.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    settings = config({"domain": f"npz:{tmp_path}/in_turn.npz", "count": 2}, grey=True)
    parts = [data.own_examples(settings, site, "test") for site in settings.roster]
    assert all(60 < int(part.y.sum()) < 140 for part in parts), "each has both classes"
    both = torch.cat([part.x[:, 0, 0, 0] for part in parts]).sort().values
    assert torch.equal(both, torch.from_numpy(x[:, 0, 0]).sort().values)


def test_names_that_are_numbers_are_in_the_order_of_numbers(tmp_path: Path):
    np.savez(tmp_path / "mine.npz", x=np.zeros((33, 4, 4), np.uint8), y=[str(number) for number in range(11)] * 3)
    settings = config({"domain": f"npz:{tmp_path}/mine.npz"})
    assert data.class_names(settings.roster[0].spec) == tuple(map(str, range(11)))
    np.savez(tmp_path / "mixed.npz", x=np.zeros((9, 4, 4), np.uint8), y=["2", "10", "x"] * 3)
    assert data.class_names(config({"domain": f"npz:{tmp_path}/mixed.npz"}).roster[0].spec) == ("10", "2", "x")


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({"x": np.zeros((9, 4), np.uint8), "y": np.zeros(9)}, r"whole numbers, \[9, 4\]\. Write \?inputs=tokens"),
        ({"x": np.zeros((9, 4, 4)), "y": np.zeros(8)}, r"has 9 inputs and 8 targets"),
        (
            {"x": np.full((9, 4, 4), 2.0), "y": np.zeros(9)},
            r"from 2 to 2; images take values from 0 to 1: divide them, if these are images\. .*inputs=sequence",
        ),
        (
            {"x": np.full((9, 3, 8, 8), 0.5), "y": np.zeros(9)},
            r"has inputs of shape \[9, 3, 8, 8\]; channels of images come last, .*inputs=array",
        ),
        ({"x": np.zeros((9, 1, 28, 28), np.uint8), "y": np.zeros(9)}, r"channels of images come last"),
        ({"x": np.full((9, 4, 4), np.nan), "y": np.zeros(9)}, r"values from nan to nan"),
        ({"x": np.full((9, 4), np.nan), "y": np.zeros(9)}, r"has 9 inputs with missing or infinite values"),
        ({"x": np.full((9, 4, 4), 65536), "y": np.zeros(9)}, r"int64 images .* takes values from 0 to 65535"),
        ({"x": np.zeros((9, 4, 4)), "y": np.full(9, -1)}, r"has labels from -1 to -1, takes class numbers from 0"),
        ({"x": np.zeros((9, 4, 4)), "y": np.full(9, 2**40)}, r"takes class numbers from 0 to 99999"),
        ({"x": np.zeros((9, 4, 4)), "y": np.full(9, np.nan)}, r"has 9 missing or infinite targets"),
        ({"x": np.zeros((9, 4, 4)), "y": np.eye(9)}, r"a single 1 in each row\. Write \?task=class"),
        ({"x": np.zeros((0, 4, 4)), "y": np.zeros(0)}, r"has inputs of shape \[0, 4, 4\]"),
        ({"images": np.zeros((9, 4, 4)), "y": np.zeros(9)}, r"has images, y; takes x and y, or x_train"),
        (
            {"x_train": np.zeros((9, 4, 4)), "y_train": ["a"] * 9, "x_test": np.zeros((9, 4, 4)), "y_test": np.zeros(9)},
            r"has classes that are names in train, numbers in test",
        ),
        (
            {"x": np.array([{}] * 9), "y": np.zeros(9)},
            r"mine\.npz has Python objects in 'x', which are not read\. Save numbers or texts, such as x\.astype\(str\)",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_reported_in_one_line(tmp_path: Path, arrays: dict[str, Any], message: str):
    np.savez(tmp_path / "mine.npz", **arrays)
    with pytest.raises(UserError, match=message) as caught:
        data.num_classes(config({"domain": f"npz:{tmp_path}/mine.npz"}))
    assert "mine.npz" in str(caught.value) and "\n" not in str(caught.value)


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
        spec = settings.roster[0].spec
        found, test = data.site_examples(settings, settings.roster[0]), data.test_images(settings, spec)
        assert (len(found), len(test)) == counts and right(found) and right(test)
        assert data.class_names(spec) == tuple(COLOURS) and data.label(spec) == name
    for name, message in {
        "odd": r"has the splits train, validation; takes train and test",
        "none": r"has the columns",
    }.items():
        with pytest.raises(UserError, match=message):
            data.num_classes(config({"domain": f"dataset:{tmp_path}/{name}"}))


def test_parts_of_a_data_set_whose_classes_are_named_in_another_order(tmp_path: Path, rows: dict[str, Any]):
    from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
    from datasets import Image as Picture

    def of(names: list[str]) -> Any:
        kinds = Features({"number": Value("int64"), "picture": Picture(), "kind": ClassLabel(names=names)})
        return Dataset.from_dict(
            {**rows, "kind": [names.index(list(COLOURS)[kind]) for kind in rows["kind"]]}, features=kinds
        )

    DatasetDict({"train": of(list(COLOURS)), "test": of([*reversed(COLOURS)])}).save_to_disk(tmp_path / "turned")
    settings = config({"domain": f"dataset:{tmp_path}/turned"})
    spec = settings.roster[0].spec
    assert data.class_names(spec) == tuple(COLOURS)
    assert right(data.site_examples(settings, settings.roster[0])) and right(data.test_images(settings, spec))


def test_a_data_set_of_plain_columns_is_read_by_their_names(tmp_path: Path):
    from datasets import Array2D, Dataset, Features, Value

    kinds = Features({"image": Array2D((6, 6), "uint8"), "label": Value("string")})
    columns = {"image": [np.full((6, 6), number % 2 * 200, np.uint8) for number in range(40)], "label": ["a", "b"] * 20}
    Dataset.from_dict(columns, features=kinds).save_to_disk(tmp_path / "plain")
    found = images(f"dataset:{tmp_path}/plain", grey=True)
    assert torch.equal(found.x[:, 0, 0, 0].long(), found.y * 200)


def tokens(folder: Path, last: Any) -> str:
    x = np.random.default_rng(0).integers(1, 9, (40, 6))
    np.savez(folder / "text.npz", x=x, y=last if np.ndim(last) else np.c_[x[:, 1:], np.full(40, last)])
    return f"npz:{folder}/text.npz?inputs=tokens&task=tokens"


@pytest.mark.parametrize("last, vocabulary", [(20, 21), (0, 9), (-100, 9)])
def test_a_token_that_only_ends_texts_is_in_the_vocabulary(tmp_path: Path, last: int, vocabulary: int):
    domain = find(tokens(tmp_path, last))
    assert (domain.schema.vocabulary, domain.classes) == (vocabulary, vocabulary)


@pytest.mark.parametrize("last, message", [
    (-1, "has targets that are not tokens: takes whole numbers from 1, 0 or -100 where a step has no target"),
    (2.5, "has targets of type float64"),
    (np.ones((40, 3), np.int64), r"shape \[40, 3\]; task=tokens takes a whole number for each step, \[n, 6\]"),
    (np.full((40, 6), "a"), "has targets of type <U1"),
])  # fmt: skip
def test_next_tokens_that_no_step_can_have_are_refused(tmp_path: Path, last: Any, message: str):
    with pytest.raises(UserError, match=message):
        find(tokens(tmp_path, last))


def test_images_of_wide_whole_numbers_share_one_range():
    bright, dark = np.full((4, 4), 4000, np.int32), np.full((5, 4), 100, np.int32)
    assert [image.dtype for image in images_of([bright, dark])] == [np.uint16, np.uint16]
    assert [image.dtype for image in images_of([dark, dark])] == [np.uint8, np.uint8]
    assert [image.dtype for image in images_of([bright, dark.astype(np.uint8)])] == [np.uint16, np.uint8]


def test_tiff_files_of_wide_whole_numbers_share_one_range(tmp_path: Path):
    for place, level in enumerate((100, 4000)):
        (tmp_path / "scans" / str(place)).mkdir(parents=True)
        for number in range(20):
            array = np.full((2, 8, 8), level, np.int32)
            array[:, 0, 0] += number
            tifffile.imwrite(tmp_path / "scans" / str(place) / f"{number}.tif", array, planarconfig="separate")
    found = images(f"images:{tmp_path}/scans", grey=False)
    levels = sorted({float(x[0, 4, 4]) for x in found.x})
    assert levels == pytest.approx([level / 32767.5 - 1 for level in (100, 4000)], abs=1e-6)


def scans(root: Path, array: np.ndarray, **how: Any) -> str:
    """A folder of two classes, with TIFF files as tifffile writes the array."""
    for place in range(2):
        (root / str(place)).mkdir(parents=True)
        for number in range(20):
            tifffile.imwrite(root / str(place) / f"{number}.tif", array, **how)
    return f"images:{root}"


def test_sixteen_bits_of_four_channels_are_data_and_eight_bits_are_transparency(tmp_path: Path):
    levels = np.random.default_rng(0).integers(0, 60_000, (8, 8, 4), np.uint16)
    deep = images(scans(tmp_path / "deep", levels), grey=False, size=8).x[0]
    assert torch.allclose(deep, torch.from_numpy(levels.astype(np.float32)).permute(2, 0, 1) / 32767.5 - 1, atol=1e-6)
    flat = images(scans(tmp_path / "flat", (levels // 256).astype(np.uint8)), grey=False, size=8).x[0]
    assert flat.shape == (3, 8, 8) and flat.dtype == torch.uint8


@pytest.mark.parametrize("array, message", [
    (np.zeros((3, 8, 8), np.uint8), r"0\.tif has 3 pages, takes one; save one page per file, or an array of all as npz:P"),
    (np.full((8, 8), 300, np.float32), r"0\.tif has floats from 300 to 300, takes 0 to 1; divide all images by one number"),
])  # fmt: skip
def test_tiff_files_that_do_not_fit_are_refused(tmp_path: Path, array: np.ndarray, message: str):
    with pytest.raises(UserError, match=message):
        images(scans(tmp_path / "scans", array, photometric="minisblack"))


@pytest.mark.parametrize("kind", ["gif", "png", "webp"])
def test_a_film_is_refused(tmp_path: Path, kind: str):
    frames = [Image.fromarray(np.full((8, 8), 80 * number, np.uint8)) for number in range(3)]
    for place in range(2):
        (tmp_path / "films" / str(place)).mkdir(parents=True)
        for number in range(20):
            frames[0].save(tmp_path / f"films/{place}/{number}.{kind}", save_all=True, append_images=frames[1:])
    with pytest.raises(UserError, match=rf"0\.{kind} has 3 frames, takes one; save one frame per file"):
        data.site_sizes(config({"domain": f"images:{tmp_path}/films"}))


def test_padding_before_the_tokens_is_a_warning(tmp_path: Path):
    tokens = np.array([[1, 2, 0], [0, 1, 2], [0, 0, 0]] * 10)
    np.savez(tmp_path / "left.npz", x=tokens, y=np.arange(30) % 2)
    warned = data.remarks(config({"domain": f"npz:{tmp_path}/left.npz?inputs=tokens"}))
    assert warned == ["domain 'left': 10 token sequences begin with padding (0); put it behind the last token"]
