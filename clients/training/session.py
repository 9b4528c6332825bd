"""A session: what an objective and the learner have in common while a site trains."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from fedloom.clients.data import Images
from fedloom.conf.renamed import OF_SESSIONS, refuse_renamed
from fedloom.fusion.state import State


class Session(ABC):
    """An objective at work on one task: it holds the parameters and computes the loss of a batch.

    `from_server`: the records of its contribution that begin, in every round, at what the server has just sent, and at
    nothing that only the site knows. Privacy and masks count the change of all others from what the site sent last.
    """

    from_server: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        refuse_renamed(cls, OF_SESSIONS)

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """What the optimiser moves."""

    def stages(self) -> Sequence[tuple[float, list[nn.Parameter]]]:
        """One after the other, until which share of the round's steps, and what the optimiser moves until then."""
        return [(1.0, self.parameters())]

    def training_images(self, images: Images) -> Images:
        """Those of the site's images that it trains on; asked once, before the first step."""
        return images

    @abstractmethod
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of one batch: float32 images [n, c, h, w], int64 labels [n]."""

    @abstractmethod
    def contribution(self) -> dict[str, State]:
        """What goes to the server, by record name (clients.protocol.messages)."""

    def local_state(self) -> State | None:
        """What the site keeps for its next round; None if nothing."""
        return None
