"""Limits of what one order can cost a site of a real federation, whatever the server's configuration says."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict

from fedloom.clients.networks import Architecture, architecture_of, network_text
from fedloom.clients.objectives import Experiment
from fedloom.clients.protocol.failures import RefusedError
from fedloom.clients.protocol.messages import TRAIN, content_bytes
from fedloom.clients.training.learner import step_count
from fedloom.conf.errors import UserError
from fedloom.conf.machine import size_of
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site

FLIPS = ("RandomHorizontalFlip", "RandomVerticalFlip")
MOST_STEPS, MOST_PARAMETERS, LEAST_BATCH, MOST_STORE = 100_000, 500.0, 8, 20.0  # defaults
MOST_OPTIONS = 4000  # characters of a network's options: thousands of layers take minutes to check


@dataclass(frozen=True)
class Limits:
    """The site's limits; 0 means no limit.

    Attributes:
        steps: Most optimiser steps in a round (max_steps in site.yaml).
        parameters: Most parameters of a network, in millions (max_parameters).
        batch: Fewest images of a batch; the smaller rest of an epoch is skipped (min_batch).
        message: The largest message that it answers, in MB (largest_order).
        store: Most disk space of the site's store, in GB: with more, it does not train (max_store).
    """

    steps: int = 0
    parameters: float = 0.0
    batch: int = 0
    message: float = 0.0
    store: float = 0.0

    @staticmethod
    def of(node_config: Mapping[str, Any], hides: bool) -> "Limits":
        """Return the limits in a node-config. `hides`: the site hides what it trains, so a batch has more images.

        Raises UserError for an invalid value.
        """
        return Limits(count(node_config, "max_steps", MOST_STEPS) or 0,
                      number(node_config, "max_parameters", MOST_PARAMETERS),
                      count(node_config, "min_batch", LEAST_BATCH if hides else 1) or 0,
                      number(node_config, "largest_order", 0.0), number(node_config, "max_store", MOST_STORE))  # fmt: skip

    def check_message(self, content: RecordDict) -> None:
        """Raise RefusedError for a message that is larger than the site allows."""
        size = content_bytes(content) / 1e6
        if 0 < self.message < size:
            reason = f"has {size:.1f} MB, but this site's policy allows {self.message:g}"
            raise RefusedError(f"order: {reason} (site.yaml: largest_order)")

    def check_store(self, root: Path) -> None:
        """Raise RefusedError if the files in a site's store take more disk space than the site allows."""
        if self.store and (size := size_of(root) / 1e9) > self.store:
            reason = f"needs disk space, but the site's store has {size:.3g} GB and its limit is {self.store:g}"
            raise RefusedError(f"order.kind: '{TRAIN}' {reason} (site.yaml: max_store). Its owner can delete folders of "
                               "old runs there, or raise the limit.")  # fmt: skip

    def check(self, config: Config, site: Site) -> None:
        """Raise RefusedError if the network is larger, the batch smaller or training.steps more than the site allows."""
        if config.training.batch < self.batch:
            raise RefusedError(f"training.batch: got {config.training.batch}, but this site trains on batches of at least "
                               f"{self.batch} (site.yaml: min_batch)")  # fmt: skip
        self._check_steps(config.training.steps, "training.steps")
        if self.parameters and (characters := len(network_text(config, site))) > MOST_OPTIONS:
            raise RefusedError(f"network: its options have {characters} characters, but a site takes at most {MOST_OPTIONS}")
        if self.parameters and (size := parameters_of(architecture_of(config, site)) / 1e6) > self.parameters:
            raise RefusedError(f"network: has {size:.4g} million parameters, but this site takes at most "
                               f"{self.parameters:g} (site.yaml: max_parameters)")  # fmt: skip

    def check_examples(self, images: int, experiment: Experiment, site: Site) -> None:
        """Raise RefusedError if the site has too few images, or a round on them has too many steps."""
        if images < self.batch:
            raise RefusedError(f"sites.samples: {images} training examples, but this site trains on batches of at least "
                               f"{self.batch} (site.yaml: min_batch)")  # fmt: skip
        self._check_steps(step_count(images, experiment, site), "training.epochs")

    def _check_steps(self, steps: int, key: str) -> None:
        if self.steps and steps > self.steps:
            raise RefusedError(f"{key}: a round has {steps} steps, but this site takes at most {self.steps} "
                               "(site.yaml: max_steps)")  # fmt: skip


def check_harmless(config: Config) -> None:
    """Raise RefusedError for an augmentation other than flips, because it could single out images.

    Some changes can erase most images, or mark a few (the border of a crop). With a chosen seed, only one image of
    one site would then affect the training.
    """
    for entry in config.training.augment:
        change = entry if isinstance(entry, dict) else {"name": entry}
        if change.get("name") not in FLIPS or change.keys() - {"name"}:
            raise RefusedError(f"training.augment: {change} could erase most images or mark a few, and this site "
                               f"hides what it trains; takes {', '.join(FLIPS)}, without options")  # fmt: skip


@functools.lru_cache(maxsize=64)
def parameters_of(architecture: Architecture) -> int:
    """Return the number of entries in a network's state. Allocates no memory for them if the network's code allows that."""
    with torch.device("meta"):
        network = architecture.made()
    return sum(tensor.numel() for tensor in network.state_dict().values())


# Settings of a node-config. Each function raises UserError for an invalid one.


def number(node_config: Mapping[str, Any], key: str, default: float, most: float = math.inf) -> float:
    """Return a number from 0 to `most`."""
    value = node_config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise UserError(
            f"{key}: got {value!r}, takes a number" + (f" from 0 to {most:g}" if math.isfinite(most) else " of at least 0")
        )
    return float(value)


def count(node_config: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    """Return a whole number of at least 0, or the default."""
    value = node_config.get(key, default)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise UserError(f"{key}: got {value!r}, takes a whole number of at least 0")
    return value


def switch(node_config: Mapping[str, Any], key: str) -> bool:
    """Return true or false (the default)."""
    value = node_config.get(key, False)
    if not isinstance(value, bool):
        raise UserError(f"{key}: got {value!r}, takes true or false")
    return value


def names(node_config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the names in a text with commas."""
    return tuple(name for part in str(node_config.get(key, "")).split(",") if (name := part.strip()))
