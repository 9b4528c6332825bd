"""Files that change while a process lives: what is gone is not trained on, whatever was kept of it."""

import gzip
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom import run
from fedloom.clients import data
from fedloom.clients.data import listing
from fedloom.clients.data.examples import Examples
from fedloom.clients.protocol.configurations import parsed
from fedloom.conf import Config, UserError, to_json
from fedloom.server.evaluation.evaluator import Evaluator
from tests.clients.own_data import config, images

MARK = 251


def picture(place: Path, level: int = 100) -> Path:
    """An image with a dark corner."""
    place.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((6, 6), level, np.uint8)
    pixels[0, 0] = 0
    Image.fromarray(pixels).save(place)
    return place


def folder(root: Path) -> Path:
    """Twenty images in each of two classes; three of them are bright."""
    for number in range(20):
        for name in ("cats", "dogs"):
            picture(root / name / f"{number}.png", MARK if name == "cats" and number < 3 else 100)
    return root


def bright(found: Examples) -> int:
    return int((found.x.flatten(1).amax(1) == MARK).sum())


def everything(settings: Config) -> int:
    """Bright images in all that there is of a configuration of one site."""
    spec = settings.roster[0].spec
    parts = [
        data.site_examples(settings, settings.roster[0]),
        data.validation_images(settings, spec),
        data.test_images(settings, spec),
    ]
    return sum(bright(part) for part in parts)


def npz(path: Path, withdrawn: bool) -> None:
    x = np.full((40, 6, 6), 100, np.uint8)
    x[:, 0, 0] = 0
    x[:3, 1:] = MARK
    keep = slice(3 if withdrawn else 0, None)
    np.savez(path, x=x[keep], y=(np.arange(40) % 2)[keep])


def dataset(path: Path, withdrawn: bool) -> None:
    from datasets import Array2D, ClassLabel, Dataset, Features

    x = [np.full((6, 6), MARK if number < 3 else 100, np.uint8) for number in range(3 if withdrawn else 0, 40)]
    for one in x:
        one[0, 0] = 0
    kinds = Features({"image": Array2D((6, 6), "uint8"), "label": ClassLabel(names=["a", "b"])})
    Dataset.from_dict({"image": x, "label": [k % 2 for k in range(len(x))]}, features=kinds).save_to_disk(path)


def idx(root: Path, withdrawn: bool) -> None:
    """MNIST's four files, a few images long."""
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part in ("train", "t10k"):
        x = np.full((40, 6, 6), 100, np.uint8)
        x[:, 0, 0] = 0
        x[:3, 1:] = MARK
        x, y = x[3 if withdrawn else 0 :], (np.arange(40) % 10).astype(np.uint8)[3 if withdrawn else 0 :]
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            head = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}i", *array.shape)
            (raw / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))


def test_deleted_images_of_a_folder_are_gone_from_everything_that_was_kept(tmp_path: Path):
    domain = f"images:{folder(tmp_path / 'pets')}"
    settings = config({"domain": domain}, grey=True)
    before = data.site_sizes(settings)
    assert everything(settings) == 3
    for number in range(3):
        (tmp_path / "pets" / "cats" / f"{number}.png").unlink()
    assert everything(settings) == 0
    assert data.site_sizes(settings)[0] < before[0]
    assert everything(config({"domain": domain}, grey=True)) == 0


@pytest.mark.parametrize(("make", "kind"), [(npz, "npz:"), (dataset, "dataset:")])
def test_files_that_are_written_anew_without_some_images_are_read_anew(
    tmp_path: Path, make: Callable[[Path, bool], None], kind: str
):
    place = tmp_path / "mine.npz"
    make(place, False)
    settings = config({"domain": f"{kind}{place}"}, grey=True)
    assert everything(settings) == 3
    make(place, True)
    assert everything(settings) == 0


def test_shipped_domains_are_read_anew_as_well(tmp_path: Path):
    idx(tmp_path, False)
    settings = config({"domain": "mnist"}, grey=True)
    settings = config({"domain": "mnist"}, data={"size": 6, "root": str(tmp_path)})
    assert everything(settings) == 6
    idx(tmp_path, True)
    assert everything(settings) == 0


