"""The images of a domain as networks take them, and how many of them a network gets right."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from fedloom.clients.data import Images, site_images, test_images, to_float, validation_images
from fedloom.clients.training.device import pick_device
from fedloom.conf import load
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config, SiteConfig
from fedloom.conf.sites import Site
from fedloom.server.evaluation.evaluator import all_cores, count_right

EVALUATION_BATCH = 500


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


@lru_cache(maxsize=8)
def images(task: Task, part: str) -> Images:
    """Its "train", "validation" (of the training part, trained on by nobody) or "test" images, uint8 with labels."""
    config = task.config()
    if part == "train":
        return task.selected(site_images(config, task.site()))
    return {"validation": validation_images, "test": test_images}[part](config, SiteConfig(domain=task.domain))


def probe_set(task: Task, samples: int = 200) -> Tensor:
    """`samples` random training images, float32 [samples, c, size, size] in [-1, 1]."""
    every = images(task, "train")
    order = torch.randperm(len(every), generator=torch_generator(task.seed, task.domain, "probe"))
    return to_float(every.x[order[:samples]])


def accuracy(network: nn.Module, task: Task, part: str) -> float:
    """Fraction of right answers, in eval mode; the mode is then what it was."""
    was, every = network.training, images(task, part)
    with all_cores(torch.get_num_threads()), placed(network) as device:
        right = count_right(network.eval(), every, EVALUATION_BATCH, device)
    network.train(was)
    return right / len(every)


@contextmanager
def placed(network: nn.Module) -> Iterator[torch.device]:
    """The network is on a GPU meanwhile, if there is one, and then on the CPU."""
    device = pick_device("auto")
    network.to(device)
    try:
        yield device
    finally:
        network.to("cpu")
