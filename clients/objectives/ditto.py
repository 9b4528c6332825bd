"""Ditto at a site (Li et al. 2021, Fair and Robust Federated Learning Through Personalization): a network of its own.

Beside the shared network w, trained as in FedAvg, the site trains v, which stays here (Alg. 1):
v <- v - rate (grad F_k(v) + lambda (v - w_t)), on the same batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.clients.data import Images
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives.averaging import AveragedSession, squared_distance
from fedloom.clients.objectives.base import OBJECTIVES, Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.conf.typed import option
from fedloom.fusion.state import State

PERSONAL = "personal/"  # before the names of v's tensors


@OBJECTIVES.register("ditto")
@dataclass(frozen=True)
class Ditto(FedAvg):
    """min_v F_k(v) + lambda/2 ||v - w_t||^2 (Eq. 1)."""

    strength: float = option(0.1, "of the pull of the site's own network to the shared one (the paper's lambda)", low=0.0)

    def session(self, task: Task) -> AveragedSession:
        """Start on a task."""
        return DittoSession(self, task)

    def network(self, task: Task, images: Images) -> State | None:
        """What was sent, or the site's own network, which begins as the shared one did."""
        return super().network(task, images) or personal(task.own or {}) or initial_state(task.config)


class DittoSession(AveragedSession):
    """One optimiser moves both; no term of the loss has weights of both."""

    def __init__(self, objective: Ditto, task: Task) -> None:
        super().__init__(objective, task)
        first = personal(task.own or {}) or initial_state(task.config)
        moving = {name: one.to(task.device, copy=True) for name, one in first.items()}
        self.personal = {name: nn.Parameter(moving.pop(name), one.requires_grad) for name, one in self.parts.items()}
        self.statistics = moving

    def weights(self) -> dict[str, nn.Parameter]:
        return {**super().weights(), **{PERSONAL + name: one for name, one in self.personal.items()}}

    def constants(self) -> tuple[State, ...]:
        return self.sent, self.statistics

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        w_t, statistics = drawn
        w, v = {name: weights[name] for name in w_t}, {name: weights[PERSONAL + name] for name in w_t}
        loss = self.cross_entropy(w, images, labels) + self.cross_entropy({**statistics, **v}, images, labels)
        return loss + self.objective.strength / 2 * squared_distance(v, w_t)

    def local_state(self) -> State | None:
        mine = {**self.statistics, **self.personal}
        kept = {PERSONAL + name: one.detach().to("cpu", copy=True) for name, one in mine.items()}
        return {**(super().local_state() or {}), **kept}


def personal(own: Mapping[str, Tensor]) -> State:
    """The site's own network, of what the site keeps; empty if it has none yet."""
    return {name.removeprefix(PERSONAL): one for name, one in own.items() if name.startswith(PERSONAL)}
