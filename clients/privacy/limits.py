"""What one order may cost a site of a real federation, whatever the server's configuration says."""

import functools
from dataclasses import dataclass

import torch

from fedloom.clients.networks import Architecture, architecture_of, network_text
from fedloom.clients.objectives import Experiment
from fedloom.clients.protocol.failures import RefusedError
from fedloom.clients.training.learner import step_count
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site

FLIPS = ("RandomHorizontalFlip", "RandomVerticalFlip")
MOST_OPTIONS = 4000  # letters of a network's options: a list of thousands of layers takes minutes to look at


@dataclass(frozen=True)
class Limits:
    """`steps`: most steps of the optimiser in a round. `parameters`: most millions of parameters of a network.

    `batch`: fewest images of a batch; those that are left of a pass are left out. 0: no limit. Keys of site.yaml: max_steps,
    max_parameters, min_batch.
    """

    steps: int = 0
    parameters: float = 0.0
    batch: int = 0

    def check(self, config: Config, site: Site) -> None:
        """RefusedError for a configuration whose network is larger, or whose batches are smaller, than the site allows."""
        if config.training.batch < self.batch:
            raise RefusedError(f"training.batch: got {config.training.batch}, and this site trains on batches of at least "
                               f"{self.batch} (site.yaml: min_batch)")  # fmt: skip
        self._check_steps(config.training.steps, "training.steps")
        if self.parameters and (letters := len(network_text(config, site))) > MOST_OPTIONS:
            raise RefusedError(f"network: its options have {letters} letters, and a site takes at most {MOST_OPTIONS}")
        if self.parameters and (size := parameters_of(architecture_of(config, site)) / 1e6) > self.parameters:
            raise RefusedError(f"network: has {size:.4g} million parameters, and this site takes at most "
                               f"{self.parameters:g} (site.yaml: max_parameters)")  # fmt: skip

    def check_images(self, images: int, experiment: Experiment, site: Site) -> None:
        """RefusedError for a round with more steps on so many images than the site takes, or of too few images."""
        if images < self.batch:
            raise RefusedError(f"sites.samples: {images} training images, and this site trains on batches of at least "
                               f"{self.batch} (site.yaml: min_batch)")  # fmt: skip
        self._check_steps(step_count(images, experiment, site), "training.epochs")

    def _check_steps(self, steps: int, key: str) -> None:
        if self.steps and steps > self.steps:
            raise RefusedError(f"{key}: a round has {steps} steps, and this site takes at most {self.steps} "
                               "(site.yaml: max_steps)")  # fmt: skip


def check_harmless(config: Config) -> None:
    """RefusedError for changes to images that can leave nothing of most of them, or mark a few, as the border of a crop
    does: with a seed chosen for it, one image of one site would be all that is trained on."""
    for one in config.training.augment:
        given = one if isinstance(one, dict) else {"name": one}
        if given.get("name") not in FLIPS or given.keys() - {"name"}:
            raise RefusedError(f"training.augment: {given} may leave nothing of most images, or mark a few, and this site "
                               f"hides what it trains; takes {', '.join(FLIPS)}, without options")  # fmt: skip


@functools.lru_cache(maxsize=64)
def parameters_of(architecture: Architecture) -> int:
    """The number of weights of a network, counted without memory for them where its code allows that."""
    with torch.device("meta"):
        network = architecture.made()
    return sum(tensor.numel() for tensor in network.state_dict().values())
