"""SCAFFOLD at a site (Karimireddy et al. 2020, Alg. 1): gradients corrected by control variates.

y <- y - rate (g(y) - c_i + c). After the round, the site's variate c_i becomes c_i - c + (x - y) / (K rate) (Option II).
This is the mean of its steps' gradients. The site sends it with the network.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from fedloom.clients.objectives.averaging import Averaged, FedAvgSession
from fedloom.clients.objectives.base import OBJECTIVES, Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.fusion.state import State

CONTROL = "control/"  # prefix of parameters' names: c from the server, c_i to the server and in the site's state


@OBJECTIVES.register("scaffold")
class Scaffold(FedAvg):
    """Minimises F_k(w), the cross-entropy, with control variates, by SGD with or without momentum."""

    requires_strategy = "scaffold"

    def session(self, task: Task) -> FedAvgSession:
        return ScaffoldSession(self, task)


class ScaffoldSession(FedAvgSession):
    """Session of SCAFFOLD. The correction is a term of the loss, linear in the weights, with gradient c - c_i."""

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
        return torch.stack([((y[name] - x[name]) * tensor).sum() for name, tensor in shift.items()]).sum()

    def controls(self) -> State:
        """Return the site's control variate c_i after the steps so far, with the prefix CONTROL before the names."""
        c_i = self.c_i
        if work := self.effective_steps():  # K rate
            c_i = {name: (x - self.parts[name].detach()) / work - self.shift[name] for name, x in self.sent.items()}
        return {CONTROL + name: tensor.detach().cpu() for name, tensor in c_i.items()}

    def contribution(self) -> dict[str, State]:
        return {SITE: {**super().contribution()[SITE], **self.controls()}}

    def local_state(self) -> State | None:
        return {**(super().local_state() or {}), **self.controls()}
