"""A user's own images, network and way to divide, by configuration alone: `fedloom run` in the folder that holds them."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from fedloom.server.ledger.audit import check
from tests.sims.commands import FEDLOOM, Command, refused

MINE = """
sites:
  - domain: images:photos        # photos/CLASS/*.png
    count: 2
    partition: {name: "mine.ways:uneven", options: {share: 0.3}}
  - domain: npz:more.npz
    name: archive
rounds: 2
data: {size: 8, grey: false}
network: {name: "mine.nets:TinyNet", hidden: 8}
objective: {name: sum_aggregation, mode: exact}
strategy: {name: sum_aggregation}
"""

NETS = """
from torch import nn


class TinyNet(nn.Module):
    def __init__(self, hidden, num_classes, in_channels):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(in_channels, hidden, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
            nn.Linear(hidden, num_classes),
        )

    def forward(self, images):
        return self.layers(images)
"""

WAYS = """
def uneven(labels, parts, generator, share):
    order = generator.permutation(len(labels))
    return [order[: int(share * len(labels))], order[int(share * len(labels)) :]]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder: images, arrays, a package, a configuration."""
    root = tmp_path_factory.mktemp("user")
    random = np.random.default_rng(0)
    for place, name in enumerate(("ants", "bees", "crickets")):
        (root / "photos" / name).mkdir(parents=True)
        for number in range(40):
            pixels = random.integers(0, 60, (9, 10 + number % 2, 3), np.uint8)
            pixels[..., place] += 150
            Image.fromarray(pixels).save(root / "photos" / name / f"{number}.png")
    images = random.integers(0, 60, (60, 8, 8, 3), np.uint8)
    labels = np.arange(60) % 3
    images[np.arange(60), ..., labels] += np.uint8(150)
    np.savez(root / "more.npz", x=images, y=labels)
    (root / "mine").mkdir()
    (root / "mine" / "__init__.py").write_text("")
    (root / "mine" / "nets.py").write_text(NETS)
    (root / "mine" / "ways.py").write_text(WAYS)
    (root / "mine.yaml").write_text(MINE)
    return root


@pytest.fixture(scope="module")
def finished(folder: Path) -> Path:
    """The run on the inline engine, in a process of its own, which no test changes."""
    fedloom_in(folder, "run", "mine.yaml", "engine.name=inline", "run.name=inline", "--quiet")
    return folder / "runs" / "inline"


def fedloom_in(folder: Path, *words: str) -> None:
    done = subprocess.run([FEDLOOM, *words], cwd=folder, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


@pytest.mark.slow
def test_a_users_own_images_network_and_way_to_divide_run_on_both_engines(folder: Path, finished: Path):
    fedloom_in(folder, "run", "mine.yaml", "engine.name=ray", "engine.workers=1", "run.name=ray", "--quiet")
    inline, ray = summary(finished), summary(folder / "runs" / "ray")
    assert inline["digest"] == ray["digest"] and inline["accuracy"] == ray["accuracy"]
    assert [(site["domain"], site["samples"]) for site in inline["sites"]] == [("photos", 25), ("photos", 61), ("more", 43)]
    assert inline["accuracy"].keys() >= {"sum", "site-0000", "archive"}
    assert all(inline["checks"].values())
    assert inline["class_names"] == ray["class_names"] == {"0": "ants", "1": "bees", "2": "crickets"}
    assert "crickets" in (finished / "report.html").read_text()
    assert f"images:{folder}/photos" in (folder / "runs" / "ray" / "config.yaml").read_text()


def test_forgetting_resuming_and_the_report_work_without_a_line_about_what_is_the_users_own(
    folder: Path, finished: Path, tmp_path: Path, fedloom: Command, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    run = Path(shutil.copytree(finished, tmp_path / "inline"))
    said = fedloom("unlearn", run, "archive", "--repair", "1", "--quiet")
    assert said.code == 0, said.err
    assert check(run) == []
    assert "photos" in (run / "report.html").read_text()
    after = summary(run)
    assert after["class_names"] == summary(finished)["class_names"]
    assert set(after["classes"]) == set(summary(finished)["classes"]) - {"archive"}


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["network={name: 'mine.nets:TineNet'}"],
            "network.name: 'mine.nets:TineNet' has no 'TineNet'; did you mean 'TinyNet'?",
        ),
        (["network.hiden=3"], "unknown option of 'mine.nets:TinyNet' 'network.hiden'; did you mean 'network.hidden'?"),
        (["network.name=mine.net:TinyNet"], "network.name: cannot find module 'mine.net'"),
        (["sites.0.domain=images:fotos"], "does not exist"),
        (["sites.0.domain=image:photos"], "domain: cannot find module 'image'"),
        (["sites.0.partition.name=mine.ways:evn"], "partition.name: 'mine.ways:evn' has no 'evn'; did you mean 'uneven'?"),
        (["sites.0.partition.options.shar=1"], "'partition.options.shar'; did you mean 'partition.options.share'?"),
    ],
)
def test_a_slip_is_reported_in_one_line_before_anything_starts(
    folder: Path, fedloom: Command, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
):
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    refused(fedloom("run", "mine.yaml", "run.name=slip", "engine.name=inline", *words), message)
    assert not (folder / "runs" / "slip").exists()


LEAVES = """
from dataclasses import dataclass
from fedloom.server.strategies.fedavg import FedAvg

