"""The interface of an objective, and the registry of objectives."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedloom.clients.data import Examples, label, outputs, task_of, variant
from fedloom.clients.data.schema import TASKS
from fedloom.clients.data.standardise import way_of
from fedloom.clients.networks import Architecture, Network, architecture_of, network_text, start_of
from fedloom.clients.protocol.messages import MODEL
from fedloom.clients.training.loss import Loss, loss_of
from fedloom.clients.training.recipe import Recipe, recipe_of
from fedloom.clients.training.session import Session
from fedloom.conf.errors import UserError
from fedloom.conf.registry import Registry
from fedloom.conf.schema import Config, DataConfig, EngineConfig, EvaluationConfig, FederationConfig, PrivacyConfig
from fedloom.conf.sites import Site
from fedloom.conf.typed import option
from fedloom.fusion.state import State


def nothing_held_out(split: str) -> Examples:
    """Raise UserError, as Task.held_out of a site without held-out images."""
    raise UserError(f"{split}: this site has no {split} images")


def no_targets() -> Tensor:
    """Return no targets, as Task.targets of a site without training examples."""
    return torch.zeros(0, dtype=torch.int64)


@dataclass
class Task:
    """Everything an objective needs at one site in one round.

    Attributes:
        experiment: The resolved configuration.
        site: The site.
        round: The round, from 1.
        members: Number of sites in the aggregate.
        network: The network on the device to train on. The objective must load its weights.
        incoming: The records from the server, by name.
        load_local_state: Reads the site's own state after the previous round; use `own`.
        generator: Source of the objective's random choices.
        restoring: Whether the round restores the aggregate after a site was subtracted.
        back: The share of the way by which the site's state first moves back to its initial one, in such a round.
        held_out: Returns the site's "validation" or "test" images.
        targets: Returns the targets of the site's training examples.
    """

    experiment: "Experiment"
    site: Site
    round: int
    members: int
    network: Network
    incoming: dict[str, State]
    load_local_state: Callable[[], State | None]
    generator: torch.Generator
    held_out: Callable[[str], Examples] = nothing_held_out
    targets: Callable[[], Tensor] = no_targets
    restoring: bool = False
    back: float = 0.0

    def __repr__(self) -> str:
        return f"Task({self.site.name}, round {self.round})"

    @property
    def config(self) -> Config:
        """The run's configuration."""
        return self.experiment.config

    @property
    def architecture(self) -> Architecture:
        """The architecture of the site's network."""
        return self.experiment.architecture(self.site)

    @functools.cached_property
    def own(self) -> State | None:
        """The site's own state after its previous round; None if it has not trained. Raises LostStateError if lost."""
        return self.load_local_state()

    @functools.cached_property
    def loss_of_site(self) -> Loss:
        """The configured loss, with what it takes from the site's training targets."""
        loss, block = self.experiment.loss, outputs(self.config, self.site.spec)
        return loss.of_site(self.targets(), block.stop - block.start) if loss.by_site else loss

    def loss(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar.

        Args:
            scores: The outputs, [n, outputs]; for next tokens, [n, steps, outputs].
            labels: The targets, as data.schema.Schema says.
        """
        return self.loss_of_site.value(scores, labels, self.config.training.label_smoothing)

    @property
    def device(self) -> torch.device:
        """The network's device."""
        return next(self.network.parameters()).device


@dataclass(frozen=True)
class Answer:
    """A site's reply to a question: states by record name, and numbers by name."""

    records: dict[str, State] = field(default_factory=dict[str, State])
    metrics: Mapping[str, int | float | list[int]] = field(default_factory=dict[str, int | float | list[int]])


@dataclass(frozen=True)
class Objective(ABC):
    """Base class of a method's client half: a frozen dataclass of options.

    One object serves all sites of a process. What it stores of one site in attributes is undone before the next site: data
    of a site belong in the session. A configuration's option `baselines` lists other values of `mode`.

    Attributes:
        targets: The tasks whose targets the method takes (data.schema.TASKS).
        starts_at_server: Whether sites receive their networks, so that only the server reads network.start.
        keeps_frozen: Whether the method supports network.freeze.
        requires_strategy: The strategy whose additional records the sites need; empty: any.
    """

    targets: ClassVar[tuple[str, ...]] = TASKS
    starts_at_server: ClassVar[bool] = False
    keeps_frozen: ClassVar[bool] = False
    requires_strategy: ClassVar[str] = ""

    mode: str = option("", "variant of the method, by name", listed=False)  # a subclass with variants lists its own

    @abstractmethod
    def session(self, task: Task) -> Session:
        """Return a session that trains the task's network for one round."""

    def answer(self, kind: str, task: Task, images: Examples) -> Answer:
        """Answer a question of the method's strategy.

        Args:
            kind: The question's name.
            task: The site's task. Its network is in training mode, and must be so afterwards.
            images: The site's training examples.

        Raises:
            UserError: The method does not know this question.
        """
        raise UserError(f"order.kind: objective '{type(self).__name__}' does not know the question '{kind}'")

    def network(self, task: Task, images: Examples) -> State | None:
        """Return the state of the network to evaluate: the message's (MODEL), else the site's own, else None.

        A personalised method first fits it to `images`, the site's training examples.
        """
        return task.incoming.get(MODEL) or task.own

    def needed_strategy(self) -> str:
        """Return the strategy that this object needs, or one derived from it; empty: any."""
        return self.requires_strategy


OBJECTIVES: Registry[Objective] = Registry("objective", Objective, "fedloom.clients.objectives", {
    "components.objective": "components", "depthfl": "depthfl", "ditto": "ditto", "fedavg": "fedavg", "fednova": "fednova",
    "fedprox": "fedprox", "fedproto": "fedproto", "heterofl": "heterofl", "heterogeneous": "heterogeneous",
    "layer_selection.objective": "layer_selection", "local": "local", "scaffold": "scaffold",
    "sum_aggregation": "sum_aggregation",
})  # fmt: skip


@dataclass(frozen=True, eq=False)
class Experiment:
    """A resolved configuration: its objective and training recipe are built, once in each process.

    `config`: the unresolved configuration. Its sections are also properties of this class.
    """

    config: Config
    objective: Objective
    training: Recipe

    @property
    def seed(self) -> int:
        """The seed of all random draws."""
        return self.config.seed

    @property
    def rounds(self) -> int:
        """The number of federated rounds."""
        return self.config.rounds

    @property
    def sites(self) -> list[Site]:
        """All sites, in order."""
        return self.config.roster

    @property
    def data(self) -> DataConfig:
        """The section `data`."""
        return self.config.data

    @property
    def engine(self) -> EngineConfig:
        """The section `engine`."""
        return self.config.engine

    @property
    def federation(self) -> FederationConfig:
        """The section `federation`."""
        return self.config.federation

    @property
    def privacy(self) -> PrivacyConfig:
        """The section `privacy`."""
        return self.config.privacy

    @property
    def evaluation(self) -> EvaluationConfig:
        """The section `evaluation`."""
        return self.config.evaluation

    @functools.cached_property
    def task(self) -> str:
        """The task of the targets, one of data.schema.TASKS."""
        return task_of(self.config)

    @functools.cached_property
    def standardise(self) -> str:
        """Whose mean and deviation standardise the examples: one of data.standardise.NONE, SITE and SITES."""
        return way_of(self.config)

    @functools.cached_property
    def loss(self) -> Loss:
        """The loss of the task. Raises UserError if training.loss does not take its targets."""
        return loss_of(self.config.training, self.task)

    @functools.cached_property
    def _architectures(self) -> dict[Any, Architecture]:
        return {}  # by a site's index; and by its variant and section `network`, which many sites share

    def architecture(self, site: Site | None = None) -> Architecture:
        """Return the architecture of a site, or (None) of the configuration's `network`."""
        known, index = self._architectures, -1 if site is None else site.index
        if index not in known:
            key = site and (variant(site.spec), network_text(self.config, site))
            if key not in known:
                known[key] = architecture_of(self.config, site)
            known[index] = known[key]
        return known[index]

    @property
    def architectures(self) -> set[Architecture]:
        """The architectures of all sites."""
        return {self.architecture(site) for site in self.sites}

    @functools.cached_property
    def starts(self) -> dict[str, Site]:
        """The files that networks start from (network.start), each with a site of such a network."""
        specs = {id(site.spec): site.spec for site in self.sites}.values()
        if not any("start" in each for spec in specs for each in (self.config.network, spec.network, *spec.networks)):
            return {}
        return {path: site for site in reversed(self.sites) if (path := start_of(self.config, site))}

    def check_start(self) -> None:
        """Raise UserError if a site of a real federation would have to read the server's file network.start."""
        if not self.objective.starts_at_server and self.starts:
            raise UserError(f"network.start: sites of a real federation do not have this file, and objective "
                            f"'{self.config.objective.get('name')}' starts at the site; use fedavg")  # fmt: skip

    def common_architecture(self) -> Architecture:
        """Return the architecture that all sites share. Raises UserError, naming a site, if they differ."""
        sites = self.sites
        first = self.architecture(sites[0])
        for site in sites:
            if self.architecture(site) != first:
                odd = f"{site.name} ({label(site.spec)}): its network differs from {sites[0].name}'s"
                takes = "needs the same network at all sites. Use cla_ot, for example, for different ones."
                raise UserError(f"{odd}; strategy '{self.config.strategy.get('name')}' {takes}")
        return first


def resolve(config: Config) -> Experiment:
    """Build the objective and training recipe of a configuration. Raises UserError for unknown names and options."""
    return Experiment(config, objective_of(config), recipe_of(config.training))


def objective_of(config: Config) -> Objective:
    """Return the configured objective. Raises UserError for an unknown objective or option."""
    return OBJECTIVES.build(config.objective, "objective")
