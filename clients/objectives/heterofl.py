"""HeteroFL at a site (Diao et al. 2021): the first channels of a wider network, and the labels that it has."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.data import Images, outputs
from fedloom.clients.objectives.base import OBJECTIVES, Answer, Session, Task
from fedloom.clients.objectives.heterogeneous import Heterogeneous
from fedloom.clients.objectives.local import LocalSession
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.fusion.state import State

LABELS = "labels"  # the question which labels a site has, and a record
HELD = "held"  # what is in it: of every output 1 if the site has images of that label, else 0
RATES = "rates"  # a record: of weights and biases of narrowed layers, the share of the wider one's channels


@OBJECTIVES.register("heterofl")
@dataclass(frozen=True)
class HeteroFL(Heterogeneous):
    """What hidden layers give is divided by the share of the channels that the site has (Scaler); outputs of labels that it
    has not are 0 in the loss (Masked Cross-Entropy, Sec. 3)."""

    def joint(self, task: Task) -> Session:
        return HeteroFLSession(task)

    def answer(self, kind: str, task: Task, images: Images) -> Answer:
        """LABELS: of which outputs the site has images."""
        if kind != LABELS:
            return super().answer(kind, task, images)
        held = torch.zeros(task.architecture.classes)
        held[outputs(task.config, task.site.spec).start + images.y.unique()] = 1.0
        return Answer({LABELS: {HELD: held}})


def check_labels(given: State) -> None:
    """Raises ReplyError for labels that no images have: every output is held (1) or not (0), and some are."""
    held = given[HELD]
    if not bool(((held == 0) | (held == 1)).all() and held.any()):
        raise ReplyError(f"record '{LABELS}': '{HELD}' takes 1 for labels that a site has, 0 for others, and some 1")


class HeteroFLSession(LocalSession):
    """From the part that the server sent on, with its rates and the site's labels."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.rates = {name: float(rate) for name, rate in task.incoming[RATES].items()}
        self.lacks = {HELD: (task.incoming[LABELS][HELD] == 0)[self.outputs].to(task.device)}

    def per_step_inputs(self) -> tuple[State, ...]:
        return (self.lacks,)

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        (lacks,) = drawn
        rates = self.rates  # (W x + b) / r is what W / r and b / r give
        scaled = {name: weight / rates[name] if name in rates else weight for name, weight in weights.items()}
        return self.task.loss(self.scores(scaled, images).masked_fill(lacks[HELD], 0.0), labels)
