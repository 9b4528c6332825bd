"""The local learner: some epochs of SGD on a session's loss."""

import math
from dataclasses import dataclass

import torch

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
    training = config.training
    parameters = session.parameters()
    optimiser = torch.optim.SGD(
        parameters, lr=training.rate, momentum=training.momentum, weight_decay=training.weight_decay, foreach=True
    )
    generator = torch_generator(config.seed, site.name, str(round), "batches")
    pixels, labels = images.x.to(device), images.y.to(device)
    steps = math.ceil(len(images) / training.batch) * training.epochs
    losses = []
    for _ in range(training.epochs):
        order = torch.randperm(len(images), generator=generator)
        for batch in order.split(training.batch):
            for group in optimiser.param_groups:
                group["lr"] = rate_at(training, config.rounds, round - 1 + len(losses) / steps)
            inputs = to_float(pixels[batch])
            if site.spec.flip:
                inputs = random_flip(inputs, generator)
            loss = session.loss(inputs, labels[batch])
            optimiser.zero_grad()
            loss.backward()
            if training.clip > 0:
                torch.nn.utils.clip_grad_norm_(parameters, training.clip)
            optimiser.step()
            losses.append(loss.detach())
    mean = float(torch.stack(losses).mean())
    if not math.isfinite(mean):
        raise DivergedError(f"{site.name}: the loss is {mean} in round {round}; a smaller training.rate may help")
    return Outcome(mean, len(images))
