"""Images at the server that belong to no site: held out from the run's domains, or from a public domain."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.data import Examples, validation_images
from fedloom.clients.data.domains import locate
from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError
from fedloom.conf.sites import SiteConfig
from fedloom.conf.typed import option
from fedloom.server.rounds.view import View


@dataclass(frozen=True)
class PublicImages:
    """Which held-out images a method uses. The method decides whether it reads labels."""

    domain: str = option("", "domain of the held-out images; empty: all of the run's domains")
    samples: int = option(1000, "number of images, at most", low=0)

    def check(self, experiment: Experiment, key: str) -> None:
        """Raise UserError, naming the option `key`, if the domain is not available or the server has no images."""
        if self.samples < 2:
            raise UserError(f"{key}.samples: got {self.samples}, takes a number of at least 2")
        if self.domain:
            try:
                locate(self.domain, experiment.data)
            except UserError as error:
                raise UserError(f"{key}.domain: {error}") from None
        elif not experiment.data.validation:
            raise UserError(f"{key}: needs held-out images; set data.validation above 0, or name a domain")

    def read(self, view: View, key: str) -> Tensor:
        """Return the images, float32 [samples, c, size, size] in [-1, 1], equally many of each domain."""
        return view.evaluator.inputs(self.labelled(view, key).x)

    def labelled(self, view: View, key: str) -> Examples:
        """Return the images, not scaled, with their labels.

        Raises:
            UserError: There are fewer than two images.
        """
        specs = [SiteConfig(domain=self.domain)] if self.domain else list(view.evaluator.specs.values())
        each = -(-self.samples // len(specs))
        parts = [validation_images(view.experiment.config, spec) for spec in specs]
        x = torch.cat([part.x[:each] for part in parts])[: self.samples]
        y = torch.cat([part.y[:each] for part in parts])[: self.samples]
        if len(x) < 2:
            raise UserError(f"{key}: no held-out images; set data.validation above 0")
        return Examples(x, y)
