"""Training of components in one process, some of them frozen."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.clients.data import Examples, to_float
from fedloom.clients.data.form import Form
from fedloom.clients.networks import NETWORKS, HeadView, Network, initialise
from fedloom.clients.objectives.components.auxiliary import Batch, Rotations
from fedloom.clients.training.learner import descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import TrainingConfig
from fedloom.sims.experiments.pairs import cosine

BATCH, TEST_BATCH = 64, 500
Loss = Callable[[Tensor, Tensor], Tensor]  # of images and labels
TURNS = Rotations()


@dataclass(frozen=True)
class Plan:
    """A training: `steps` of SGD with momentum 0.9, at a `rate` that falls to 0 along a cosine or stays."""

    steps: int
    rate: float
    cosine: bool = True


def built(section: Mapping[str, Any], size: int, classes: int, *purpose: str | int) -> Network:
    """Return a new network for colour images from a section `network`; `purpose` seeds its weights."""
    network = NETWORKS.build(dict(section), "network").empty(Form.images(3, size, classes))
    initialise(network, torch_generator(0, *map(str, purpose)))
    return network


def fit(parts: Sequence[nn.Module], loss: Loss, images: Examples, plan: Plan, *purpose: Any) -> None:
    """Train the modules `parts` in place; `purpose` seeds the batches. Other modules do not change."""
    weights = [parameter for part in parts for parameter in part.train().parameters()]
    descend(weights, loss, _steps(images, plan, *purpose), recipe_of(TrainingConfig(batch=BATCH, rate=plan.rate)))


def _steps(images: Examples, plan: Plan, *purpose: Any) -> Iterator[tuple[float, Tensor, Tensor]]:
    generator = torch_generator(0, *map(str, purpose), "batches")
    for step in range(plan.steps):
        indices = torch.randint(len(images), (BATCH,), generator=generator)
        rate = cosine(plan.rate, step, plan.steps) if plan.cosine else plan.rate
        yield rate, to_float(images.x[indices]), images.y[indices]


def answers(extractor: nn.Module, head: nn.Module) -> Loss:
    """Return a loss: the cross-entropy of the head's answers on the extractor's features."""
    return lambda images, labels: F.cross_entropy(head(extractor(images)), labels)


def turns(extractor: nn.Module, head: nn.Module, *purpose: Any) -> Loss:
    """Return the loss of rotation prediction (Eq. 2): one rotation of each image, drawn by `purpose`."""
    generator = torch_generator(0, *map(str, purpose), "turns")

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        batch = Batch(images, images.new_empty(0), labels)  # of which this task needs the images alone
        return TURNS.loss(extractor, head, batch, TURNS.draw(generator, len(images)))

    return loss


def both(first: Loss, second: Loss) -> Loss:
    """Return the sum of two losses."""
    return lambda images, labels: first(images, labels) + second(images, labels)


def frozen(module: nn.Module) -> nn.Module:
    """Return a copy of the module whose weights do not train."""
    return copy.deepcopy(module).requires_grad_(False)


def mean_class_accuracy(extractor: nn.Module, head: nn.Module, images: Examples, statistics: str = "batch") -> float:
    """Return the mean class accuracy: the share of right answers, with equal weight for each class.

    Args:
        extractor: The first part of the network.
        head: The second part.
        images: The images.
        statistics: BatchNorm's statistics: "batch", or another value of evaluation.statistics.
    """
    view = HeadView(Network(extractor, head), slice(0, None), statistics).eval()
    order = torch.randperm(len(images), generator=torch_generator(0, "order"))  # a batch is a random draw of the domain
    mixed = Examples(images.x[order], images.y[order])
    with torch.inference_mode():
        parts = zip(mixed.x.split(TEST_BATCH), mixed.y.split(TEST_BATCH), strict=True)
        hits = torch.cat([view(to_float(x)).argmax(1) == y for x, y in parts])
    shares = [float(hits[mixed.y == label].double().mean()) for label in mixed.y.unique().tolist()]
    return sum(shares) / len(shares)
