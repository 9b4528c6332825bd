"""Training of networks outside a federation, each saved on disk."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.clients.data import random_flip, to_float
from fedloom.clients.data.form import Form
from fedloom.clients.data.splits import SplitRule
from fedloom.clients.networks import NetworkName, initialise, load_network, parse_name, save_network
from fedloom.clients.training.learner import descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import TrainingConfig
from fedloom.conf.sites import Site
from fedloom.sims.experiments.study import fingerprint
from fedloom.sims.operations.domain_task import Task, images, placed

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of a network on images with labels


@dataclass(frozen=True)
class Share(Task):
    """A site's part of a domain: its classes (empty: all), and `part` of `parts`.

    `partition` is "iid", or "dirichlet" over the labels with `alpha`. The part has `samples` images (> 0). `held` images
    belong to no site (part "validation").
    """

    classes: tuple[int, ...] = ()
    parts: int = 1
    part: int = 0
    partition: str = "iid"
    alpha: float = 0.5
    held: int = 1000

    def options(self) -> list[str]:
        return [f"data.validation_limit={self.held}"]

    def entry(self) -> str:
        division = f"{{name: {self.partition}, alpha: {self.alpha}, min_samples: {self.samples}}}"
        classes = f"classes: {list(self.classes)}, "
        return f"{{domain: {self.domain}, samples: {self.samples}, {classes}count: {self.parts}, partition: {division}}}"

    def site(self) -> Site:
        return self.config().roster[self.part]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: by SGD with momentum.

    Attributes:
        epochs: The number of epochs.
        rate: The initial learning rate.
        batch: Images in a batch.
        momentum: The momentum.
        weight_decay: The weight decay.
        flip: Whether images are flipped at random.
        clip: The largest norm of the gradient.
        cosine: Whether the rate falls to 0 along a cosine; else it is constant.
    """

    epochs: int
    rate: float
    batch: int = 64
    momentum: float = 0.9
    weight_decay: float = 0.0
    flip: bool = False
    clip: float = 5.0
    cosine: bool = True


def plain_loss(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of a network on labelled images."""
    return F.cross_entropy(network(images), labels)


def train(network: nn.Module, task: Task, recipe: Recipe, *purpose: str, loss: Loss = plain_loss) -> None:
    """Train a network in place, on batches seeded by (task.seed, purpose)."""
    training = TrainingConfig(
        epochs=recipe.epochs, batch=recipe.batch, rate=recipe.rate, momentum=recipe.momentum,
        weight_decay=recipe.weight_decay, clip=recipe.clip,
    )  # fmt: skip
    was = network.training
    network.train()
    with placed(network) as device:
        steps = ((rate, x.to(device), y.to(device)) for rate, x, y in _steps(task, recipe, *purpose))
        descend(list(network.parameters()), lambda x, y: loss(network, x, y), steps, recipe_of(training))
    network.train(was)


def trained(folder: Path, name: NetworkName, task: Task, recipe: Recipe, seed: int) -> nn.Module:
    """Return a network of that name, trained from the start that `seed` draws, or read from the folder if saved there."""
    path = folder / f"{name.name.replace(':', '-')}-{fingerprint([task, recipe, seed, name], 16)}.safetensors"
    if path.is_file():
        return load_network(path)[0]
    network = name.build()
    initialise(network, torch_generator(seed, name.name, "initial"))
    train(network, task, recipe, name.name, str(seed))
    save_network(path, network.eval(), name, SplitRule.of(task.config()))
    return network


def trained_apart(folder: Path, names: Sequence[str], tasks: Sequence[Task], recipe: Recipe, seed: int) -> list[nn.Module]:
    """Return a trained network for each name and task, each from its own start, saved in the folder."""
    return [trained(folder, parse_name(name, Form.images(task.channels, task.size, 10)), task, recipe, 1000 * index + seed)
            for index, (name, task) in enumerate(zip(names, tasks, strict=True))]  # fmt: skip


def cosine(rate: float, step: int, steps: int) -> float:
    """Return the learning rate at a step: it falls from `rate` to 0 along half a cosine."""
    return rate * (0.5 * (1.0 + math.cos(math.pi * step / steps)))


def _steps(task: Task, recipe: Recipe, *purpose: str) -> Iterator[tuple[float, Tensor, Tensor]]:
    every = images(task, "train")
    generator = torch_generator(task.seed, *purpose, "batches")
    total = recipe.epochs * math.ceil(len(every) / recipe.batch)
    done = 0
    for _ in range(recipe.epochs):
        for batch in torch.randperm(len(every), generator=generator).split(recipe.batch):
            inputs = to_float(every.x[batch])
            rate = cosine(recipe.rate, done, total) if recipe.cosine else recipe.rate
            done += 1
            if len(batch) > 1:  # BatchNorm has no variance of a single image
                yield rate, random_flip(inputs, generator) if recipe.flip else inputs, every.y[batch]
