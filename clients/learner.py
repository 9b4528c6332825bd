"""The local learner: some epochs of SGD on a session's loss."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm
from torch.optim.sgd import sgd

from clients.data import Images, random_flip, to_float
from clients.objectives import Session
from clients.randomness import torch_generator
from conf.schema import Config, TrainingConfig
from conf.sites import Site


class DivergedError(RuntimeError):
    """The loss is no longer finite."""


@dataclass(frozen=True)
class Outcome:
    """What a site reports of its training: mean loss over the steps, and how many images it trained on."""

    loss: float
    samples: int


def rate_at(training: TrainingConfig, rounds: int, progress: float) -> float:
    """The learning rate after `progress` rounds (a fraction counts) of `rounds`."""
    if training.schedule == "constant":
        return training.rate
    return training.rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress / rounds)))


def learn(session: Session, images: Images, config: Config, site: Site, round: int, device: torch.device) -> Outcome:
    """Train for config.training.epochs or steps; all randomness from (seed, site, round). Raises DivergedError."""
    images = session.training_images(images)
    steps, number, done = batches(images, config, site, round, device), step_count(images, config), 0
    losses = []
    with drawing(torch_generator(config.seed, site.name, str(round), "forward").initial_seed(), device):
        for end, parameters in session.stages():
            if count := int(end * number + 0.5) - done:
                losses.append(descend(parameters, session.loss, islice(steps, count), config.training))
                done += count
    return outcome(torch.cat(losses), len(images), site, round)


def step_count(images: Sized, config: Config) -> int:
    """How many steps a round has on so many images."""
    return config.training.steps or config.training.epochs * math.ceil(len(images) / config.training.batch)


@contextlib.contextmanager
def drawing(seed: int, device: torch.device) -> Iterator[None]:
    """Let what a network draws itself, such as Dropout, follow from a seed; torch's own generators are put back after it."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        yield


def batches(
    images: Images, config: Config, site: Site, round: int, device: torch.device
) -> Iterator[tuple[float, Tensor, Tensor]]:
    """The steps of a round: learning rate, float32 images [b, c, h, w], int64 labels [b]."""
    training = config.training
    generator = torch_generator(config.seed, site.name, str(round), "batches")
    pixels, labels = images.x.to(device), images.y.to(device)
    number = step_count(images, config)
    for step, batch in enumerate(islice(_drawn(len(images), training.batch, generator), number)):
        inputs = to_float(pixels[batch])
        if site.spec.flip:
            inputs = random_flip(inputs, generator)
        yield rate_at(training, config.rounds, round - 1 + step / number), inputs, labels[batch]


def _drawn(images: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Places of images, batch by batch, pass after pass, each in an order of its own."""
    while True:
        yield from torch.randperm(images, generator=generator).split(batch)


def clip_all(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """The gradients, scaled so that the norm of all of them together is at most `limit`."""
    scale = (limit / (get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
    return [gradient * scale for gradient in gradients]


def descend(
    parameters: list[nn.Parameter],
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: Iterable[tuple[float, Tensor, Tensor]],
    training: TrainingConfig,
    clip: Callable[[Sequence[Tensor], float], list[Tensor]] = clip_all,
) -> Tensor:
    """SGD on `loss`; the losses of all steps, [steps], or [steps, k] for a loss [k] of k independent sites.

    Parameters that are frozen (requires_grad=False) stay as they are.
    It is torch.optim.SGD's functional form: the class would import torch's compiler, a second for each new worker.
    """
    losses, moving = [], [cast("Tensor", one) for one in parameters if one.requires_grad]
    buffers: list[Tensor | None] = [None] * len(moving)
    fixed: dict[str, Any] = {"momentum": training.momentum, "weight_decay": training.weight_decay, "dampening": 0.0}
    for rate, inputs, labels in steps:
        value = loss(inputs, labels)
        gradients = list(torch.autograd.grad(value.sum() if value.ndim else value, moving, materialize_grads=True))
        if training.clip > 0:
            gradients = clip(gradients, training.clip)
        with torch.no_grad():
            sgd(moving, gradients, buffers, foreach=True, lr=rate, nesterov=False, maximize=False, **fixed)
        losses.append(value.detach())
    return torch.stack(losses)


def outcome(losses: Tensor, samples: int, site: Site, round: int) -> Outcome:
    """What a site reports of the losses [steps] of a round on `samples` images. Raises DivergedError."""
    mean = float(losses.mean())
    if not math.isfinite(mean):
        raise DivergedError(f"{site.name}: the loss is {mean} in round {round}; a smaller training.rate may help")
    return Outcome(mean, samples)
