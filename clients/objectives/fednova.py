"""FedNova at a site (Wang et al. 2020, Tackling the Objective Inconsistency Problem): changes per unit of work.

Sites take different numbers of steps, and a mean of what they come to favours those that take more. Each sends its change
divided by what its steps make of a gradient (||a_i||_1 times the rate), and this divisor.
"""

from dataclasses import dataclass

import torch

from clients.messages import MEAN, SITE
from clients.objectives.base import OBJECTIVES, Session, Task
from clients.objectives.fedavg import FedAvg, FedAvgSession
from clients.objectives.steps import gradient_weight
from fusion.exact import State

WORK = "fednova/work"  # up: the divisor; down: 0, so that what is sent has the names of what comes back


@OBJECTIVES.register("fednova")
@dataclass(frozen=True)
class FedNova(FedAvg):
    """SGD, with momentum or without."""

    def session(self, task: Task) -> Session:
        """Start on a task."""
        return FedNovaSession(self, task)


class FedNovaSession(FedAvgSession):
    """Sends x + (y - x) / work; BatchNorm's statistics as they are."""

    def contribution(self) -> dict[str, State]:
        state, begin = super().contribution()[SITE], self.task.incoming[MEAN]
        if not self.steps:
            return {SITE: {**state, WORK: torch.zeros(())}}
        work = gradient_weight(self.task, self.steps)
        for name in self.parts.keys() & state.keys():
            state[name] = begin[name] + (state[name] - begin[name]) / work
        return {SITE: {**state, WORK: torch.tensor(work)}}
