"""FedProto at a site (Tan et al. 2022): the site's own network, with features drawn to the prototypes of the classes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedloom.clients.data import Examples, to_float
from fedloom.clients.data.schema import CLASS
from fedloom.clients.evaluation.accuracy import pieces
from fedloom.clients.networks.base import EXTRACTOR, HEAD
from fedloom.clients.objectives.base import OBJECTIVES, Answer, Session, Task
from fedloom.clients.objectives.heterogeneous import FUSED, AloneSession, Heterogeneous
from fedloom.clients.objectives.plain import below
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.conf.typed import option
from fedloom.fusion.state import State

PROTOTYPES = "prototypes"  # a question, and the record of prototypes, up and down
SUMS, COUNTS = "sums", "counts"  # up: by class, the sum of features and the number of images, divided by all images
ROUNDING = 1e-3  # tolerance for rounding in half precision
MEANS, KNOWN = "means", "known"  # down: by class, the mean feature, and 1 if there is one, else 0


@OBJECTIVES.register("fedproto")
@dataclass(frozen=True)
class FedProto(Heterogeneous):
    """Cross-entropy + weight * MSE(features, prototype of the label), for labels with a prototype (Eq. 7)."""

    requires_strategy = "fedproto"
    targets = (CLASS,)
    weight: float = option(1.0, "weight of the distance to the classes' prototypes (the paper's lambda)", low=0.0)

    def session(self, task: Task) -> Session:
        return ProtoSession(self.weight, task) if self.mode == FUSED else super().session(task)

    def answer(self, kind: str, task: Task, images: Examples) -> Answer:
        """Answer PROTOTYPES with sums of features and counts of images by class, in evaluation mode."""
        if kind != PROTOTYPES:
            return super().answer(kind, task, images)
        session, total = ProtoSession(self.weight, task), torch.zeros(())
        session.network.eval()
        classes = F.one_hot(images.y, len(task.network.state_dict()["head.weight"])).float()
        parts = pieces(len(images), task.config.evaluation.batch)
        with torch.no_grad():
            for pixels, members in zip(images.x.tensor_split(parts), classes.tensor_split(parts), strict=True):
                total = total + members.T @ session.network.extractor(to_float(pixels.to(task.device))).cpu()
        return Answer({PROTOTYPES: {SUMS: total / len(images), COUNTS: classes.mean(0)}})


def check_prototypes(state: State, samples: int, largest: float) -> None:
    """Raise ReplyError if a site's sums of features are impossible: for `samples` images, up to `largest` (0: no bound)."""
    sums, counts = state[SUMS].double(), state[COUNTS].double()
    least = counts[counts != 0].min() if counts.any() else 0.0
    if abs(float(counts.sum()) - 1.0) > ROUNDING or least < (1.0 - ROUNDING) / samples:
        raise ReplyError(f"record '{PROTOTYPES}': '{COUNTS}' must be shares of {samples} images that add up to 1")
    size = sums.flatten(1).abs().amax(1)
    if bool((size[counts == 0] > 0).any()):
        raise ReplyError(f"record '{PROTOTYPES}': '{SUMS}' has features of a class without images")
    if largest and bool((size > largest * counts).any()):
        fault = f"'{SUMS}' and '{COUNTS}' make a feature larger than federation.largest_weight={largest:g}"
        raise ReplyError(f"record '{PROTOTYPES}': {fault}")


class ProtoSession(AloneSession):
    """Session of FedProto. It trains the site's own network, and sends none of its weights."""

    def __init__(self, weight: float, task: Task) -> None:
        super().__init__(task)
        self.weight = weight
        self.given = {name: tensor.to(task.device) for name, tensor in task.incoming.get(PROTOTYPES, {}).items()}

    def per_step_inputs(self) -> tuple[State, ...]:
        return (self.given,) if self.given else ()

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        features = functional_call(self.network.extractor, below(weights, EXTRACTOR), (images,))
        scores = functional_call(self.network.head, below(weights, HEAD), (features,))
        loss = self.task.loss(scores[..., self.outputs], labels)
        for prototypes in drawn:
            classes = labels + self.outputs.start
            apart = (features - prototypes[MEANS][classes]) * prototypes[KNOWN][classes, None]
            loss = loss + self.weight * apart.square().mean()
        return loss

    def contribution(self) -> dict[str, State]:
        return {}
