"""DepthFL at a site (Kim et al. 2023): all classifiers of a network with exits learn from labels and from each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor
from torch.func import functional_call

from fedloom.clients.data.schema import CLASS, NEXT
from fedloom.clients.objectives.base import OBJECTIVES, Session, Task
from fedloom.clients.objectives.heterogeneous import Heterogeneous
from fedloom.clients.objectives.local import LocalSession
from fedloom.clients.training.loss import full
from fedloom.conf.typed import option
from fedloom.fusion.state import State


@OBJECTIVES.register("depthfl")
@dataclass(frozen=True)
class DepthFL(Heterogeneous):
    """sum_i CE(z_i, y) + weight / (d - 1) sum_{j != i} KL(softmax z_j || softmax z_i), z_j constant, for d logits z_i."""

    targets = (CLASS, NEXT)
    weight: float = option(1.0, "of what the classifiers learn from each other (lambda of the paper)", low=0.0)

    def fused_session(self, task: Task) -> Session:
        return DepthFLSession(self.weight, task)


class DepthFLSession(LocalSession):
    """Session of DepthFL. It starts from the server's part of the deepest network."""

    def __init__(self, weight: float, task: Task) -> None:
        super().__init__(task)
        self.weight = weight

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        each = full(functional_call(self.network, dict(weights), (images,), {"each": True})[..., self.outputs])
        loss = torch.stack([self.task.loss(scores, labels) for scores in each]).sum()
        answers = each.log_softmax(-1)  # kl_div is slow with engine.vectorise
        pairs = permutations(zip(answers, answers.detach(), strict=True), 2)
        apart = [(other.exp() * (other - answer)).sum(-1).mean() for (answer, _), (_, other) in pairs]
        return loss + self.weight / (len(each) - 1) * torch.stack(apart).sum() if apart else loss
