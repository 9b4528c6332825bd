"""Measurements for a certificate: membership inference, distance between networks, and the time to relearn."""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from fedloom.clients.data import Examples, to_float
from fedloom.clients.data.schema import CLASS, IGNORED, MULTILABEL, REGRESSION
from fedloom.clients.training.learner import DivergedError, descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import generator, torch_generator
from fedloom.conf.schema import TrainingConfig
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import count_right

EVALUATION_BATCH = 500
MIN_IMAGES = 20  # images on each side of a membership attack

Floats = NDArray[np.float64]
Sides = tuple[Floats, Floats]  # scores of members and of others


@dataclass(frozen=True)
class Attack:
    """How well an attack separates members from other images.

    `auc`: 1 is always, 0.5 is chance; `low` to `high` is its 95% interval.
    """

    auc: float
    low: float
    high: float
    members: int
    others: int


@dataclass(frozen=True)
class Relearned:
    """How fast a network relearned: steps of SGD on `images` images until its test accuracy was `target`; None if never.

    `reached`: the accuracy that was measured last.
    """

    steps: int | None
    reached: float
    target: float
    images: int


def membership(
    network: nn.Module, members: Examples, others: Examples, *, seed: int, resamples: int = 1000, task: str = CLASS
) -> dict[str, Attack]:
    """Run two membership-inference attacks on a network.

    "loss": the smaller the loss, the likelier a member (Yeom et al. 2018, Sec. 3). "logistic": a logistic
    regression on `features`, without shadow networks (the basic attack of Kurmanji et al. 2023 uses the loss alone).

    Args:
        network: The network, in evaluation mode.
        members: Images on which the site trained.
        others: Other images of the same domain.
        seed: The seed of the regression's folds and of the bootstrap.
        resamples: The number of bootstrap samples.
        task: The task of the targets.

    Returns:
        The results of "loss" and "logistic".

    Raises:
        UserError: A side has fewer than MIN_IMAGES images, or an output is not finite.
    """
    for side, images in (("members", members), ("others", others)):
        if len(images) < MIN_IMAGES:
            raise UserError(f"a membership attack needs at least {MIN_IMAGES} images on each side, got {len(images)} {side}")
    inside, outside = (features(network, side, task) for side in (members, others))
    scores = {"loss": [(-inside[:, 0], -outside[:, 0])], "logistic": cross_fitted(inside, outside, seed)}
    return {name: _attack(parts, generator(seed, "membership", name), resamples) for name, parts in scores.items()}


def features(network: nn.Module, images: Examples, task: str = CLASS) -> Floats:
    """Return what an attacker sees of each example, [n, k]. Raises UserError if an output is not finite.

    The columns for classes: cross-entropy, probability of the true class, entropy (in nats), margin (true logit minus the
    largest other logit), and 1 for a right answer. For other tasks: the example's loss (squared error, binary cross-entropy,
    or cross-entropy per step), and the mean size of its outputs.
    """
    logits = _logits(network, images)
    if not logits.isfinite().all():
        raise UserError("the network's outputs are not finite: no membership attack can rank them")
    if task != CLASS:
        return torch.stack([_losses(logits, images.y.cpu(), task), logits.abs().flatten(1).mean(1)], dim=1).numpy()
    truth = images.y.cpu()[:, None]
    logs = logits.log_softmax(dim=1)
    true = logs.gather(1, truth)
    margin = logits.gather(1, truth) - logits.scatter(1, truth, -math.inf).amax(dim=1, keepdim=True)
    entropy = torch.special.entr(logs.exp()).sum(dim=1, keepdim=True)
    right = logits.argmax(dim=1, keepdim=True) == truth
    return torch.cat([-true, true.exp(), entropy, margin, right], dim=1).numpy()


def _losses(outputs: Tensor, targets: Tensor, task: str) -> Tensor:
    """Return the loss of each example, float64 [n], for a task other than classes."""
    if task == REGRESSION:
        return (outputs - targets).square().mean(1)
    if task == MULTILABEL:
        return F.binary_cross_entropy_with_logits(outputs, targets.double(), reduction="none").mean(1)
    counts = targets != IGNORED
    each = F.cross_entropy(outputs.transpose(1, 2), targets.clamp(min=0), reduction="none")
    return (each * counts).sum(1) / counts.sum(1).clamp(min=1)


