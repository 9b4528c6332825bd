"""The parents for fusion, trained apart on CIFAR-10, and images that no parent saw."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from fedloom.clients.data import Examples, to_float
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.server.evaluation.evaluator import count_right
from fedloom.sims.experiments.pairs import Recipe, Share, trained_apart
from fedloom.sims.operations.domain_task import EVALUATION_BATCH, Task, images

SAME, OTHER = 200, 1000  # unlabelled images for parents of the same data, and of different data
RECIPE = Recipe(epochs=10, rate=0.05, flip=True, weight_decay=5e-4)
CIFAR = Task("cifar10", 32, False, samples=5000)
SITE = Share("cifar10", 32, False, samples=3000, held=3000)


@dataclass(frozen=True)
class Parents:
    """Networks to fuse: the first gives the depth, the second the widths.

    `split` names how their data differ (a key of SPLITS); empty: all have the images of `task`.
    """

    networks: tuple[str, ...]
    split: str = ""
    task: Task = SITE
    recipe: Recipe = RECIPE
    probe: int = OTHER

    def tasks(self, seed: int) -> list[Task]:
        """Return the task that each network is trained on."""
        if not self.split:
            return [self.task] * len(self.networks)
        assert isinstance(self.task, Share)
        return [*SPLITS[self.split](replace(self.task, seed=seed), len(self.networks))]


def _classes(task: Share, parts: int) -> list[Share]:
    """Return shares with disjoint classes, drawn by the seed, the same number for each."""
    drawn = torch.randperm(10, generator=torch_generator(task.seed, task.domain, "classes")).tolist()
    return [replace(task, classes=tuple(sorted(drawn[part::parts]))) for part in range(parts)]


def _parts(task: Share, parts: int, way: str, alpha: float = 0.5) -> list[Share]:
    return [replace(task, parts=parts, part=part, partition=way, alpha=alpha) for part in range(parts)]


SPLITS = {"disjoint": _classes, "dirichlet": partial(_parts, way="dirichlet", alpha=0.3), "iid": partial(_parts, way="iid")}
VGG = ("vgg13:width=0.25,norm=batch", "vgg11:width=0.25,norm=batch")
RESNET = ("resnet34:width=0.125,norm=batch", "resnet18:width=0.125,norm=batch")


def _same(*networks: str) -> Parents:
    return Parents(networks, task=CIFAR, probe=SAME)


PAIRS = {
    "vgg": _same("vgg13:width=0.25,norm=none", "vgg11:width=0.125,norm=none"),
    "resnet": _same("resnet34:width=0.125,norm=none", "resnet18:width=0.125,norm=none"),
    "vgg-batch": _same(*VGG),
    "resnet-batch": _same(*RESNET),
    "disjoint-vgg": Parents(VGG, "disjoint"),
    "disjoint-resnet": Parents(RESNET, "disjoint"),
    "dirichlet-vgg": Parents(VGG, "dirichlet"),
    "dirichlet-resnet": Parents(RESNET, "dirichlet"),
    "iid-vgg": Parents(VGG, "iid"),
    "dirichlet3": Parents((*VGG, VGG[0]), "dirichlet"),
    "dirichlet4": Parents((*VGG, *VGG), "dirichlet"),
}


def parents(folder: Path, pair: str, seed: int) -> list[nn.Module]:
    """Return the trained networks of a pair in evaluation mode."""
    chosen = PAIRS[pair]
    return trained_apart(folder / "networks", chosen.networks, chosen.tasks(seed), chosen.recipe, seed)


def probe(pair: str, seed: int, samples: int = 0) -> Tensor:
    """Return unlabelled images that no parent saw, float32 [samples, c, size, size] in [-1, 1].

    None of them is a validation image, and a smaller number is a subset of a larger one. `samples` 0 takes the pair's
    number. Raises UserError if there are too few.
    """
    public, wanted = _held(pair, seed)[0], samples or PAIRS[pair].probe
    if wanted > len(public):
        raise UserError(f"pair '{pair}': {wanted} probe images, but {len(public)} public ones are there")
    return to_float(public.x[:wanted])


def watched(pair: str, seed: int, part: str) -> Examples:
    """Return labelled images that no parent saw: "validation", on which settings are chosen, or "test"."""
    return _held(pair, seed)[1] if part == "validation" else images(PAIRS[pair].tasks(seed)[0], part)


def accuracy_of(network: nn.Module, pair: str, seed: int, part: str, most: int = 0) -> float:
    """Return the fraction of right answers on the first `most` (0: all) images of a pair's "validation" or "test"."""
    looked_at = watched(pair, seed, part)
    looked_at = Examples(looked_at.x[:most], looked_at.y[:most]) if most else looked_at
    return count_right(network.eval(), looked_at, EVALUATION_BATCH, torch.device("cpu")) / len(looked_at)


def _held(pair: str, seed: int) -> tuple[Examples, Examples]:
    """Return unseen images of the training part, split into public ones (at most half, and at most OTHER) and validation."""
    unseen = images(PAIRS[pair].tasks(seed)[0], "validation")
    order = torch.randperm(len(unseen), generator=torch_generator(seed, pair, "public"))
    public, rest = order.split([count := min(OTHER, len(unseen) // 2), len(unseen) - count])
    return Examples(unseen.x[public], unseen.y[public]), Examples(unseen.x[rest], unseen.y[rest])
