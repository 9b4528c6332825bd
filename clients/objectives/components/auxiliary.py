"""Auxiliary tasks: small heads that all sites share, on the features of extractors that they do not."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.clients.training.loss import full
from fedloom.conf.registry import Registry
from fedloom.conf.typed import option
from fedloom.fusion.state import State

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """What an auxiliary task sees of a site's batch: images [n, c, h, w], their features, and `common` [n]: the number of
    each image's class among those that all sites have, -1 for others."""

    images: Tensor
    features: Tensor
    common: Tensor


@dataclass(frozen=True)
class Auxiliary(ABC):
    """A task whose head is shared. A further one is a class registered in AUXILIARY, or `module:attribute`."""

    weight: float = option(1.0, "of the loss", low=0.0)

    @property
    def supervised(self) -> bool:
        """Whether it is about the classes that sites have in common, so that there must be some."""
        return False

    @abstractmethod
    def outputs(self, common: int) -> int:
        """How many outputs its head has, for so many common classes."""

    def draw(self, generator: torch.Generator, images: int) -> State:
        """What is random in the loss of the next batch, of at most so many images."""
        return {}

    @abstractmethod
    def loss(self, extract: Layer, head: Layer, batch: Batch, drawn: State) -> Tensor:
        """The loss of a batch, not weighted: a pure function."""


AUXILIARY: Registry[Auxiliary] = Registry("auxiliary", Auxiliary)


@AUXILIARY.register("dcc")
@dataclass(frozen=True)
class CommonClasses(Auxiliary):
    """Discriminating the common classes (DCC, Eq. 1): cross-entropy over the images of these."""

    most: int = option(0, "of the common classes, the first so many of the first site's alone; 0: all", low=0)

    @property
    def supervised(self) -> bool:
        return True

    def outputs(self, common: int) -> int:
        return min(common, self.most or common)

    def loss(self, extract: Layer, head: Layer, batch: Batch, drawn: State) -> Tensor:
        scores = full(head(batch.features))
        labels = batch.common.where(batch.common < scores.shape[1], -1)
        return F.cross_entropy(scores, labels, ignore_index=-1, reduction="sum") / len(scores)


@AUXILIARY.register("rp")
@dataclass(frozen=True)
class Rotations(Auxiliary):
    """Rotation prediction (RP, Eq. 2): by how many quarter turns an image was turned."""

    turns: str = option(
        "one", "of each image in a batch: one drawn by chance, or all four, as in the paper", choices=("one", "all")
    )

    def outputs(self, common: int) -> int:
        return 4

    def draw(self, generator: torch.Generator, images: int) -> State:
        return {"turns": torch.randint(4, (images,), generator=generator)} if self.turns == "one" else {}

    def loss(self, extract: Layer, head: Layer, batch: Batch, drawn: State) -> Tensor:
        turned = torch.stack([torch.rot90(batch.images, turns, (-2, -1)) for turns in range(4)])
        if self.turns == "all":
            labels = torch.arange(4, device=turned.device).repeat_interleave(turned.shape[1])
            return F.cross_entropy(full(head(extract(turned.flatten(0, 1)))), labels)
        labels = drawn["turns"][: turned.shape[1]].to(turned.device)
        places = labels.view(1, -1, 1, 1, 1).expand(1, *turned.shape[1:])
        return F.cross_entropy(full(head(extract(turned.gather(0, places)[0]))), labels)
