"""The local learner: it takes the optimiser's steps on a session's loss for a round."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from fedloom.clients.data import Examples, random_flip, to_float
from fedloom.clients.objectives.base import Experiment
from fedloom.clients.training.min_batch_size import min_batch_size
from fedloom.clients.training.recipe import Recipe
from fedloom.clients.training.session import Session
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import drawing, drawn, torch_generator
from fedloom.conf.sites import Site

Noted = Callable[[Tensor, int], None]


class DivergedError(RuntimeError):
    """The loss is no longer finite."""


@dataclass(frozen=True)
class Outcome:
    """The result of a site's training in a round: mean loss over the steps, number of images and of steps.

    `drew`: whether the network drew random numbers, as Dropout does.
    """

    loss: float
    samples: int
    steps: int = 0
    drew: bool = False


def learn(
    session: Session, images: Examples, experiment: Experiment, site: Site, round: int, device: torch.device,
    words: Sequence[str] = (), least: int = 0, share: float = 1.0, noted: Noted | None = None,
) -> Outcome:  # fmt: skip
    """Train a session for one round.

    Args:
        session: The session. It selects its images, and has the loss and the parameters of each stage.
        images: The site's training examples.
        experiment: Sets the epochs (or steps), the optimiser and the seed.
        site: The site. Batches depend on (seed, site, words).
        round: The round's number for the site.
        device: Where to train.
        words: The names of the round's draw of batches (TaskInstructions.words); empty: the first draw.
        least: The fewest images of a batch. A smaller last batch of an epoch is left out.
        share: The share of the steps after which training stops.
        noted: Called with the indices of each batch's images, int64 [b], and the number of all images.

    Returns:
        The mean loss, and the numbers of images and steps.

    Raises:
        DivergedError: The loss is not finite.
    """
    images, words = session.training_examples(images), words or (str(round),)
    steps, number = (
        batches(images, experiment, site, round, device, words, least, noted),
        step_count(len(images), experiment, site, least),
    )
    losses, done = [], 0
    with drawing(torch_generator(experiment.seed, site.name, *words, "forward").initial_seed(), device):
        begin = drawn(device)
        for end, parameters in session.stages():
            if count := int(end * number * share + 0.5) - done:
                losses.append(descend(parameters, _one_number(session.loss), islice(steps, count), experiment.training))
                done += count
        drew = drawn(device) != begin
    return replace(outcome(torch.cat(losses), len(images), site, round), steps=done, drew=drew)


def _one_number(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Wrap a loss so that it raises ValueError if its value is not a scalar."""

    def checked(images: Tensor, labels: Tensor) -> Tensor:
        value = loss(images, labels)
        if value.ndim:
            raise ValueError(f"the loss of a batch has the shape {list(value.shape)}; return one number, such as its mean")
        return value

    return checked


def step_count(images: int, experiment: Experiment, site: Site | None = None, least: int = 0) -> int:
    """Return the number of steps in a round.

    Args:
        images: The number of training examples.
        experiment: Sets epochs, or steps.
        site: The site with the network; None: the configuration's network.
        least: The fewest images of a batch.
    """
    training = experiment.training
    each = batch_count(images, experiment, site, least)
    return training.steps or max(min(1, each), int(training.epochs * each + 0.5))


def batch_count(images: int, experiment: Experiment, site: Site | None = None, least: int = 0) -> int:
    """Return the number of batches in an epoch over `images` images.

    A batch of one image is left out where the network's BatchNorm needs two. So is a last batch of fewer than `least`.
    """
    full, rest = divmod(images, experiment.training.batch)
    if full and rest < least:
        return full
    if 1 in (rest, experiment.training.batch) and min_batch_size(experiment.architecture(site)) > 1:
        return full if experiment.training.batch > 1 else 0
    return full + (rest > 0)


def check_batches(images: int, experiment: Experiment, site: Site) -> None:
    """Raise UserError if a site has no batch that its network can train on."""
    batch = experiment.training.batch
    if images and not batch_count(images, experiment, site):
        key = "training.batch" if batch == 1 else "partition.min_samples"
        raise UserError(f"{key}: {site.name} has {images} training examples in batches of {batch}, "
                        f"but BatchNorm in its network needs two images; set {key} to 2 or more")  # fmt: skip


