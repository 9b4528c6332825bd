"""The options of layer selection, and the objects built from them."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedloom.clients.data.schema import CLASS
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
    """The options of layer selection."""

    targets = (CLASS,)
    mode: str = option(
        LEARNED, "learned, or one configuration for all sites: all, none, alternating, top-K, bottom-K, only-2-4"
    )
    learner: dict[str, Any] = option({"name": "hps"}, "base learner: hps, tf or df_cnn, with its options", named=True)
    search: dict[str, Any] = option(
        {"name": "sampled"},
        "how the M-step's gradients are computed: exact, pruned or sampled, with its options",
        named=True,
    )
    layers: list[str] = option([], "layers that may be shared; empty: the extractor's convolutions, or its linear layers")
    groups: list[int] = option([], "sizes of groups of layers that are shared together, from the input; empty: all 1", low=1)
    prior: str = option("counts", "prior of configurations: counts (Eq. 1), posteriors or tasks", choices=tuple(PRIORS))
    smoothing: float = option(1.0, "initial count of each configuration; 1: Eq. 1", low=0.001, high=1e6)
    likelihood: str = option(
        "mean", "likelihood of a batch: its labels' mean or joint probability", choices=tuple(LIKELIHOODS)
    )
    m_steps: int = option(2, "gradient steps for each E-step, each on a new batch", low=1)
    warm_up: int = option(
        0,
        "number of first rounds in which a site shares all layers; its own layers then start from the shared ones",
        low=0,
    )
    held_out: float = option(
        0.0, "share of the site's images that only the E-step uses; 0: it uses the training batches", low=0.0, high=0.9
    )
    certainty: float = option(
        1.0, "posterior of the configuration set by mode; the others share the rest (Sec. 4.3)", low=0.01, high=1.0
    )
    limit: int = option(10, "most groups of layers: there are 2^groups configurations", low=1, high=12)

    @functools.cached_property
    def base(self) -> BaseLearner:
        """The base learner, which computes shared layers."""
        return BASE_LEARNERS.build(self.learner, "objective.learner")

    @functools.cached_property
    def way(self) -> Search:
        """The way to compute the M-step's gradients, of the option `search`."""
        return SEARCHES.build(self.search, "objective.search")

    def layers_of(self, config: Config, site: Site) -> Layers:
        """Return the layers of a site's network that may be shared. Raises UserError if the options do not fit it."""
        architecture = architecture_of(config, site)
        return grouped(architecture, tuple(self.layers), tuple(self.groups), self.base, self.limit)

    def configurations(self, groups: int, warms_up: bool = False) -> list[Configuration]:
        """Return the transfer configurations to consider: all, or only that of `mode` or of a warm-up."""
        if self.mode == LEARNED or self.certainty < 1.0:
            return every(groups)
        return [named("all" if warms_up else self.mode, groups, "objective.mode")]

    def fixed(self, configurations: Sequence[Configuration], warms_up: bool = False) -> Tensor | None:
        """Return the fixed probability of each configuration, of `mode` or of a warm-up; None if it is learned."""
        if self.mode == LEARNED and not warms_up:
            return None
        certainty, mode = (1.0, "all") if warms_up else (self.certainty, self.mode)
        fixed = named(mode, len(configurations[0]), "objective.mode")
        others = (1.0 - certainty) / max(1, len(configurations) - 1)
        return torch.tensor(
            [certainty if configuration == fixed else others for configuration in configurations], dtype=torch.float64
        )
