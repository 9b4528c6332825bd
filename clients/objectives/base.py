"""The interface of an objective, and the registry of objectives."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from clients.networks import Network
from conf.once import once
from conf.registry import Registry
from conf.schema import Config
from conf.sites import Site
from conf.typed import value
from fusion.exact import State


@dataclass
class Task:
    """All that a site has at hand in one round.

    `members` is the number of sites in the aggregate. `network` is on the device to train on, its weights still to be
    loaded. `incoming` are the records that the server sent, `own` the site's state after the round before (None: it
    never trained). `generator` is for the objective's own random choices.
    """

    config: Config
    site: Site
    round: int
    members: int
    network: Network
    incoming: dict[str, State]
    own: State | None
    generator: torch.Generator

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return next(self.network.parameters()).device


class Session(ABC):
    """An objective at work on one task: it holds the parameters and computes the loss of a batch."""

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """What the optimiser moves."""

    @abstractmethod
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of one batch: float32 images [n, c, h, w], int64 labels [n]."""

    @abstractmethod
    def contribution(self) -> dict[str, State]:
        """What goes to the server, by record name (clients.messages)."""

    @abstractmethod
    def own(self) -> State | None:
        """What the site keeps for its next round; None if nothing."""


@dataclass(frozen=True)
class Objective(ABC):
    """The options of an objective; `session` puts it to work. `baselines` of a configuration are other modes of it."""

    mode: str = value("", "its variant, by name")

    @abstractmethod
    def session(self, task: Task) -> Session:
        """Start on a task."""


OBJECTIVES: Registry[Objective] = Registry("objective")


@once
def objective_of(config: Config) -> Objective:
    """The configured objective; UserError if there is no such objective or option."""
    return OBJECTIVES.build(config.objective, "objective")
