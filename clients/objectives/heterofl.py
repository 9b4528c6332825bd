"""HeteroFL at a site (Diao et al. 2021): a site trains the first channels of a wider network, on its own labels."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.data import Examples, outputs
from fedloom.clients.data.schema import CLASS
from fedloom.clients.objectives.base import OBJECTIVES, Answer, Session, Task
from fedloom.clients.objectives.heterogeneous import Heterogeneous
from fedloom.clients.objectives.local import LocalSession
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.fusion.state import State

LABELS = "labels"  # the question which labels a site has, and a record
HELD = "held"  # its tensor: for every output, 1 if the site has images of that label, else 0
RATES = "rates"  # a record: for weights and biases of narrowed layers, the share of the wider layer's channels


@OBJECTIVES.register("heterofl")
@dataclass(frozen=True)
class HeteroFL(Heterogeneous):
    """Cross-entropy with scaled layers and masked outputs (Sec. 3).

    Outputs of hidden layers are divided by the site's share of their channels (Scaler). Outputs for labels that the site
    lacks are 0 in the loss (Masked Cross-Entropy).
    """

    requires_strategy = "heterofl"
    targets = (CLASS,)

    def fused_session(self, task: Task) -> Session:
        return HeteroFLSession(task)

    def answer(self, kind: str, task: Task, images: Examples) -> Answer:
        """Answer LABELS: for which outputs the site has images."""
        if kind != LABELS:
            return super().answer(kind, task, images)
        held = torch.zeros(task.architecture.outputs)
        held[outputs(task.config, task.site.spec).start + images.y.unique()] = 1.0
        return Answer({LABELS: {HELD: held}})


def check_labels(state: State) -> None:
    """Check a site's answer about its labels: 1 for each label that it has, 0 for others.

    Raises:
        ReplyError: A value is neither 0 nor 1, or all are 0.
    """
    held = state[HELD]
    if not bool(((held == 0) | (held == 1)).all() and held.any()):
        raise ReplyError(
            f"record '{LABELS}': '{HELD}' must be 1 for labels that a site has and 0 for others, with at least one 1"
        )


class HeteroFLSession(LocalSession):
    """Session of HeteroFL. It starts from the server's part of the network, with its rates and the site's labels."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.rates = {name: float(rate) for name, rate in task.incoming[RATES].items()}
        self.lacks = {HELD: (task.incoming[LABELS][HELD] == 0)[self.outputs].to(task.device)}

    def per_step_inputs(self) -> tuple[State, ...]:
        return (self.lacks,)

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        (lacks,) = drawn
        rates = self.rates  # (W x + b) / r = (W / r) x + b / r
        scaled = {name: weight / rates[name] if name in rates else weight for name, weight in weights.items()}
        return self.task.loss(self.scores(scaled, images).masked_fill(lacks[HELD], 0.0), labels)