@dataclass(frozen=True)
class Leaves(FedAvg):
    def round(self, run):
        exit(0)
"""


TWO_LINES = """
from __future__ import annotations
from dataclasses import dataclass
from fedloom.conf.typed import option
from fedloom.server.strategies.fedavg import FedAvg

@dataclass(frozen=True)
class Mine(FedAvg):
    scale: float = option(1.5, "a scale", low=0.0)

    def __post_init__(self):
        if self.scale == 2.0:
            from fedloom.conf import UserError
            raise UserError("the scale is two;\\nchoose another")
"""


def test_a_users_strategy_may_have_annotations_that_are_texts(
    folder: Path, fedloom: Command, monkeypatch: pytest.MonkeyPatch
):
    (folder / "texts.py").write_text(TWO_LINES)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    shown = fedloom("run", "mine.yaml", "strategy.name=texts:Mine", "--show")
    assert "strategy:\n  name: texts:Mine\n  weighting: samples\n  forgettable: true\n  scale: 1.5\n" in shown.out
    assert "| scale | a number of at least 0.0 | 1.5 | a scale |" in fedloom("options", "strategy.texts:Mine").out
    refused(
        fedloom("run", "mine.yaml", "strategy={name: 'texts:Mine', scale: x}"), "strategy.scale: got 'x', takes a number"
    )
    refused(fedloom("run", "mine.yaml", "strategy={name: 'texts:Mine', scale: 2}"), "the scale is two; choose another")


WRONG = """
import torch
from torch import nn


class Wrong(nn.Module):
    def __init__(self, classes, channels, size):
        super().__init__()
        self.head = nn.Linear(channels * size * size, classes)

    def forward(self, x):
        if self.training and torch.is_grad_enabled():
            torch.sqrtt(x)
        return self.head(x.flatten(1))
"""


def test_an_error_in_own_code_names_its_place(folder: Path, fedloom: Command, monkeypatch: pytest.MonkeyPatch):
    (folder / "wrong.py").write_text(WRONG)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    said = fedloom("run", "mine.yaml", "run.name=wrong", "engine.name=inline", "network={name: 'wrong:Wrong'}", "--quiet")
    assert said.code == 1
    assert "has no attribute 'sqrtt'; wrong.py, line 13, in forward)" in said.err


def test_a_method_that_leaves_the_program_makes_no_run_that_went_well(
    folder: Path, fedloom: Command, monkeypatch: pytest.MonkeyPatch
):
    (folder / "leaving.py").write_text(LEAVES)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    said = fedloom("run", "mine.yaml", "run.name=left", "engine.name=inline", "strategy={name: 'leaving:Leaves'}", "--quiet")
    assert said.code == 1, said
    assert "fedloom: code from outside called exit(0); committed rounds are saved" in said.err
    assert summary(folder / "runs" / "left")["status"] == "interrupted"
