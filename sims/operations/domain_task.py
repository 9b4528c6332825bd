"""Load the images of a domain as networks take them, and measure a network's accuracy on them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedloom.clients.data import Examples, site_examples, test_images, to_float, validation_images
from fedloom.clients.training.torch_setup import pick_device
from fedloom.conf import load
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config, SiteConfig
from fedloom.conf.sites import Site
from fedloom.server.evaluation.evaluator import all_cores, count_right

EVALUATION_BATCH = 500


@dataclass(frozen=True)
class Task:
    """Images of a domain, resized to size x size.

    Attributes:
        domain: The domain.
        size: Pixels of an image's side.
        grey: Whether the images are grey.
        samples: The number of training examples; 0: all.
        root: The data folder; "": the default one.
        seed: The seed by which images are drawn.
    """

    domain: str
    size: int
    grey: bool
    samples: int = 0
    root: str = ""
    seed: int = 0

    @property
    def channels(self) -> int:
        """The channels of an image."""
        return 1 if self.grey else 3

    def config(self) -> Config:
        """Return a configuration with one site that has these images."""
        data = [f"data.size={self.size}", f"data.grey={str(self.grey).lower()}", *self.options()]
        data += [f"data.root={self.root}"] if self.root else []
        return load("digits", [f"sites=[{self.entry()}]", f"seed={self.seed}", *data])

    def options(self) -> list[str]:
        """Return further overrides for `config`; none, unless a subclass adds some."""
        return []

    def entry(self) -> str:
        """Return the site's entry for the key `sites` of the configuration, as text."""
        return f"{{domain: {self.domain}" + (f", samples: {self.samples}" if self.samples else "") + "}"

    def site(self) -> Site:
        """Return the site that owns the training examples."""
        return self.config().roster[0]

    def selected(self, images: Examples) -> Examples:
        """Return the part of the site's images to train on: all, unless a subclass chooses."""
        return images


@lru_cache(maxsize=8)
def images(task: Task, part: str) -> Examples:
    """Return the "train", "validation" or "test" images of a task, uint8 with labels. Nothing trains on "validation"."""
    config = task.config()
    if part == "train":
        return task.selected(site_examples(config, task.site()))
    return {"validation": validation_images, "test": test_images}[part](config, SiteConfig(domain=task.domain))


def probe_set(task: Task, samples: int = 200) -> Tensor:
    """Return `samples` random training examples, float32 [samples, c, size, size] in [-1, 1]."""
    train = images(task, "train")
    order = torch.randperm(len(train), generator=torch_generator(task.seed, task.domain, "probe"))
    return to_float(train.x[order[:samples]])


def accuracy(network: nn.Module, task: Task, part: str) -> float:
    """Return a network's fraction of correct answers on a part of a task's images, in evaluation mode (then restored)."""
    training, measured = network.training, images(task, part)
    with all_cores(torch.get_num_threads()), placed(network) as device:
        right = count_right(network.eval(), measured, EVALUATION_BATCH, device)
    network.train(training)
    return right / len(measured)


@contextmanager
def placed(network: nn.Module) -> Iterator[torch.device]:
    """Move the network to a GPU, if available, and yield the device. At the end, move it to the CPU."""
    device = pick_device("auto")
    network.to(device)
    try:
        yield device
    finally:
        network.to("cpu")