def batches(
    images: Examples,
    experiment: Experiment,
    site: Site,
    round: int,
    device: torch.device,
    words: Sequence[str] = (),
    least: int = 0,
    noted: Noted | None = None,
) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield the steps of a round: learning rate, float32 images [b, c, h, w], int64 labels [b]. Arguments as in `learn`.

    Raises:
        UserError: The site has no batch that its network can train on.
    """
    check_batches(len(images), experiment, site)
    return _batches(images, experiment, site, round, device, words or (str(round),), least, noted)


def _batches(
    images: Examples, experiment: Experiment, site: Site, round: int, device: torch.device, words: Sequence[str],
    least: int, noted: Noted | None,
) -> Iterator[tuple[float, Tensor, Tensor]]:  # fmt: skip
    training, rounds = experiment.training, experiment.rounds
    generator, draws = (torch_generator(experiment.seed, site.name, *words, purpose) for purpose in ("batches", "augment"))
    augmentation = training.augmentation
    pixels, labels = images.x if augmentation else images.x.to(device), images.y.to(device)
    number, per_epoch = (count(len(images), experiment, site, least) for count in (step_count, batch_count))
    for step, batch in enumerate(islice(_drawn(len(images), training.batch, per_epoch, generator), number)):
        if noted:
            noted(batch, len(images))
        inputs = augmentation(pixels[batch], draws).to(device) if augmentation else to_float(pixels[batch])
        if site.spec.flip:
            inputs = random_flip(inputs, generator)
        if training.channels_last:
            inputs = inputs.clone(memory_format=torch.channels_last)
        yield training.rate_at(rounds, round - 1 + step / number), inputs, labels[batch]


def _drawn(images: int, batch: int, per_epoch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of image indices without end: `each` batches per epoch, every epoch in a new random order."""
    while True:
        yield from torch.randperm(images, generator=generator).split(batch)[:per_epoch]


def clip_all(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Return the gradients, scaled so that their joint L2 norm is at most `limit`."""
    scale = (limit / (get_total_norm(gradients) + 1e-6)).clamp(max=1.0)
    return [gradient * scale for gradient in gradients]


def descend(
    parameters: list[nn.Parameter],
    loss: Callable[[Tensor, Tensor], Tensor],
    steps: Iterable[tuple[float, Tensor, Tensor]],
    training: Recipe,
    clip: Callable[[Sequence[Tensor], float], list[Tensor]] = clip_all,
) -> Tensor:
    """Take the optimiser's steps on `loss`. Returns the losses: [steps], or [steps, k] for a loss [k] of k sites.

    Frozen parameters (requires_grad=False) stay unchanged. Parameters and gradients are float32, also under
    training.precision=bf16.
    """
    losses, moving = [], [cast("Tensor", parameter) for parameter in parameters if parameter.requires_grad]
    step = training.optimizer.bind(moving, training)
    for rate, inputs, labels in steps:
        with _precise(training, inputs.device):
            value = loss(inputs, labels)
        gradients = list(torch.autograd.grad(value.sum() if value.ndim else value, moving, materialize_grads=True))
        if training.clip > 0:
            gradients = clip(gradients, training.clip)
        with torch.no_grad():
            step(rate, gradients)
        losses.append(value.detach())
    return torch.stack(losses)


def _precise(training: Recipe, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which torch.autocast uses bfloat16, if training.precision says so."""
    if training.precision == "float32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def outcome(losses: Tensor, samples: int, site: Site, round: int) -> Outcome:
    """Return the outcome of a round with losses [steps] on `samples` images. Raises DivergedError for NaN or infinity."""
    mean = float(losses.mean())
    if not math.isfinite(mean):
        first = float(losses[0])
        if math.isfinite(first):
            raise DivergedError(f"{site.name}: the loss is {mean} in round {round}; try a smaller training.rate")
        cure = "check what the server sends, or try a smaller training.rate"
        raise DivergedError(f"{site.name}: the first loss of round {round} is {first}; {cure}")
    return Outcome(mean, samples)
