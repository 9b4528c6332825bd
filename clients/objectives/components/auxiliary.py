"""Auxiliary tasks: small heads, shared by all sites, on the features of each site's own extractor."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedloom.clients.data.form import IMAGE, Form
from fedloom.clients.training.loss import full
from fedloom.conf.errors import UserError
from fedloom.conf.registry import Registry
from fedloom.conf.typed import option
from fedloom.fusion.state import State

Layer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Batch:
    """A site's batch for an auxiliary task.

    Attributes:
        images: float32 [n, c, h, w].
        features: The extractor's outputs for the images.
        common: int64 [n]: the number of each image's class among the classes that all sites have; -1 for others.
    """

    images: Tensor
    features: Tensor
    common: Tensor


@dataclass(frozen=True)
class Auxiliary(ABC):
    """Base class of auxiliary tasks; all sites share the heads. Register yours in AUXILIARY, or name `module:attribute`."""

    rotates: ClassVar[bool] = False  # whether the loss rotates the inputs

    weight: float = option(1.0, "weight of the task's loss", low=0.0)

    @property
    def supervised(self) -> bool:
        """Whether the task learns from labels, of the classes that all sites have in common."""
        return False

    @abstractmethod
    def outputs(self, common: int) -> int:
        """Return the number of the head's outputs when all sites have `common` classes in common."""

    def check(self, form: Form) -> None:
        """Raise UserError if the task rotates, and the inputs of this form are not square images."""
        if not self.rotates:
            return
        form.takes(IMAGE, what="objective.auxiliary: rp")
        if form.height != form.width:
            raise UserError(f"objective.auxiliary: rp rotates square images, but the data are {form}; set auxiliary=[dcc]")

    def draw(self, generator: torch.Generator, images: int) -> State:
        """Return the random draws for the next batch's loss, for at most `images` images."""
        return {}

    @abstractmethod
    def loss(self, extract: Layer, head: Layer, batch: Batch, drawn: State) -> Tensor:
        """Return the unweighted loss of a batch: a pure function.

        Args:
            extract: The site's extractor, images [n, c, h, w] to features.
            head: The shared head, features to [n, outputs].
            batch: The batch.
            drawn: The result of `draw`.
        """


AUXILIARY: Registry[Auxiliary] = Registry("auxiliary", Auxiliary)


@AUXILIARY.register("dcc")
@dataclass(frozen=True)
class CommonClasses(Auxiliary):
    """Discrimination of the common classes (DCC, Eq. 1): cross-entropy over their images."""

    most: int = option(0, "number of common classes to use, in the order of the first site; 0: all", low=0)

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
    """Rotation prediction (RP, Eq. 2): by how many quarter turns an image was rotated."""

    rotates = True

    turns: str = option(
        "one", "rotations of each image in a batch: one at random, or all four, as in the paper", choices=("one", "all")
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
        index = labels.view(1, -1, 1, 1, 1).expand(1, *turned.shape[1:])
        return F.cross_entropy(full(head(extract(turned.gather(0, index)[0]))), labels)
