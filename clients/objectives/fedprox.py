"""FedProx at a site (Li et al. 2020, Federated Optimization in Heterogeneous Networks): near where the round began."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.objectives.base import OBJECTIVES, Session, Task
from fedloom.clients.objectives.fedavg import FedAvg, FedAvgSession
from fedloom.conf.typed import option
from fedloom.fusion.state import State


@OBJECTIVES.register("fedprox")
@dataclass(frozen=True)
class FedProx(FedAvg):
    """F_k(w) + mu/2 ||w - w_t||^2 (Eq. 2)."""

    mu: float = option(0.01, "weight of the proximal term", low=0.0)

    def session(self, task: Task) -> Session:
        """Start on a task."""
        return FedProxSession(self, task)


class FedProxSession(FedAvgSession):
    """w_t is what the server sent."""

    def __init__(self, objective: FedProx, task: Task) -> None:
        super().__init__(objective, task)
        self.mu, self.begin = objective.mu, {name: weight.detach().clone() for name, weight in self.parts.items()}

    def per_step_inputs(self) -> tuple[State, ...]:
        super().per_step_inputs()
        return (self.begin,)

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        (begin,) = drawn
        moved = torch.stack([(weights[name] - one).square().sum() for name, one in begin.items()]).sum()
        return self.cross_entropy(weights, images, labels) + self.mu / 2 * moved
