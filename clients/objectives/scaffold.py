"""SCAFFOLD at a site (Karimireddy et al. 2020, Alg. 1): gradients corrected by control variates.

y <- y - rate (g(y) - c_i + c). After the round the site's own variate c_i becomes c_i - c + (x - y) / (K rate) (Option II),
the mean of the gradients of its steps, and goes to the server beside the network.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedloom.clients.objectives.base import OBJECTIVES, Session, Task
from fedloom.clients.objectives.fedavg import FedAvg, FedAvgSession
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.fusion.state import State

CONTROL = "control/"  # before the names of parameters: down c, up and in the site's own state c_i


@OBJECTIVES.register("scaffold")
@dataclass(frozen=True)
class Scaffold(FedAvg):
    """SGD, with momentum or without."""

    requires_strategy: ClassVar[str] = "scaffold"

    def session(self, task: Task) -> Session:
        """Start on a task."""
        return ScaffoldSession(self, task)


class ScaffoldSession(FedAvgSession):
    """The correction is a term of the loss, linear in the weights: its gradient is c - c_i."""

    from_server = frozenset()  # c_i is the site's own

    def __init__(self, objective: Scaffold, task: Task) -> None:
        super().__init__(objective, task)
        sent, own = task.incoming[MEAN], task.own or {}
        self.begin = {name: weight.detach().clone() for name, weight in self.parts.items()}
        none = {name: torch.zeros_like(weight) for name, weight in self.begin.items()}
        self.control = {name: own.get(CONTROL + name, none[name]).to(task.device) for name in self.begin}
        self.shift = {name: sent[CONTROL + name].to(task.device) - self.control[name] for name in self.begin}

    def per_step_inputs(self) -> tuple[State, ...]:
        super().per_step_inputs()
        return self.begin, self.shift

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        begin, shift = drawn
        linear = torch.stack([((weights[name] - begin[name]) * one).sum() for name, one in shift.items()]).sum()
        return self.cross_entropy(weights, images, labels) + linear

    def controls(self) -> State:
        """The site's own variate as it is after the steps so far, by the names that it travels under."""
        work = self.effective_steps()
        if not work:
            return {CONTROL + name: one.detach().cpu() for name, one in self.control.items()}
        moved = {name: (self.begin[name] - one.detach()) / work for name, one in self.parts.items()}
        return {CONTROL + name: (one - self.shift[name]).cpu() for name, one in moved.items()}

    def contribution(self) -> dict[str, State]:
        return {SITE: {**super().contribution()[SITE], **self.controls()}}

    def local_state(self) -> State | None:
        return {**(super().local_state() or {}), **self.controls()}
