"""`Session`: the interface between an objective and the learner while a site trains."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor, nn

from fedloom.clients.data import Examples
from fedloom.conf.renamed import OF_SESSIONS, refuse_renamed
from fedloom.fusion.state import State


class Session(ABC):
    """Base class of an objective's work at one site in one round. It holds the parameters and computes the loss.

    Attributes:
        from_server: The records of the contribution that start every round from the server's records, and from nothing
            that only the site knows. For all other records, privacy and masks count the change since the site's last
            contribution.
    """

    from_server: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        refuse_renamed(cls, OF_SESSIONS)

    @abstractmethod
    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the optimiser updates."""

    def stages(self) -> Sequence[tuple[float, list[nn.Parameter]]]:
        """Return the stages of a round, in order: (share of the round's steps at its end, parameters to update).

        The default is one stage: `[(1.0, self.parameters())]`.
        """
        return [(1.0, self.parameters())]

    def training_examples(self, images: Examples) -> Examples:
        """Return the images to train on; called once, before the first step. The default is all."""
        return images

    @abstractmethod
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of one batch, a scalar.

        Args:
            images: float32 [n, c, h, w], from -1 to 1.
            labels: int64 [n].
        """

    @abstractmethod
    def contribution(self) -> dict[str, State]:
        """Return the states to send to the server, by record name: SITE, ROUND (clients.protocol.messages)."""

    def local_state(self) -> State | None:
        """Return the state to store at the site for its next round; None stores nothing."""
        return None
