"""The options of layer selection, and what follows from them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.networks import architecture_of
from fedloom.clients.objectives.base import Objective
from fedloom.clients.objectives.layer_selection.configurations import LEARNED, Configuration, every, named
from fedloom.clients.objectives.layer_selection.layers import Layers, grouped
from fedloom.clients.objectives.layer_selection.learners import BASE_LEARNERS, BaseLearner
from fedloom.clients.objectives.layer_selection.posterior import LIKELIHOODS, PRIORS
from fedloom.clients.objectives.layer_selection.search import SEARCHES, Search
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.conf.typed import option


@dataclass(frozen=True)
class SelectionOptions(Objective):
    """What a site chooses from, and how."""

    mode: str = option(
        LEARNED, "learned, or a configuration for all sites: all, none, alternating, top-K, bottom-K, only-2-4"
    )
    learner: dict[str, Any] = option({"name": "hps"}, "base learner: hps, tf or df_cnn, with its options", named=True)
    search: dict[str, Any] = option(
        {"name": "sampled"}, "how steps are found: exact, pruned or sampled, with its options", named=True
    )
    layers: list[str] = option([], "that may be shared; empty: the extractor's convolutions, or its linear layers")
    groups: list[int] = option([], "how many layers are shared together, from the input on; empty: each by itself", low=1)
    prior: str = option("counts", "of configurations: counts (Eq. 1), posteriors or tasks", choices=tuple(PRIORS))
    smoothing: float = option(1.0, "count that each configuration starts with; 1: Eq. 1", low=0.001, high=1e6)
    likelihood: str = option("mean", "of a mini-batch: its classes' mean or joint probability", choices=tuple(LIKELIHOODS))
    m_steps: int = option(2, "gradient steps for each E-step, each on a batch of its own", low=1)
    warm_up: int = option(
        0,
        "first rounds, in which a site shares all layers; its own ones then start at these, else as its name draws them",
        low=0,
    )
    held_out: float = option(
        0.0, "share of the site's images that the E-step alone looks at; 0: it looks at batches", low=0.0, high=0.9
    )
    certainty: float = option(
        1.0, "of a configuration that is given, the others alike: its posterior (Sec. 4.3)", low=0.01, high=1.0
    )
    limit: int = option(10, "most groups of layers: there are 2^groups configurations", low=1, high=12)

    @functools.cached_property
    def base(self) -> BaseLearner:
        """The base learner."""
        return BASE_LEARNERS.build(self.learner, "objective.learner")

    @functools.cached_property
    def way(self) -> Search:
        """How steps are found."""
        return SEARCHES.build(self.search, "objective.search")

    def layers_of(self, config: Config, site: Site) -> Layers:
        """The layers of a site's network that may be shared. UserError if options do not fit it."""
        architecture = architecture_of(config, site)
        return grouped(architecture, tuple(self.layers), tuple(self.groups), self.base, self.limit)

    def configurations(self, groups: int, warms_up: bool = False) -> list[Configuration]:
        """Those that can be chosen."""
        if self.mode == LEARNED or self.certainty < 1.0:
            return every(groups)
        return [named("all" if warms_up else self.mode, groups, "objective.mode")]

    def fixed(self, configurations: Sequence[Configuration], warms_up: bool = False) -> Tensor | None:
        """The posterior of a configuration that is given, or of all layers in a warm-up; None where it is learned."""
        if self.mode == LEARNED and not warms_up:
            return None
        certainty, mode = (1.0, "all") if warms_up else (self.certainty, self.mode)
        given = named(mode, len(configurations[0]), "objective.mode")
        others = (1.0 - certainty) / max(1, len(configurations) - 1)
        return torch.tensor([certainty if one == given else others for one in configurations], dtype=torch.float64)
