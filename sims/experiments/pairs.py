"""Networks trained apart, for experiments on fusion: images of a domain, training, accuracy. Results are kept on disk."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.clients.data import Images, random_flip, site_images, test_images, to_float, validation_images
from fedloom.clients.networks import NetworkName, initialise, load_network, save_network
from fedloom.clients.training.device import pick_device
from fedloom.clients.training.learner import descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf import load
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config, TrainingConfig
from fedloom.conf.sites import Site, SiteConfig
from fedloom.server.evaluation.evaluator import all_cores, count_right

EVALUATION_BATCH = 500
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]  # of a network on images with labels


@dataclass(frozen=True)
class Task:
    """Images of a domain: `samples` of its training part (0: all), made size x size."""

    domain: str
    size: int
    grey: bool
    samples: int = 0
    root: str = ""
    seed: int = 0

    @property
    def channels(self) -> int:
        """Of an image."""
        return 1 if self.grey else 3

    def config(self) -> Config:
        """The configuration that describes them."""
        data = [f"data.size={self.size}", f"data.grey={str(self.grey).lower()}", *self.options()]
        data += [f"data.root={self.root}"] if self.root else []
        return load("digits", [f"sites=[{self.entry()}]", f"seed={self.seed}", *data])

    def options(self) -> list[str]:
        """Further overrides."""
        return []

    def entry(self) -> str:
        """The configuration's entry of `sites`."""
        return f"{{domain: {self.domain}" + (f", samples: {self.samples}" if self.samples else "") + "}"

    def site(self) -> Site:
        """Whose images the training images are."""
        return self.config().roster[0]

    def selected(self, whole: Images) -> Images:
        """Those of the site's images that are trained on."""
        return whole


@dataclass(frozen=True)
class Share(Task):
    """What one of several sites has of a domain: images of some classes (none named: of all), or its part of a division.

    `part` of `parts` by `partition`: "iid", or "dirichlet" over the labels with `alpha`; `samples` (> 0) of it. `held`
    images are no site's (part "validation").
    """

    classes: tuple[int, ...] = ()
    parts: int = 1
    part: int = 0
    partition: str = "iid"
    alpha: float = 0.5
    held: int = 1000

    def options(self) -> list[str]:
        """Further overrides."""
        return [f"data.validation_limit={self.held}"]

    def entry(self) -> str:
        """The configuration's entry of `sites`."""
        division = f"{{name: {self.partition}, alpha: {self.alpha}, min_samples: {self.samples}}}"
        classes = f"classes: {list(self.classes)}, "
        return f"{{domain: {self.domain}, samples: {self.samples}, {classes}count: {self.parts}, partition: {division}}}"

    def site(self) -> Site:
        """Whose images the training images are."""
        return self.config().roster[self.part]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained: SGD with momentum; the rate falls to 0 along a cosine, or stays."""

    epochs: int
    rate: float
    batch: int = 64
    momentum: float = 0.9
    weight_decay: float = 0.0
    flip: bool = False
    clip: float = 5.0
    cosine: bool = True


@lru_cache(maxsize=8)
def images(task: Task, part: str) -> Images:
    """Its "train", "validation" (of the training part, trained on by nobody) or "test" images, uint8 with labels."""
    config = task.config()
    if part == "train":
        return task.selected(site_images(config, task.site()))
    return {"validation": validation_images, "test": test_images}[part](config, SiteConfig(domain=task.domain))


def probe_set(task: Task, samples: int = 200) -> Tensor:
    """`samples` random training images, float32 [samples, c, size, size] in [-1, 1]."""
    whole = images(task, "train")
    order = torch.randperm(len(whole), generator=torch_generator(task.seed, task.domain, "probe"))
    return to_float(whole.x[order[:samples]])


def accuracy(network: nn.Module, task: Task, part: str) -> float:
    """Fraction of right answers, in eval mode; the mode is then what it was."""
    was, whole = network.training, images(task, part)
    with all_cores(torch.get_num_threads()), placed(network) as device:
        right = count_right(network.eval(), whole, EVALUATION_BATCH, device)
    network.train(was)
    return right / len(whole)


@contextmanager
def placed(network: nn.Module) -> Iterator[torch.device]:
    """The network is on a GPU meanwhile, if there is one, and then on the CPU."""
    device = pick_device("auto")
    network.to(device)
    try:
        yield device
    finally:
        network.to("cpu")


def plain_loss(network: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy."""
    return F.cross_entropy(network(images), labels)


def train(network: nn.Module, task: Task, recipe: Recipe, *purpose: str, loss: Loss = plain_loss) -> None:
    """Train in place; batches drawn by (task.seed, purpose)."""
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
    """A network of that name trained from the start drawn by `seed`; taken from the folder if it was trained before."""
    facts = json.dumps([asdict(task), asdict(recipe), seed, {**vars(name), "options": dict(name.options)}], sort_keys=True)
    path = folder / f"{name.name.replace(':', '-')}-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.safetensors"
    if path.is_file():
        return load_network(path)[0]
    network = name.build()
    initialise(network, torch_generator(seed, name.name, "initial"))
    train(network, task, recipe, name.name, str(seed))
    save_network(path, network.eval(), name)
    return network


def _steps(task: Task, recipe: Recipe, *purpose: str) -> Iterator[tuple[float, Tensor, Tensor]]:
    whole = images(task, "train")
    generator = torch_generator(task.seed, *purpose, "batches")
    total = recipe.epochs * math.ceil(len(whole) / recipe.batch)
    done = 0
    for _ in range(recipe.epochs):
        for batch in torch.randperm(len(whole), generator=generator).split(recipe.batch):
            inputs = to_float(whole.x[batch])
            rate = recipe.rate * (0.5 * (1.0 + math.cos(math.pi * done / total)) if recipe.cosine else 1.0)
            done += 1
            if len(batch) > 1:  # BatchNorm has no variance of a single image
                yield rate, random_flip(inputs, generator) if recipe.flip else inputs, whole.y[batch]
