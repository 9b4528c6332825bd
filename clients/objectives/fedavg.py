"""FedAvg at a site (McMahan et al. 2017, Alg. 1, ClientUpdate): the network that the server sent, trained on.

What other averaging methods build on. Whole numbers among the network's tensors (BatchNorm's counts of batches) do not
travel: every round begins with those of the start.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from fedloom.clients.data import Images
from fedloom.clients.objectives.base import OBJECTIVES, Objective, Session, Task
from fedloom.clients.objectives.plain import PlainSession, state_of
from fedloom.clients.objectives.steps import gradient_weight
from fedloom.clients.protocol.messages import MEAN, MODEL, SITE
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option
from fedloom.fusion.state import BATCH_NORM, State

AVERAGED, OWN = "averaged", "own"


@OBJECTIVES.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Objective):
    """Cross-entropy. `requires_strategy`: the strategy that sends what sites need beside the network; empty: any."""

    requires_strategy: ClassVar[str] = ""

    batchnorm: str = option(
        AVERAGED,
        "BatchNorm's weights and statistics: averaged as all others are, or each site's own (FedBN, Li et al. 2021)",
        choices=(AVERAGED, OWN),
    )

    def __post_init__(self) -> None:
        if self.mode:
            raise UserError(f"objective.mode: got '{self.mode}', this objective has no modes; leave it out")

    def session(self, task: Task) -> Session:
        """Start on a task."""
        return FedAvgSession(self, task)

    def network(self, task: Task, images: Images) -> State | None:
        """What was sent, with the site's own BatchNorm if it has one."""
        return {**task.incoming[MODEL], **self.kept(task)} if MODEL in task.incoming else None

    def kept(self, task: Task) -> State:
        """The site's own BatchNorm, if it has one."""
        names = norms(task.network) if self.batchnorm == OWN else frozenset()
        return {name: one for name, one in (task.own or {}).items() if name in names} if names else {}

    def shared(self, network: nn.Module, state: State) -> State:
        """Of a network's state, what is averaged."""
        own = norms(network) if self.batchnorm == OWN else frozenset()
        return {name: one for name, one in state.items() if one.dtype.is_floating_point and name not in own}


class FedAvgSession(PlainSession):
    """From the server's network on; counts its steps."""

    from_server = frozenset({SITE})

    def __init__(self, objective: FedAvg, task: Task) -> None:
        self.objective, self.steps = objective, 0
        super().__init__(task)

    def start(self) -> State:
        sent = {name: self.task.incoming[MEAN][name] for name in self.network.state_dict()}
        return {**sent, **self.objective.kept(self.task)}

    def per_step_inputs(self) -> tuple[State, ...]:
        self.steps += 1
        return ()

    def effective_steps(self) -> float:
        """What the steps so far make of a gradient: the sum of the weights with which gradients enter the change."""
        return gradient_weight(self.task.experiment.training, self.task.config.rounds, self.task.round, self.steps)

    def contribution(self) -> dict[str, State]:
        return {SITE: self.objective.shared(self.network, state_of(self.network))}

    def local_state(self) -> State | None:
        if self.objective.batchnorm != OWN:
            return None
        names = norms(self.network)
        return {name: one for name, one in state_of(self.network).items() if name in names}


def norms(network: nn.Module) -> frozenset[str]:
    """The names of the tensors of a network's BatchNorm layers, counts of batches included."""
    layers = {place: module for place, module in network.named_modules() if isinstance(module, BATCH_NORM)}
    return frozenset(f"{place}.{name}" for place, module in layers.items() for name in module.state_dict())
