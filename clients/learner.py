"""The local learner: some epochs of SGD on a session's loss."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

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
    """Train for config.training.epochs; all randomness from (seed, site, round). Raises DivergedError."""
    steps = batches(images, config, site, round, device)
    return outcome(descend(session.parameters(), session.loss, steps, config.training), len(images), site, round)


def batches(
    images: Images, config: Config, site: Site, round: int, device: torch.device
) -> Iterator[tuple[float, Tensor, Tensor]]:
    """The steps of a round: learning rate, float32 images [b, c, h, w], int64 labels [b]."""
    training = config.training
    generator = torch_generator(config.seed, site.name, str(round), "batches")
    pixels, labels = images.x.to(device), images.y.to(device)
    per_epoch = math.ceil(len(images) / training.batch)
    for epoch in range(training.epochs):
        order = torch.randperm(len(images), generator=generator)
        for step, batch in enumerate(order.split(training.batch), epoch * per_epoch):
            inputs = to_float(pixels[batch])
            if site.spec.flip:
                inputs = random_flip(inputs, generator)
            yield rate_at(training, config.rounds, round - 1 + step / (per_epoch * training.epochs)), inputs, labels[batch]


def descend(
    parameters: list[nn.Parameter],
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: Iterable[tuple[float, Tensor, Tensor]],
    training: TrainingConfig,
    clip: Callable[[list[nn.Parameter], float], Any] = clip_grad_norm_,
) -> Tensor:
    """SGD on `loss`; the losses of all steps, [steps], or [steps, k] for a loss [k] of k independent sites."""
    optimiser = torch.optim.SGD(
        parameters, lr=training.rate, momentum=training.momentum, weight_decay=training.weight_decay, foreach=True
    )
    losses = []
    for rate, inputs, labels in steps:
        for group in optimiser.param_groups:
            group["lr"] = rate
        value = loss(inputs, labels)
        optimiser.zero_grad()
        value.sum().backward()
        if training.clip > 0:
            clip(parameters, training.clip)
        optimiser.step()
        losses.append(value.detach())
    return torch.stack(losses)


def outcome(losses: Tensor, samples: int, site: Site, round: int) -> Outcome:
    """What a site reports of the losses [steps] of a round on `samples` images. Raises DivergedError."""
    mean = float(losses.mean())
    if not math.isfinite(mean):
        raise DivergedError(f"{site.name}: the loss is {mean} in round {round}; a smaller training.rate may help")
    return Outcome(mean, samples)
