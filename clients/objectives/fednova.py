"""FedNova at a site (Wang et al. 2020, Tackling the Objective Inconsistency Problem): changes per unit of work.

Sites take different numbers of steps, and a mean of what they come to favours those that take more. Each sends its change
divided by what its own steps make of a gradient (||a_i||_1 times the rate), times what the server says that the sites' steps
make of one on average: a change as large as those of other methods, to which the same bounds apply.
"""

import torch

from fedloom.clients.objectives.averaging import AveragedSession
from fedloom.clients.objectives.base import OBJECTIVES, Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.protocol.messages import MEAN, SITE
from fedloom.fusion.state import State

WORK = "work"  # record from the server: the sites' work, a mean
AVERAGE = "average"  # its tensor


@OBJECTIVES.register("fednova")
class FedNova(FedAvg):
    """SGD, with momentum or without."""

    requires_strategy = "fednova"

    def session(self, task: Task) -> AveragedSession:
        """Start on a task."""
        return FedNovaSession(self, task)


class FedNovaSession(AveragedSession):
    """Sends x + (y - x) * average work / work; BatchNorm's statistics as they are."""

    def contribution(self) -> dict[str, State]:
        state, begin = super().contribution()[SITE], self.task.incoming[MEAN]
        if work := self.effective_steps():
            share = float(self.task.incoming[WORK][AVERAGE]) / work
            for name in self.parts.keys() & state.keys():
                state[name] = torch.lerp(begin[name], state[name], share)
        return {SITE: state}
