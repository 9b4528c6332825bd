"""FedNova at a site (Wang et al. 2020, Tackling the Objective Inconsistency Problem): changes per unit of work.

Sites take different numbers of steps, and a plain mean favours sites with more steps. Each site's work is ||a_i||_1 times
the rate. The site divides its change by its work, and multiplies it by the sites' mean work, which the server sends. So the
change is as large as in other methods, and the same bounds apply.
"""

import torch

from fedloom.clients.objectives.averaging import FedAvgSession
from fedloom.clients.objectives.base import OBJECTIVES, Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.fusion.state import State

WORK = "work"  # record from the server: the sites' mean work
AVERAGE = "average"  # its tensor


@OBJECTIVES.register("fednova")
class FedNova(FedAvg):
    """Minimises F_k(w), the cross-entropy on the site's images, by SGD with or without momentum."""

    requires_strategy = "fednova"

    def session(self, task: Task) -> FedAvgSession:
        return FedNovaSession(self, task)


class FedNovaSession(FedAvgSession):
    """Session of FedNova. Sends x + (y - x) * average work / work, and BatchNorm's statistics unchanged."""

    def contribution(self) -> dict[str, State]:
        state, begin = super().contribution()[SITE], self.task.incoming[MEAN]
        if work := self.effective_steps():
            share = float(self.task.incoming[WORK][AVERAGE]) / work
            for name in self.parts.keys() & state.keys():
                state[name] = torch.lerp(begin[name], state[name], share)
        return {SITE: state}
