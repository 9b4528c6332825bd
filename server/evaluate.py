"""Accuracy of networks on every domain of the experiment, and on the union of all of them."""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import nn

from clients.data import Images, domain_specs, label, num_classes, site_sizes, test_images, to_float, validation_images
from clients.device import pick_device
from clients.networks import build_network
from conf.schema import Config
from conf.sites import roster
from fusion.exact import State

UNION = "union"


class Evaluator:
    """Measures states of the configured network. `split` is "validation" or "test"; only the former may guide a choice."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = pick_device("cpu" if config.engine.device == "cpu" else "auto")
        self.network = build_network(config, num_classes(config)).to(self.device).eval()
        self.specs = domain_specs(config)
        self._images: dict[tuple[str, str], Images] = {}

    def accuracy(self, state: State, split: str) -> dict[str, float]:
        """Fraction of right answers for each domain, and `union`: of all their images together."""
        self.network.load_state_dict(state)
        right, total, shares = 0, 0, {}
        with all_cores(self.config.engine.threads):
            for domain in self.specs:
                images = self._load(domain, split)
                if not len(images):  # a small domain may have no validation images
                    continue
                hits = count_right(self.network, images, self.config.evaluation.batch, self.device)
                right, total = right + hits, total + len(images)
                shares[domain] = hits / len(images)
        return {**shares, UNION: right / total} if total else {}

    def _load(self, domain: str, split: str) -> Images:
        if (domain, split) not in self._images:
            loader = {"validation": validation_images, "test": test_images}[split]
            self._images[domain, split] = loader(self.config, self.specs[domain])
        return self._images[domain, split]


def count_right(network: nn.Module, images: Images, batch: int, device: torch.device) -> int:
    """How many of the images the network (in eval mode) classifies rightly."""
    hits = torch.zeros((), dtype=torch.int64, device=device)
    with torch.inference_mode():
        for pixels, labels in zip(images.x.split(batch), images.y.split(batch), strict=True):
            guesses = network(to_float(pixels.to(device))).argmax(dim=1)
            hits += (guesses == labels.to(device)).sum()
    return int(hits)


def site_rows(config: Config) -> list[dict[str, object]]:
    """The `sites` of summary.json: name, domain (its label), number of training images."""
    sites = zip(roster(config), site_sizes(config), strict=True)
    return [{"name": site.name, "domain": label(site.spec), "samples": size} for site, size in sites]


@contextlib.contextmanager
def all_cores(afterwards: int) -> Iterator[None]:
    """Let torch use every core for a while, then `afterwards` threads again."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(afterwards)
