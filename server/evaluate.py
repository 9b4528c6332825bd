"""Accuracy of networks on every domain of the experiment, and on the union of all of them."""

import contextlib
import os
from collections.abc import Iterator

import torch
from torch import nn

from clients.data import (
    Images,
    domain_specs,
    label,
    num_classes,
    outputs,
    site_sizes,
    test_images,
    to_float,
    validation_images,
)
from clients.device import pick_device
from clients.networks import Reading, build_network
from clients.randomness import torch_generator
from conf.errors import UserError
from conf.schema import Config
from conf.sites import UNION, roster
from fusion.exact import State
from fusion.repair import recompute_statistics

RECOMPUTED = "recomputed"


class Evaluator:
    """Measures states of the configured network. `split` is "validation" or "test"; only the former may guide a choice."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.device = pick_device("cpu" if config.engine.device == "cpu" else "auto")
        self.network = build_network(config, num_classes(config)).to(self.device).eval()
        self.specs = domain_specs(config)
        self._images: dict[tuple[str, str], Images] = {}

    def reading(self, network: nn.Module, domain: str) -> nn.Module:
        """A network as it is measured on a domain, in evaluation mode."""
        outs = outputs(self.config, self.specs[domain])
        return Reading(network, outs, self.config.evaluation.statistics).eval()

    def accuracy(self, state: State, split: str) -> dict[str, float]:
        """Fraction of right answers for each domain, and `union`: of all their images together."""
        self.network.load_state_dict(state)
        return self.measure(split)

    def measure(self, split: str, most: int = 0) -> dict[str, float]:
        """The same of self.network as it is, on at most so many images of each domain (0: all)."""
        right, total, shares = 0, 0, {}
        with all_cores(self.config.engine.threads):
            self._recompute()
            for domain in self.specs:
                images = self.images(domain, split)
                if most:
                    images = Images(images.x[:most], images.y[:most])
                if not len(images):  # a small domain may have no validation images
                    continue
                reading = self.reading(self.network, domain)
                hits = count_right(reading, images, self.config.evaluation.batch, self.device)
                right, total = right + hits, total + len(images)
                shares[domain] = hits / len(images)
        return {**shares, UNION: right / total} if total else {}

    def settled(self, state: State) -> State:
        """The state as it is measured: with evaluation.statistics=recomputed, BatchNorm's running ones made anew."""
        if self.config.evaluation.statistics != RECOMPUTED:
            return state
        self.network.load_state_dict(state)
        self._recompute()
        return {name: tensor.cpu().clone() for name, tensor in self.network.state_dict().items()}

    def _recompute(self) -> None:
        """BatchNorm's statistics anew, where asked for: means over batches of all domains' validation images.

        Every domain weighs the same. UserError if there are no such images.
        """
        if self.config.evaluation.statistics != RECOMPUTED:
            return
        parts = [self.images(domain, "validation").x for domain in self.specs]
        fewest = min((len(part) for part in parts if len(part)), default=0)
        if not fewest:
            raise UserError(f"evaluation.statistics={RECOMPUTED}: needs validation images; set data.validation above 0")
        mixed = torch.stack([part[:fewest] for part in parts if len(part)], dim=1).flatten(0, 1)
        batches = mixed.tensor_split(pieces(len(mixed), self.config.evaluation.batch))
        recompute_statistics(self.network, [to_float(batch.to(self.device)) for batch in batches])

    def images(self, domain: str, split: str) -> Images:
        """The images of a domain, in an order of chance: a batch is then a random draw."""
        if (domain, split) not in self._images:
            loader = {"validation": validation_images, "test": test_images}[split]
            found = loader(self.config, self.specs[domain])
            order = torch.randperm(len(found), generator=torch_generator(self.config.seed, domain, split, "order"))
            self._images[domain, split] = Images(found.x[order], found.y[order])
        return self._images[domain, split]


def pieces(number: int, most: int) -> int:
    """How many batches of about equal size, none above `most`, so many images make."""
    return max(1, -(-number // most))


def count_right(network: nn.Module, images: Images, batch: int, device: torch.device) -> int:
    """How many of the images the network (in eval mode) classifies rightly."""
    hits = torch.zeros((), dtype=torch.int64, device=device)
    parts = pieces(len(images), batch)
    with torch.inference_mode():
        for pixels, labels in zip(images.x.tensor_split(parts), images.y.tensor_split(parts), strict=True):
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
