"""FedDF (Lin et al. 2020): the mean of each architecture learns, on public images without labels, what all sites answer."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from clients.data import to_float, validation_images
from clients.data.domains import find
from clients.networks import Model
from clients.randomness import torch_generator
from conf.errors import UserError
from conf.schema import Config, SiteConfig
from conf.typed import value
from fusion.distillation import Distillation, distil
from fusion.exact import State
from server.rounds.view import View
from server.strategies.architectures import group_by_site
from server.strategies.base import STRATEGIES
from server.strategies.by_architecture import ByArchitecture, averaged, cast, has, kept


@dataclass(frozen=True)
class PublicImages:
    """Images at the server, of which no label is looked at."""

    domain: str = value("", "whose held-out images; empty: those of the run's domains, all of them together")
    samples: int = value(1000, "how many at most", low=2)

    def read(self, view: View) -> Tensor:
        """float32 [samples, c, size, size] in [-1, 1], as many of each domain. UserError if there are none."""
        specs = [SiteConfig(domain=self.domain)] if self.domain else list(view.evaluator.specs.values())
        each = -(-self.samples // len(specs))
        images = torch.cat([validation_images(view.config, spec).x[:each] for spec in specs])[: self.samples]
        if len(images) < 2:
            raise UserError("strategy.public: there are no held-out images; set data.validation above 0")
        return to_float(images)


@STRATEGIES.register("feddf")
@dataclass(frozen=True)
class FedDF(ByArchitecture):
    """Alg. 3: students are the means of the architectures, the teacher is the mean of all sites' logits, T = 1."""

    public: PublicImages = value(PublicImages, "what is distilled on")
    steps: int = value(300, "of Adam in each round, for each architecture", low=1)
    rate: float = value(1e-3, "learning rate at the start; it falls to 0 as half a cosine", low=0.0)
    batch: int = value(128, "images in each step", low=2)

    def check(self, config: Config) -> None:
        """UserError for an unknown public domain, and where the server has no images."""
        super().check(config)
        if self.public.domain:
            find(self.public.domain)
        elif not config.data.validation:
            raise UserError("strategy.public: needs held-out images; set data.validation above 0, or name a domain")

    def combined(self, view: View) -> Mapping[str, State]:
        images, means = self.public.read(view), averaged(view)
        if not means:
            return {}
        answers = self._answers(view, images)
        settings = Distillation(self.steps, self.rate, self.batch)
        found = {}
        for one in means:
            network = view.evaluator.loaded(Model(one.group.architecture, one.state))
            generator = torch_generator(view.config.seed, "distillation", one.group.name, str(view.round))
            distil(network, images, answers, settings, generator)
            found[one.group.name] = {name: tensor.cpu().clone() for name, tensor in network.state_dict().items()}
        return found

    @torch.no_grad()
    def _answers(self, view: View, images: Tensor) -> Tensor:
        """The mean logits of the sites' networks, one after the other."""
        total, sites = torch.zeros(()), [site for site in view.sites if has(view, site)]
        for site in sites:
            group = group_by_site(view.config)[site.name]
            state = cast(view.contribution(group.name, site.name), view.kept(kept(group.name)))
            total = total + view.evaluator.loaded(Model(group.architecture, state))(images).double()
        return (total / len(sites)).float()
