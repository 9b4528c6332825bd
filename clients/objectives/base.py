"""The interface of an objective, and the registry of objectives."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedloom.clients.data import Images, label
from fedloom.clients.networks import Architecture, Network, architecture_of
from fedloom.clients.protocol.messages import MODEL
from fedloom.clients.training.loss import task_loss
from fedloom.clients.training.recipe import Recipe, recipe_of
from fedloom.clients.training.session import Session
from fedloom.conf.errors import UserError
from fedloom.conf.registry import Registry
from fedloom.conf.schema import Config, DataConfig, EngineConfig, EvaluationConfig, FederationConfig, PrivacyConfig
from fedloom.conf.sites import Site
from fedloom.conf.typed import option
from fedloom.fusion.state import State


def nothing_held_out(split: str) -> Images:
    """No images of any split."""
    raise UserError(f"{split}: this site has no such images")


@dataclass
class Task:
    """All that a site has at hand in one round.

    `members` is the number of sites in the aggregate. `network` is on the device to train on, its weights still to be
    loaded. `incoming` are the records that the server sent, `load_local_state` reads the site's own state after the round
    before. `generator` is for the objective's own random choices. `held_out` gives the site's own images that it does not
    train on: those of "validation" or "test".
    """

    experiment: "Experiment"
    site: Site
    round: int
    members: int
    network: Network
    incoming: dict[str, State]
    load_local_state: Callable[[], State | None]
    generator: torch.Generator
    held_out: Callable[[str], Images] = nothing_held_out

    @property
    def config(self) -> Config:
        """The configuration."""
        return self.experiment.config

    @property
    def architecture(self) -> Architecture:
        """Of the site's network."""
        return self.experiment.architecture(self.site)

    @functools.cached_property
    def own(self) -> State | None:
        """The site's own state after the round before; None if it never trained. Raises LostStateError if it is gone."""
        return self.load_local_state()

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy of scores [n, classes] with labels [n], as training.label_smoothing says."""
        return task_loss(scores, labels, self.config.training.label_smoothing)

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.network.parameters()).device


@dataclass(frozen=True)
class Answer:
    """What a site says to a question other than TRAIN: states by record name, and numbers by name."""

    records: dict[str, State] = field(default_factory=dict[str, State])
    metrics: Mapping[str, int | float | list[int]] = field(default_factory=dict[str, int | float | list[int]])


@dataclass(frozen=True)
class Objective(ABC):
    """The options of an objective: the site's half of a method. `baselines` of a configuration are other modes of it."""

    mode: str = option("", "its variant, by name")

    @abstractmethod
    def session(self, task: Task) -> Session:
        """Start on a task."""

    def answer(self, kind: str, task: Task, images: Images) -> Answer:
        """Answer a question of the method's own strategy. UserError for a kind that the method does not know.

        `task.network` is in training mode, and is so again afterwards: the next site trains in it.
        """
        raise UserError(f"order.kind: '{kind}' is no question to objective '{type(self).__name__}'")

    def network(self, task: Task, images: Images) -> State | None:
        """What is measured at the site: the network that was sent (MODEL), or else the site's own; None: it has none.

        A personalised method fits it to the site's training `images` first.
        """
        return task.incoming.get(MODEL) or task.own


OBJECTIVES: Registry[Objective] = Registry("objective", Objective, "fedloom.clients.objectives", {
    "components.objective": "components", "depthfl": "depthfl", "ditto": "ditto", "fedavg": "fedavg", "fednova": "fednova",
    "fedprox": "fedprox", "fedproto": "fedproto", "heterofl": "heterofl", "heterogeneous": "heterogeneous",
    "layer_selection.objective": "layer_selection", "local": "local", "scaffold": "scaffold",
    "sum_aggregation": "sum_aggregation",
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class Experiment:
    """A configuration, resolved: what it names is built once in each process, and handed down.

    `config`: as it was written. Numbers and switches of its sections are here, too.
    """

    config: Config
    objective: Objective
    training: Recipe

    @property
    def seed(self) -> int:
        """Of everything that is random."""
        return self.config.seed

    @property
    def rounds(self) -> int:
        """Federated rounds."""
        return self.config.rounds

    @property
    def sites(self) -> list[Site]:
        """All sites, in order."""
        return self.config.roster

    @property
    def data(self) -> DataConfig:
        """Where domains come from, and what every image becomes."""
        return self.config.data

    @property
    def engine(self) -> EngineConfig:
        """What carries messages."""
        return self.config.engine

    @property
    def federation(self) -> FederationConfig:
        """The round loop."""
        return self.config.federation

    @property
    def privacy(self) -> PrivacyConfig:
        """Differential privacy."""
        return self.config.privacy

    @property
    def evaluation(self) -> EvaluationConfig:
        """Measuring."""
        return self.config.evaluation

    @functools.cached_property
    def _architectures(self) -> dict[int, Architecture]:
        return {}

    def architecture(self, site: Site | None = None) -> Architecture:
        """The architecture of a site, or (None) that of the configuration's own `network`."""
        key = -1 if site is None else site.index
        if key not in self._architectures:
            self._architectures[key] = architecture_of(self.config, site)
        return self._architectures[key]

    @property
    def architectures(self) -> set[Architecture]:
        """Those of all sites."""
        return {self.architecture(site) for site in self.sites}

    def common_architecture(self) -> Architecture:
        """The architecture that all sites share. UserError naming a site whose own is another one."""
        sites = self.sites
        first = self.architecture(sites[0])
        for site in sites:
            if self.architecture(site) != first:
                odd = f"{site.name} ({label(site.spec)}): its network is another one than {sites[0].name}'s"
                takes = "takes one network for all sites (cla_ot and its rivals take several)"
                raise UserError(f"{odd}; strategy '{self.config.strategy.get('name')}' {takes}")
        return first


def resolve(config: Config) -> Experiment:
    """The configuration, resolved. UserError for unknown names and options."""
    return Experiment(config, objective_of(config), recipe_of(config.training))


def objective_of(config: Config) -> Objective:
    """The configured objective; UserError if there is no such objective or option."""
    return OBJECTIVES.build(config.objective, "objective")
