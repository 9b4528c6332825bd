"""Domains of the user's own that are functions of another package; what is refused."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from fedloom.clients import data
from fedloom.clients.data.domains import find
from fedloom.clients.data.inputs import convert
from fedloom.clients.data.listing import of_run
from fedloom.conf import UserError
from tests.clients.own_data import config, images

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


def apart():
    return {"train": (X, np.array(["b", "c", "d"])[Y]), "test": (X[:30], np.array(["a", "b", "d"])[Y[:30]])}


def half_named(split):
    return Set(train=True) if split == "train" else (X[:30], Y[:30])


def seqs():
    return Y[:, None] + np.arange(1, 5), Y * 1.5


def tensor():
    return torch.from_numpy(X)[:, None].expand(-1, 3, -1, -1), Y


def tensors():
    return [torch.from_numpy(x)[None] / 255 for x in X], torch.from_numpy(Y)


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
    with of_run():
        yield "my_images"
    sys.modules.pop("my_images", None)


@pytest.mark.parametrize("name", ["arrays", "split", "mapping", "batches", "samples", "Set", "tensor", "tensors"])
def test_a_function_of_another_package_gives_images(package: str, name: str):
    domain = f"{package}:{name}"
    found = images(domain, grey=True)
    assert len(found) == (54 if name in ("split", "mapping", "Set") else 43)
    bytes_of = found.x if found.x.dtype == torch.uint8 else (found.x + 1) * 127.5  # floats are not rounded
    assert torch.equal(bytes_of[:, 0, 0, 0].round().long(), found.y * 100)
    spec = config({"domain": domain}).roster[0].spec
    assert data.label(spec) == name
    expected = {"Set": ("none", "some", "much"), "samples": ("class 0", "class 1", "class 2")}
    assert data.class_names(spec) == expected.get(name, ())


@pytest.mark.parametrize("kind", ["", "image"])
def test_channels_come_first_only_where_that_is_certain(kind: str):
    first = torch.randint(256, (5, 3, 8, 9), dtype=torch.uint8)
    for inputs in (first, list(first), tuple(first), first.permute(0, 2, 3, 1), first.permute(0, 2, 3, 1).numpy()):
        assert np.array_equal(convert(inputs, 5, kind)[0], first.permute(0, 2, 3, 1).numpy())
    for shape in ((5, 3, 8, 3), (5, 1, 8, 3), (5, 3, 3, 1)):
        with pytest.raises(ValueError, match="channels may come first or last; return a NumPy array"):
            convert(torch.zeros(shape), 5, kind)
    assert convert(np.zeros((5, 3, 8, 3)), 5, kind)[0].shape == (5, 3, 8, 3)
    assert convert(torch.zeros(5, 8, 8, 12), 5, kind)[0].shape == (5, 8, 8, 12)
    assert convert(torch.zeros(5, 8, 8), 5, kind)[0].shape == (5, 8, 8)
    with pytest.raises(ValueError, match=r"tensor of shape \[5, 12, 32, 32\].*x.permute\(0, 2, 3, 1\)"):
        convert(torch.zeros(5, 12, 32, 32), 5, kind)
    with pytest.raises(ValueError, match=r"shape \[5, 3, 8, 9\].*x.transpose\(0, 2, 3, 1\)"):
        convert(first.numpy(), 5, kind)


def test_a_tensor_that_is_no_image_keeps_its_shape():
    assert convert(torch.randn(5, 3, 8, 8), 5, "array")[0].shape == (5, 3, 8, 8)
    with pytest.raises(ValueError, match=r"inputs \[5, 3, 8, 8\] with values from .*images take values from 0 to 1"):
        convert(torch.randn(5, 3, 8, 8), 5)
    with pytest.raises(ValueError, match=r"images take values from 0 to 1: use \(x \+ 1\) / 2, if these are images"):
        convert(torch.linspace(-1, 1, 5 * 64).reshape(5, 8, 8, 1), 5)


def test_parts_that_name_their_classes_differently_have_those_of_both(package: str):
    settings = config({"domain": f"{package}:apart"}, grey=True)
    spec = settings.roster[0].spec
    assert data.class_names(spec) == ("a", "b", "c", "d") and data.num_classes(settings) == 4
    found, test = data.site_examples(settings, settings.roster[0]), data.test_images(settings, spec)
    assert torch.equal(found.x[:, 0, 0, 0].long(), (found.y - 1) * 100)
    assert torch.equal(test.x[:, 0, 0, 0].long(), torch.tensor([0, 100, 0, 200])[test.y])


def test_a_function_takes_the_kinds_of_its_inputs_and_targets_in_a_query(package: str):
    domain = f"{package}:seqs?inputs=tokens"
    spec = config({"domain": domain}).roster[0].spec
    assert data.label(spec) == "seqs" and (find(domain).schema.kind, find(domain).schema.task) == ("tokens", "regression")
    assert find(f"{package}:seqs?inputs=features").schema.kind == "features"


@pytest.mark.parametrize("domain, message", [
    ("patients.csv", r"unknown domain 'patients\.csv'; write table:patients\.csv\?target=COLUMN$"),
    ("data/x.npz?task=class", r"; write npz:data/x\.npz$"),
    ("patients", r"unknown domain 'patients'.*module:function"),
    ("digits?task=class", r"unknown domain 'digits\?task=class'; did you mean 'digits'\?"),
])  # fmt: skip
def test_an_unknown_domain_is_refused_with_what_to_write(domain: str, message: str):
    with pytest.raises(UserError, match=message):
        find(domain)


@pytest.mark.parametrize(
    "name, message",
    [
        ("seqs", r"has inputs of whole numbers, \[60, 4\]\. Write \?inputs=tokens behind the path"),
        ("seqs?task=class", r"has inputs of whole numbers, \[60, 4\]\. Write &inputs=tokens behind the path"),
        ("seqs?label=kind", r"unknown key 'label'; takes \?inputs=&task="),
        ("nothing", r"domain 'nothing': my_images:nothing returned a NoneType; takes arrays \(images, labels\)"),
        ("other", r"returned a; takes train and test"),
        ("half_named", r"has classes that are names in train, numbers in test; use names in all parts, or numbers in all"),
        ("needing", r"domain\.folder: missing; 'my_images:needing' needs it"),
        ("failing", r"domain: 'my_images:failing' failed \(RuntimeError: the disk is gone\)"),
        ("number", r"domain 'my_images:number': has the type int; it must be a function"),
        ("array", r"domain: 'my_images:array' has no 'array'; did you mean 'arrays'\?"),
    ],
)
def test_a_function_that_gives_none_is_reported_in_one_line(package: str, name: str, message: str):
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
        assert data.label(config({"domain": "threes"}).roster[0].spec) == "threes"
        with pytest.raises(UserError, match=r"unknown domain 'threse'; did you mean 'threes'"):
            data.num_classes(config({"domain": "threse"}))
    finally:
        sys.path.remove(str(tmp_path / "nowhere"))
