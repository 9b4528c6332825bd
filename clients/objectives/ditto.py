"""Ditto at a site (Li et al. 2021, Fair and Robust Federated Learning Through Personalization).

The site trains the shared network w as in FedAvg, and its own network v, which stays at the site (Alg. 1):
v <- v - rate (grad F_k(v) + lambda (v - w_t)), on the same batches.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fedloom.clients.data import Examples
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives.averaging import FedAvgSession, squared_distance
from fedloom.clients.objectives.base import OBJECTIVES, Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.objectives.plain import below
from fedloom.conf.typed import option
from fedloom.fusion.state import State

PERSONAL = "personal/"  # prefix of the names of v's tensors


@OBJECTIVES.register("ditto")
@dataclass(frozen=True)
class Ditto(FedAvg):
    """Minimises F_k(v) + strength/2 ||v - w_t||^2 (Eq. 1): the site's network v stays near the shared w_t."""

    starts_at_server = False

    strength: float = option(
        0.1, "weight of the distance between the site's network and the shared one (the paper's lambda)", low=0.0
    )

    def session(self, task: Task) -> FedAvgSession:
        return DittoSession(self, task)

    def network(self, task: Task, images: Examples) -> State | None:
        """Return the network in the message, or the site's own, which starts from the shared initial state."""
        return super().network(task, images) or personal(task.own or {}) or initial_state(task.config, exact=True)


class DittoSession(FedAvgSession):
    """Session of Ditto. One optimiser trains both networks; w_t is constant, so no term couples w and v."""

    def __init__(self, objective: Ditto, task: Task) -> None:
        super().__init__(objective, task)
        first = personal(task.own or {}) or initial_state(task.config, exact=True)
        moving = {name: tensor.to(task.device, copy=True) for name, tensor in first.items()}
        self.personal = {name: nn.Parameter(moving.pop(name), tensor.requires_grad) for name, tensor in self.parts.items()}
        self.statistics = moving

    def weights(self) -> dict[str, nn.Parameter]:
        return {**super().weights(), **{PERSONAL + name: weight for name, weight in self.personal.items()}}

    def constants(self) -> tuple[State, ...]:
        return self.sent, self.statistics

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        w_t, statistics = drawn
        w, v = {name: weights[name] for name in w_t}, {name: weights[PERSONAL + name] for name in w_t}
        loss = self.cross_entropy(w, images, labels) + self.cross_entropy({**statistics, **v}, images, labels)
        return loss + self.objective.strength / 2 * squared_distance(v, w_t)

    def local_state(self) -> State | None:
        state = {**self.statistics, **self.personal}
        stored = {PERSONAL + name: tensor.detach().to("cpu", copy=True) for name, tensor in state.items()}
        return {**(super().local_state() or {}), **stored}


def personal(own: Mapping[str, Tensor]) -> State:
    """Return the site's own network from its stored state; empty if it has none yet."""
    return below(own, PERSONAL)
