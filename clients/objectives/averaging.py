"""Base classes of averaging methods: a site trains the server's network and sends it back.

A method adds a term to the loss (`extra_loss`, of `constants`), or something to the contribution. Integer tensors of the
network (BatchNorm's batch counters) and frozen tensors are not sent; every round starts with their initial values.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.clients.data import Examples
from fedloom.clients.networks.base import frozen_in
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
    """Base class of averaging objectives: cross-entropy, and options for BatchNorm."""

    starts_at_server: ClassVar[bool] = True
    keeps_frozen: ClassVar[bool] = True

    batchnorm: str = option(
        AVERAGED,
        "BatchNorm's weights and statistics: averaged like all others, or each site's own (FedBN, Li et al. 2021)",
        choices=(AVERAGED, OWN),
    )

    def __post_init__(self) -> None:
        if self.mode:
            raise UserError(f"objective.mode: got '{self.mode}', but this objective has no modes; remove it")

    def session(self, task: Task) -> Session:
        return FedAvgSession(self, task)

    def network(self, task: Task, images: Examples) -> State | None:
        """Return the network in the message, with the site's own BatchNorm if it has one."""
        return {**task.incoming[MODEL], **self.own_batchnorm(task)} if MODEL in task.incoming else None

    def own_batchnorm(self, task: Task) -> State:
        """Return the site's own BatchNorm tensors; empty if sites average BatchNorm, or before its first round."""
        names = norms(task.network) if self.batchnorm == OWN else frozenset()
        return {name: tensor for name, tensor in (task.own or {}).items() if name in names} if names else {}

    def shared(self, network: nn.Module, state: State) -> State:
        """Return the part of a network's state that the server averages."""
        own = (norms(network) if self.batchnorm == OWN else frozenset()) | frozen_in(network)
        if not own and all(tensor.dtype.is_floating_point for tensor in state.values()):
            return state
        return {name: tensor for name, tensor in state.items() if tensor.dtype.is_floating_point and name not in own}


class FedAvgSession(PlainSession):
    """Session of an averaging method. It starts from the server's network and counts its steps."""

    from_server = frozenset({SITE})

    objective: Any  # the method's options

    def __init__(self, objective: Averaged, task: Task) -> None:
        self.objective, self.steps = objective, 0
        super().__init__(task)

    def start(self) -> State:
        sent, own = self.task.incoming[MEAN], self.objective.own_batchnorm(self.task)
        names = self.network.state_dict().keys()
        return sent if sent.keys() == names and not own else {**{name: sent[name] for name in names}, **own}

    @functools.cached_property
    def sent(self) -> State:
        """A copy of the server's trainable weights, made when first read. Read it before the first step."""
        return {name: weight.detach().clone() for name, weight in self.parts.items() if weight.requires_grad}

    def constants(self) -> tuple[State, ...]:
        """Return the inputs of `extra_loss` other than the weights. They are the same in all steps of a round."""
        return ()

    def extra_loss(self, weights: Mapping[str, Tensor], constants: tuple[State, ...], /) -> Tensor | None:
        """Return the method's term of the loss, a pure function of weights and constants, or None."""
        return None

    def per_step_inputs(self) -> tuple[State, ...]:
        self.steps += 1
        return self.constants()

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        loss, extra = self.cross_entropy(weights, images, labels), self.extra_loss(weights, drawn)
        return loss if extra is None else loss + extra

    def effective_steps(self) -> float:
        """Return the total factor of the gradients so far in the network's change: without momentum, the rates' sum."""
        return gradient_weight(self.task.experiment.training, self.task.config.rounds, self.task.round, self.steps)

    def contribution(self) -> dict[str, State]:
        return {SITE: self.objective.shared(self.network, state_of(self.network))}

    def local_state(self) -> State | None:
        if self.objective.batchnorm != OWN:
            return None
        names = norms(self.network)
        return {name: tensor for name, tensor in state_of(self.network).items() if name in names}


def squared_distance(weights: Mapping[str, Tensor], others: State) -> Tensor:
    """Return the scalar ||weights - others||^2 over the tensors in `others`."""
    return torch.stack([(weights[name] - other).square().sum() for name, other in others.items()]).sum()


def norms(network: nn.Module) -> frozenset[str]:
    """Return the names of all tensors of a network's BatchNorm layers, including batch counters."""
    layers = {path: module for path, module in network.named_modules() if isinstance(module, BATCH_NORM)}
    return frozenset(f"{path}.{name}" for path, module in layers.items() for name in module.state_dict())
