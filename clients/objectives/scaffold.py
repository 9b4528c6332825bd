"""SCAFFOLD at a site (Karimireddy et al. 2020, Alg. 1): gradients corrected by control variates.

y <- y - rate (g(y) - c_i + c). After the round the site's own variate c_i becomes c_i - c + (x - y) / (K rate) (Option II),
the mean of the gradients of its steps, and goes to the server beside the network.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.clients.objectives.averaging import Averaged, AveragedSession
from fedloom.clients.objectives.base import OBJECTIVES, Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.fusion.state import State

CONTROL = "control/"  # before the names of parameters: down c, up and in the site's own state c_i


@OBJECTIVES.register("scaffold")
class Scaffold(FedAvg):
    """SGD, with momentum or without."""

    requires_strategy = "scaffold"

    def session(self, task: Task) -> AveragedSession:
        """Start on a task."""
        return ScaffoldSession(self, task)


class ScaffoldSession(AveragedSession):
    """The correction is a term of the loss, linear in the weights: its gradient is c - c_i."""

    from_server = frozenset()  # c_i is the site's own

    def __init__(self, objective: Averaged, task: Task) -> None:
        super().__init__(objective, task)
        x, c, own = self.sent, task.incoming[MEAN], task.own or {}
        c_i = {name: own.get(CONTROL + name, torch.zeros_like(x[name])).to(task.device) for name in x}
        self.c_i, self.shift = c_i, {name: c[CONTROL + name].to(task.device) - c_i[name] for name in x}

    def constants(self) -> tuple[State, ...]:
        return self.sent, self.shift

    def extra_loss(self, y: Mapping[str, Tensor], constants: tuple[State, ...], /) -> Tensor:
        x, shift = constants
        return torch.stack([((y[name] - x[name]) * one).sum() for name, one in shift.items()]).sum()

    def controls(self) -> State:
        """c_i as it is after the steps so far, by the names that it travels under."""
        c_i = self.c_i
        if work := self.effective_steps():  # K rate
            c_i = {name: (x - self.parts[name].detach()) / work - self.shift[name] for name, x in self.sent.items()}
        return {CONTROL + name: one.detach().cpu() for name, one in c_i.items()}

    def contribution(self) -> dict[str, State]:
        return {SITE: {**super().contribution()[SITE], **self.controls()}}

    def local_state(self) -> State | None:
        return {**(super().local_state() or {}), **self.controls()}
