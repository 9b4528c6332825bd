"""Which column of a data set is the label, and what is no label."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_diabetes

from fedloom.clients import data
from fedloom.clients.data.found import absolute, short
from fedloom.conf import UserError
from fedloom.conf.loading import from_mapping
from tests.clients.own_data import config

ROWS = 40
X = np.random.default_rng(0).integers(0, 256, (ROWS, 6, 6), np.uint8)
TWO, FOUR = np.arange(ROWS) % 2, np.arange(ROWS) % 4


def saved(path: Path, **columns: Any) -> str:
    """A data set of columns: arrays are images, (numbers, names) class labels, other lists what they are."""
    from datasets import Array2D, ClassLabel, Dataset, Features, Value

    kinds: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, given in columns.items():
        if isinstance(given, tuple):
            values[name], kinds[name] = given[0], ClassLabel(names=given[1])
        elif np.ndim(given) == 3:
            values[name], kinds[name] = list(given), Array2D((6, 6), "uint8")
        else:
            values[name], kinds[name] = given, Value("string" if isinstance(given[0], str) else "int64")
    Dataset.from_dict(values, features=Features(kinds)).save_to_disk(path)
    return f"dataset:{path}"


def classes(domain: str) -> tuple[int, tuple[str, ...]]:
    settings = config({"domain": domain, "partition": {"min_samples": 1}}, grey=True)
    data.site_examples(settings, settings.roster[0])
    return data.num_classes(settings), data.class_names(settings.roster[0].spec)


WRITER = (FOUR, ["ann", "bob", "cleo", "dan"])


@pytest.mark.parametrize("name", ["label", "labels", "Label", "y", "target"])
def test_a_column_that_is_called_label_goes_before_one_of_class_labels(tmp_path: Path, name: str):
    assert classes(saved(tmp_path / "a", image=X, writer=WRITER, **{name: TWO.tolist()})) == (2, ())


def test_a_column_that_is_called_image_goes_before_others_of_images(tmp_path: Path):
    domain = saved(tmp_path / "a", mask=np.zeros_like(X), image=X, label=TWO.tolist(), id=list(range(ROWS)))
    assert classes(domain)[0] == 2


def test_an_only_column_of_class_labels_is_taken_whatever_its_name(tmp_path: Path):
    domain = saved(tmp_path / "a", photo=X, file=[f"{k}.png" for k in range(ROWS)], writer=WRITER, id=list(range(ROWS)))
    assert classes(domain) == (4, ("ann", "bob", "cleo", "dan"))


FINE, COARSE = (FOUR, list("abcd")), (TWO, list("xy"))


@pytest.mark.parametrize("columns, message", [
    ({"image": X, "fine_label": FINE, "coarse_label": COARSE}, r"may be the labels: fine_label, coarse_label\. "),
    ({"image": X, "label": TWO.tolist(), "labels": FINE}, r"columns that may be the labels: label, labels\. "),
    ({"image": X, "writer": WRITER, "digit": TWO.tolist()}, r"columns that may be the labels: writer, digit\. "),
    ({"photo": X, "mask": X, "label": TWO.tolist()}, r"columns that may be the images: photo, mask\. Write \?image=COLUMN"),
    ({"image": X, "img": X, "label": TWO.tolist()}, r"columns that may be the images: image, img\. "),
    ({"image": X, "digit": TWO.tolist()}, r"takes one column of images .*\. Write \?label=COLUMN behind"),
])  # fmt: skip
def test_where_several_columns_fit_one_is_to_be_chosen(tmp_path: Path, columns: dict[str, Any], message: str):
    with pytest.raises(UserError, match=message):
        classes(saved(tmp_path / "a", **columns))


def test_the_domain_may_name_its_columns(tmp_path: Path):
    domain = saved(tmp_path / "a", photo=X, mask=np.zeros_like(X), fine_label=FINE, coarse_label=COARSE)
    assert classes(f"{domain}?image=photo&label=coarse_label") == (2, ("x", "y"))
    assert classes(f"{domain}?label=fine_label&image=photo") == (4, tuple("abcd"))
    for query, message in {
        "?image=mask&label=fine": r"has no column 'fine' in all; has photo, mask, fine_label, coarse_label",
        "?labels=fine_label": r"unknown key 'labels'; takes \?image=&label=&inputs=&task=",
    }.items():
        with pytest.raises(UserError, match=message):
            classes(domain + query)


def test_a_domain_that_names_columns_has_the_short_name_and_the_whole_path_of_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert short("dataset:a/b?label=kind") == "b"
    assert absolute("dataset:a/b?label=kind") == f"dataset:{tmp_path}/a/b?label=kind"
    domain = saved(tmp_path / "what?", image=X, label=TWO.tolist())
    assert absolute(domain) == domain and short(domain) == "what?" and classes(domain)[0] == 2


MEASURED: Any = load_diabetes(return_X_y=True)[1]


def of(path: Path, y: Any) -> int:
    x = np.random.default_rng(0).integers(0, 256, (len(y), 6, 6), np.uint8)
    np.savez(path, x=x, y=y)
    return classes(f"npz:{path}")[0]


@pytest.mark.parametrize("y", [
    MEASURED,
    MEASURED.astype(int),
    np.arange(60),
    np.array([f"{k}.png" for k in range(60)]),
    np.random.default_rng(0).integers(25, 346, 60).astype(float),
    np.arange(60) * 1000,
])  # fmt: skip
def test_a_target_that_differs_from_image_to_image_is_not_a_class(tmp_path: Path, y: np.ndarray):
    with pytest.raises(UserError, match=r"has \d+ different labels for \d+ examples, nearly one per example. Write \?task="):
        of(tmp_path / "a.npz", y)


def test_few_images_of_many_classes_are_taken_where_the_classes_have_names(tmp_path: Path):
    names = [f"class-{k}" for k in range(ROWS)]
    assert classes(saved(tmp_path / "a", image=X, label=(np.arange(ROWS), names)))[0] == ROWS
    assert of(tmp_path / "b.npz", np.repeat(np.arange(30), 3)) == 30
    assert of(tmp_path / "c.npz", np.arange(10)) == 10
    assert of(tmp_path / "d.npz", np.r_[0, 99].repeat(10)) == 2


def test_labels_of_python_objects_are_taken_where_they_are_of_one_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "objects.py").write_text(
        "import numpy as np\nX = np.random.default_rng(0).integers(0, 256, (40, 6, 6), np.uint8)\n"
        "def of(*labels):\n    return X, np.array(list(labels) * 20, dtype=object)\n"
        "def texts():\n    return of('b', 'a')\n\ndef numbers():\n    return of(3, np.int8(0))\n\n"
        "def mixed():\n    return of(None, 'a')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert classes("objects:texts") == (2, ("a", "b")) and classes("objects:numbers") == (2, ("0", "3"))
    with pytest.raises(UserError, match=r"has labels of the types NoneType, str; takes only texts, or only whole numbers"):
        classes("objects:mixed")
    np.savez(tmp_path / "a.npz", x=X, y=np.array(["a", "b"] * 20, dtype=object))
    with pytest.raises(UserError, match=r"has Python objects in 'y', which are not read. Save .* y\.astype\(str\)"):
        classes(f"npz:{tmp_path}/a.npz")


@pytest.mark.parametrize("tested, line", [
    (TWO + 1, "domain 'part': has test examples of class 2, but no training examples; check the labels"),
    (np.arange(ROWS) % 9, "has test examples of class 2, class 3, class 4, class 5, class 6 and 2 more, but no training"),
    (TWO, ""),
])  # fmt: skip
def test_classes_of_the_test_part_alone_are_reported(tmp_path: Path, tested: np.ndarray, line: str):
    np.savez(tmp_path / "part.npz", x_train=X, y_train=TWO, x_test=X, y_test=tested)
    lines = data.remarks(config({"domain": f"npz:{tmp_path}/part.npz"}))
    assert [line in each for each in lines] == ([True] if line else [])


def test_classes_that_are_numbers_in_one_domain_and_names_in_another_are_reported_if_they_share_outputs(tmp_path: Path):
    for name, y in (("numbers", FOUR), ("names", np.array([*"dcba"])[FOUR])):
        np.savez(tmp_path / f"{name}.npz", x=X, y=y)
    domains = [{"domain": f"npz:{tmp_path}/{name}.npz"} for name in ("names", "numbers")]
    (line,) = data.remarks(config(*domains))
    assert line == (
        "Warning: the classes of numbers are numbers, those of names are names, and both share outputs: 0 is 'a', 1 is 'b', "
        "2 is 'c', 3 is 'd'; check that the numbers mean the same"
    )
    apart = from_mapping({"experiment": "test", "sites": domains, "data": {"size": 6, "heads": "task"}})
    assert not data.remarks(apart) and not data.remarks(config(domains[0]))
    assert not data.remarks(config(domains[0], {"domain": "digits"})), "classes with known meanings"