def test_an_image_that_is_replaced_by_one_of_the_same_size_and_time_is_read_anew(tmp_path: Path):
    place = folder(tmp_path / "pets") / "cats" / "0.png"
    domain, seen = f"images:{tmp_path / 'pets'}", place.stat()
    before = data.site_examples(settings := config({"domain": domain}, grey=True), settings.roster[0])
    for number in range(3):
        picture(tmp_path / "pets" / "cats" / f"{number}.png", 252)
    os.utime(place, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert bright(before) > 0 and everything(settings) == 0


def test_a_class_that_is_gone_is_gone_from_names_and_outputs(tmp_path: Path):
    root = folder(tmp_path / "pets")
    settings = config({"domain": f"images:{root}"}, grey=True)
    assert data.num_classes(settings) == 2 and data.class_names(settings.roster[0].spec) == ("cats", "dogs")
    for path in (root / "cats").iterdir():
        path.unlink()
    assert data.num_classes(settings) == 1 and data.class_names(settings.roster[0].spec) == ("dogs",)


def test_within_a_run_classes_do_not_change_their_numbers(tmp_path: Path):
    root = folder(tmp_path / "pets")
    domain = f"images:{root}"
    with listing.of_run():
        assert len(images(domain, grey=True))
        picture(root / "ants" / "0.png")
        with pytest.raises(UserError, match=r"domain 'pets': .* has other classes than when the run began. Restore them"):
            images(domain, grey=True)
    assert len(images(domain, grey=True))


def test_a_function_is_asked_again_in_each_run_and_once_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "counted.py").write_text(
        "import numpy as np\nasked = []\n\ndef f():\n    asked.append(1)\n"
        "    x = np.full((40, 6, 6), 9 * len(asked), np.uint8)\n    x[:, 0] = 200\n    return x, np.arange(40) % 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    levels = []
    for _ in range(2):
        with listing.of_run():
            levels += [int(images("counted:f", grey=True).x[0, 0, 3, 3]) for _ in range(2)]
    assert levels[0] == levels[1] and levels[2] == levels[3] and levels[0] != levels[2]


TREE = {
    "rounds": 1,
    "data": {"size": 8},
    "network": {"name": "mlp", "widths": [8]},
    "objective": {"name": "sum_aggregation"},
    "strategy": {"name": "sum_aggregation"},
    "engine": {"name": "inline"},
}


@pytest.mark.usefixtures("blank_pictures")
def test_a_second_run_in_a_process_trains_on_what_is_left(tmp_path: Path):
    root = folder(tmp_path / "pets")
    tree = {**TREE, "sites": [{"domain": f"images:{root}"}], "run": {"root": str(tmp_path / "runs")}}
    first = run(tree, "run.name=first")
    for number in range(3):
        (root / "cats" / f"{number}.png").unlink()
    second = run(tree, "run.name=second")
    sizes = [one.summary["sites"][0]["samples"] for one in (first, second)]
    assert sizes[1] < sizes[0]
    assert len(Evaluator(second.config).images("pets", "test")) == 7


@pytest.mark.usefixtures("blank_pictures")
def test_what_is_deleted_while_a_run_continues_is_not_in_its_next_round(tmp_path: Path):
    root, seen = folder(tmp_path / "pets"), list[int]()
    sites = [{"domain": f"images:{root}"}, {"domain": "digits", "samples": 40}]
    tree = {**TREE, "rounds": 3, "sites": sites, "data": {"size": 8, "classes": 10}}

    def withdraw(record: dict[str, Any]) -> None:
        seen.append(everything(config({"domain": f"images:{root}"}, grey=True)))
        (root / "cats" / f"{record['round']}.png").unlink(missing_ok=True)

    result = run(tree, f"run.root={tmp_path}", "run.name=a", on_round=withdraw)
    assert seen == [3, 2, 1] and result.summary["status"] == "finished" and not result.metrics[-1].get("dropped")


def test_a_listing_that_is_out_of_date_is_refused(tmp_path: Path):
    root = folder(tmp_path / "pets")
    domain = f"images:{root}"
    with listing.held():
        listing.state(root)
        (root / "cats" / "0.png").unlink()
        with pytest.raises(UserError, match=r"domain 'pets': .* changed while it was read. Once it is complete, resume"):
            images(domain, grey=True)
    assert len(images(domain, grey=True))


def test_files_that_are_not_images_may_come_and_go(tmp_path: Path):
    root = folder(tmp_path / "pets")
    domain = f"images:{root}"
    with listing.held():
        listing.state(root)
    with listing.held():
        before = data.num_classes(config({"domain": domain}))
        (root / "cats" / "log.txt").write_text("x")
        assert len(images(domain, grey=True)) and data.num_classes(config({"domain": domain})) == before


def test_a_node_that_lives_on_reads_the_next_round_anew(tmp_path: Path):
    """Of the messages of one round, files are looked at once; in the next one, anew."""
    domain = f"images:{folder(tmp_path / 'pets')}"
    text = to_json(config({"domain": domain}, grey=True))

    def level(run: str, number: int, afresh: bool = False) -> int:
        with listing.at_round(run, number, afresh):
            return everything(parsed(text, run))

    assert level("one", 1) == 3
    (tmp_path / "pets" / "cats" / "0.png").unlink()
    assert level("one", 2) == level("two", 1) == 2
    (tmp_path / "pets" / "cats" / "1.png").unlink()
    assert level("two", 1, afresh=True) == 1 and everything(parsed(text, "two")) == 1