def cross_fitted(inside: Floats, outside: Floats, seed: int) -> list[Sides]:
    """Return log-odds of membership from features [members, k] and [others, k], for each of two random halves.

    A logistic regression, in which both sides have the same weight, scores each half after it was fitted on the other half.
    No model scores an image that it has seen, and scores of two models are never compared.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    member = np.repeat([1, 0], [len(inside), len(outside)])
    images, scores = np.concatenate([inside, outside]), []
    shuffle = int(generator(seed, "membership", "halves").integers(2**32))
    for fitted, held in StratifiedKFold(2, shuffle=True, random_state=shuffle).split(images, member):
        model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
        odds = model.fit(images[fitted], member[fitted]).decision_function(images[held])
        scores.append((odds[member[held] == 1], odds[member[held] == 0]))
    return scores


def area(members: Floats, others: Floats) -> float:
    """Return the area under the ROC curve of the scores [m] and [n]: P(member > other) + P(member = other) / 2.

    It is the Mann-Whitney statistic divided by m * n.
    """
    ordered = np.sort(others)
    twice = np.searchsorted(ordered, members, "left") + np.searchsorted(ordered, members, "right")
    return float(twice.mean() / (2 * len(others)))


def interval(members: Floats, others: Floats, random: np.random.Generator, resamples: int) -> tuple[float, float]:
    """Return the 95% percentile bootstrap interval of `area`. Each side's images are resampled with replacement.

    Args:
        members: The scores of members, [n].
        others: The scores of the other images, [m].
        random: Draws the samples.
        resamples: The number of samples.

    Returns:
        The lower and the upper limit.
    """
    ranks = np.unique(np.concatenate([members, others]), return_inverse=True)[1]
    ours, theirs = ranks[: len(members)], ranks[len(members) :]
    areas = []
    for _ in range(resamples):
        drawn = ours[random.integers(0, len(ours), len(ours))]
        against = np.bincount(theirs[random.integers(0, len(theirs), len(theirs))], minlength=len(ranks))
        areas.append((np.cumsum(against) - against / 2)[drawn].sum())
    low, high = np.percentile(areas, [2.5, 97.5]) / (len(members) * len(others))
    return float(low), float(high)


def distance(state: State, other: State) -> dict[str, float]:
    """Return the `euclidean` distance of two states, also `relative` to the norm of `other`, in float64.

    Both are over all floating tensors. Raises UserError for a tensor without a counterpart of its shape; or if `other` is
    zero everywhere.
    """
    if unmatched := state.keys() ^ other.keys():
        raise UserError(f"tensor '{min(unmatched)}' is in only one of the two states")
    apart, size = 0.0, 0.0
    for name in sorted(state):
        first, second = state[name].detach().cpu(), other[name].detach().cpu()
        if (first.shape, first.is_floating_point()) != (second.shape, second.is_floating_point()):
            kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (first, second)]
            raise UserError(f"tensor '{name}' is {kinds[0]} in one state and {kinds[1]} in the other")
        if first.is_floating_point():
            apart += float((first.double() - second.double()).square().sum())
            size += float(second.double().square().sum())
    if size == 0.0:
        raise UserError("the other state is zero everywhere; a distance relative to it is not defined")
    return {"euclidean": math.sqrt(apart), "relative": math.sqrt(apart / size)}


def disagreement(network: nn.Module, other: nn.Module, images: Examples, task: str = CLASS) -> float:
    """Return the share of answers (classes, labels or next tokens) in which two networks in evaluation mode differ.

    For regression: the mean absolute difference of their outputs. Raises UserError without images.
    """
    if not len(images):
        raise UserError("the disagreement of two networks needs at least one image")
    first, second = _logits(network, images), _logits(other, images)
    if task == REGRESSION:
        return float((first - second).abs().mean())
    if task == MULTILABEL:
        return float(((first > 0) != (second > 0)).double().mean())
    return float((first.argmax(dim=-1) != second.argmax(dim=-1)).double().mean())


def time_to_relearn(
    network: nn.Module, train: Examples, test: Examples, target: float,
    training: TrainingConfig, *, seed: int, most: int = 500, every: int = 5,
) -> Relearned:  # fmt: skip
    """Return how many steps of SGD on `train` bring a copy of the network to the accuracy `target` on `test`.

    Follows Golatkar et al. 2020, with `training` at a constant rate. The accuracy is measured before the first step, after
    each `every` steps and after `most` steps. Raises UserError without images to train or test on; DivergedError if the loss
    is no longer finite.
    """
    if not len(train) or not len(test) or every < 1:
        raise UserError(f"relearning needs images (got {len(train)} and {len(test)}) and every >= 1 (got {every})")
    device, student, rate = next(network.parameters()).device, copy.deepcopy(network), training.rate

    def accuracy() -> float:
        right = count_right(student.eval(), test, EVALUATION_BATCH, device)
        student.train()
        return right / len(test)

    def lessons() -> Iterator[tuple[float, Tensor, Tensor]]:
        nonlocal done, reached
        for done, (inputs, labels) in enumerate(islice(_batches(train, training.batch, seed, device), most), start=1):
            yield rate, inputs, labels
            if done % every == 0 or done == most:
                reached = accuracy()
            if reached >= target:
                return

    done, reached = 0, accuracy()
    if reached < target and most > 0:
        parameters = list(student.parameters())
        losses = descend(parameters, lambda x, y: F.cross_entropy(student(x), y), lessons(), recipe_of(training))
        if not losses.isfinite().all():
            raise DivergedError(f"relearning: the loss is no longer finite; try a smaller rate than {rate}")
    return Relearned(done if reached >= target else None, reached, target, len(train))


def _attack(parts: Sequence[Sides], random: np.random.Generator, resamples: int) -> Attack:
    """Return the mean area of the parts. The interval is the mean of their intervals, wide enough for dependent parts."""
    low, high = np.mean([interval(*part, random, resamples) for part in parts], axis=0)
    members, others = (sum(map(len, sides)) for sides in zip(*parts, strict=True))
    return Attack(float(np.mean([area(*part) for part in parts])), float(low), float(high), members, others)


def _logits(network: nn.Module, images: Examples) -> Tensor:
    """Return logits as float64 [n, classes] on the CPU, computed on the network's device."""
    device = next(network.parameters()).device
    with torch.inference_mode():
        return torch.cat([network(to_float(x.to(device))).cpu() for x in images.x.split(EVALUATION_BATCH)]).double()


def _batches(images: Examples, batch: int, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield endless batches of float32 images [b, c, h, w] and labels [b], all of the same size b <= batch."""
    draw = torch_generator(seed, "relearn", "batches")
    pixels, labels = images.x.to(device), images.y.to(device)
    size = min(batch, len(images))
    while True:
        order = torch.randperm(len(images), generator=draw)
        for chosen in order.split(size)[: len(images) // size]:
            yield to_float(pixels[chosen]), labels[chosen]
