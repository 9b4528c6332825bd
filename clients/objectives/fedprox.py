"""FedProx at a site (Li et al. 2020, Federated Optimization in Heterogeneous Networks): a proximal term in the loss."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedloom.clients.objectives.averaging import FedAvgSession, squared_distance
from fedloom.clients.objectives.base import OBJECTIVES, Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.conf.typed import option
from fedloom.fusion.state import State


@OBJECTIVES.register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """Minimises F_k(w) + mu/2 ||w - w_t||^2 (Eq. 2): cross-entropy, near the server's network w_t."""

    mu: float = option(0.01, "weight of the proximal term", low=0.0)

    def session(self, task: Task) -> FedAvgSession:
        return FedProxSession(self, task)


class FedProxSession(FedAvgSession):
    """Session of FedProx. It adds the proximal term; w_t is the server's network."""

    def constants(self) -> tuple[State, ...]:
        return (self.sent,)

    def extra_loss(self, w: Mapping[str, Tensor], constants: tuple[State, ...], /) -> Tensor:
        (w_t,) = constants
        return self.objective.mu / 2 * squared_distance(w, w_t)
