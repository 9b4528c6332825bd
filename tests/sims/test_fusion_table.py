"""The experiment on one-shot fusion, with small networks and the embedded digits; the parents' images."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom.conf.errors import UserError
from fedloom.sims.experiments import fusion_pairs
from fedloom.sims.experiments.fusion import BEST, METHODS, Request, measured, reproduce
from fedloom.sims.experiments.fusion_pairs import SPLITS, Parents, accuracy_of, parents, probe, watched
from fedloom.sims.experiments.pairs import Recipe, Share
from fedloom.sims.operations.domain_task import Task, images

SITE = Share("digits", 8, True, samples=150, held=140)
RECIPE = Recipe(epochs=8, rate=0.1)
MLP = ("mlp:widths=[24,20,16],bias=false", "mlp:widths=[24,20],bias=false")
TINY = {
    "same": Parents(MLP, task=Task("digits", 8, True, samples=200), recipe=RECIPE, probe=40),
    "disjoint": Parents(MLP, "disjoint", SITE, RECIPE, probe=60),
    "three": Parents((*MLP, MLP[0]), "dirichlet", replace(SITE, samples=60), RECIPE, probe=60),
}


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory for all tests, and these pairs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("fusion"))
        patch.setattr(fusion_pairs, "PAIRS", TINY)
        yield Path.cwd()


@pytest.fixture(scope="module")
def folder(elsewhere: Path) -> Path:
    """All of it, of two seeds."""
    return elsewhere / reproduce("cpu", 2, [], quiet=True)


def result(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / "results" / "test-all" / f"{name}.json").read_text(encoding="utf-8"))["value"]


def pixels(x: torch.Tensor) -> set[bytes]:
    return {image.numpy().tobytes() for image in x}


@pytest.mark.parametrize("pair", TINY)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_parent_saw_the_images_that_settings_are_chosen_and_networks_fused_by(pair, seed):
    public = ((probe(pair, seed) + 1.0) * 127.5).round().to(torch.uint8)
    apart = [pixels(public), pixels(watched(pair, seed, "validation").x), pixels(watched(pair, seed, "test").x)]
    own = [pixels(images(task, "train").x) for task in dict.fromkeys(TINY[pair].tasks(seed))]
    everything = [*apart, *own]
    assert all(len(part) > 20 for part in everything)
    for place, part in enumerate(everything):
        assert all(part.isdisjoint(other) for other in everything[place + 1 :])


def test_disjoint_classes_share_none_and_leave_none_out():
    for seed in range(3):
        own = [set(images(task, "train").y.tolist()) for task in TINY["disjoint"].tasks(seed)]
        assert [len(classes) for classes in own] == [5, 5] and own[0] | own[1] == set(range(10))
    assert TINY["disjoint"].tasks(0) != TINY["disjoint"].tasks(1)


def test_shares_are_of_one_size_and_skewed_by_dirichlet_alone():
    def largest(split: str) -> float:
        """The largest share of a class."""
        tasks = SPLITS[split](replace(SITE, samples=100), 3)
        counts = torch.stack([torch.bincount(images(task, "train").y, minlength=10) for task in tasks])
        assert counts.sum(dim=1).tolist() == [100] * 3
        return float(counts.max()) / 100

    assert largest("iid") < 0.2 < largest("dirichlet")


def test_fewer_probe_images_are_among_more_and_too_many_are_refused():
    assert torch.equal(probe("disjoint", 0, 20), probe("disjoint", 0)[:20])
    with pytest.raises(UserError, match=r"pair 'disjoint': 10000 probe images, but \d+ public ones are there"):
        probe("disjoint", 0, 10_000)


def test_parents_are_trained_once_and_from_different_starts(tmp_path):
    first, again = parents(tmp_path, "three", 0), parents(tmp_path, "three", 0)
    for one, other in zip(first, again, strict=True):
        torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=0)
    assert not torch.equal(first[0].state_dict()["head.weight"], first[2].state_dict()["head.weight"])
    assert accuracy_of(parents(tmp_path, "same", 0)[0], "same", 0, "test") > 0.3


@pytest.mark.nightly
def test_every_method_is_measured_and_the_same_way_again(folder):
    request = Request(("disjoint",), tuple(METHODS))
    for name, slug in (("fuse", "fuse"), ("KF-linear", "kf-linear"), ("ensemble", "ensemble")):
        known, again = result(folder, f"disjoint-1-{slug}"), measured(folder, request, "disjoint", 1, name)
        assert known["accuracy"] == again["accuracy"] and known["seconds"] > 0.0
    assert len(list((folder / "results" / "test-all").glob("disjoint-0-*.json"))) == len(METHODS)
    assert result(folder, "same-0-parent-3")["refused"] == "no such parent"
    assert "use equal widths" in result(folder, "same-0-cca-merge")["refused"]


def test_the_tables_and_the_pictures_are_written(folder):
    text = (folder / "tables.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| fuse |")).split("|")
    assert len([cell for cell in row if "±" in cell]) == len(TINY)
    own = [result(folder, f"same-{seed}-parent-{place}")["accuracy"] for seed in range(2) for place in (1, 2)]
    best = 50 * (max(own[:2]) + max(own[2:]))
    assert f"| {BEST} | {best:.1f} ± " in text
    assert "| parent 3 | - | - |" in text
    assert all((folder / f"{kind}.png").stat().st_size > 5000 for kind in ("same", "different"))
    assert "data:image/png" in (folder / "report.html").read_text(encoding="utf-8")


@pytest.mark.nightly
def test_what_is_on_disk_is_taken_only_for_the_same_settings(folder, monkeypatch):
    path = folder / "results" / "test-all" / "same-0-fuse.json"
    on_disk = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**on_disk, "value": {**on_disk["value"], "accuracy": 0.0625}}), encoding="utf-8")
    reproduce("cpu", 1, ["pairs=same", "methods=fuse"], quiet=True)
    assert result(folder, "same-0-fuse")["accuracy"] == 0.0625
    monkeypatch.setitem(METHODS, "fuse", replace(METHODS["fuse"], options={"positions": 64}))
    reproduce("cpu", 1, ["pairs=same", "methods=fuse"], quiet=True)
    assert json.loads(path.read_text(encoding="utf-8"))["key"]["positions"] == 64
    assert result(folder, "same-0-fuse")["accuracy"] != 0.0625


@pytest.mark.nightly
def test_validation_images_have_results_of_their_own(elsewhere):
    reproduce("cpu", 1, ["pairs=disjoint", "methods=fuse;PLeaS", "part=validation", "most=30"], quiet=True)
    there = sorted(path.name for path in (elsewhere / "runs/fusion" / "results" / "validation-30").iterdir())
    assert there == ["disjoint-0-fuse.json", "disjoint-0-pleas.json"]
    assert "the first 30 validation examples" in (elsewhere / "runs/fusion" / "tables.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["pairs=nothing"], "unknown pair 'nothing'"),
        (["methods=PLeas"], "did you mean 'PLeaS'"),
        (["part=train"], "override 'part=train': takes one of: test, validation"),
        (["most=few"], "override 'most=few': takes a number"),
        (["seed=1"], "override 'seed=1': takes pairs=..., methods=..., part=..., most=..."),
    ],
)
def test_what_it_does_not_take_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        reproduce("cpu", 1, overrides, quiet=True)
    with pytest.raises(UserError, match="unknown preset 'paper'"):
        reproduce("paper", 1, [], quiet=True)
