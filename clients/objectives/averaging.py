"""What averaging methods have in common at a site: the network that the server sent is trained on, and sent back.

A method says what it adds to the loss (`extra_loss`, of `constants`), and what else it sends. Whole numbers among the
network's tensors (BatchNorm's counts of batches) do not travel: every round begins with those of the start.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.clients.data import Images
from fedloom.clients.objectives.base import Objective, Session, Task
from fedloom.clients.objectives.plain import PlainSession, state_of
from fedloom.clients.objectives.steps import gradient_weight
from fedloom.clients.protocol.messages import MEAN, MODEL, SITE
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option
from fedloom.fusion.state import BATCH_NORM, State

AVERAGED, OWN = "averaged", "own"


@dataclass(frozen=True)
class Averaged(Objective):
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
        return AveragedSession(self, task)

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


class AveragedSession(PlainSession):
    """From the server's network on; counts its steps."""

    from_server = frozenset({SITE})

    objective: Any  # the method's options

    def __init__(self, objective: Averaged, task: Task) -> None:
        self.objective, self.steps = objective, 0
        super().__init__(task)

    def start(self) -> State:
        sent = {name: self.task.incoming[MEAN][name] for name in self.network.state_dict()}
        return {**sent, **self.objective.kept(self.task)}

    @functools.cached_property
    def sent(self) -> State:
        """The weights as they came: asked for before the first step."""
        return {name: weight.detach().clone() for name, weight in self.parts.items()}

    def constants(self) -> tuple[State, ...]:
        """What `extra_loss` needs beside the weights; the same in all steps of the round."""
        return ()

    def extra_loss(self, weights: Mapping[str, Tensor], constants: tuple[State, ...], /) -> Tensor | None:
        """What the method adds to the loss of a batch, a pure function of the weights; None: nothing."""
        return None

    def per_step_inputs(self) -> tuple[State, ...]:
        self.steps += 1
        return self.constants()

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        loss, extra = self.cross_entropy(weights, images, labels), self.extra_loss(weights, drawn)
        return loss if extra is None else loss + extra

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


def squared_distance(weights: Mapping[str, Tensor], others: State) -> Tensor:
    """||weights - others||^2 over the tensors of `others`."""
    return torch.stack([(weights[name] - other).square().sum() for name, other in others.items()]).sum()


def norms(network: nn.Module) -> frozenset[str]:
    """The names of the tensors of a network's BatchNorm layers, counts of batches included."""
    layers = {place: module for place, module in network.named_modules() if isinstance(module, BATCH_NORM)}
    return frozenset(f"{place}.{name}" for place, module in layers.items() for name in module.state_dict())
