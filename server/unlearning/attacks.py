"""What a certificate of unlearning measures: membership inference, distance between networks, and the time to relearn."""

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

from fedloom.clients.data import Images, to_float
from fedloom.clients.training.learner import DivergedError, descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import generator, torch_generator
from fedloom.conf.schema import TrainingConfig
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import count_right

EVALUATION_BATCH = 500
FEWEST = 20  # images on each side of a membership attack

Floats = NDArray[np.float64]
Sides = tuple[Floats, Floats]  # scores of members and of others


@dataclass(frozen=True)
class Attack:
    """How well members are told from others: 1 always, 0.5 by chance; `low` to `high` is the 95 % interval of `auc`."""

    auc: float
    low: float
    high: float
    members: int
    others: int


@dataclass(frozen=True)
class Relearned:
    """Steps of SGD on `images` images until the test accuracy was at least `target`, None if it never was.

    `reached`: the accuracy measured last, which is that after `steps` steps.
    """

    steps: int | None
    reached: float
    target: float
    images: int


def membership(
    network: nn.Module, members: Images, others: Images, *, seed: int, resamples: int = 1000
) -> dict[str, Attack]:
    """Two membership-inference attacks on a network in eval mode; UserError for fewer than FEWEST images on a side.

    `loss`: the smaller the cross-entropy, the likelier a member (Yeom et al. 2018, Sec. 3). `logistic`: a logistic
    regression on `features`, without shadow networks (as Kurmanji et al. 2023's basic attack, there on the loss alone).
    """
    for side, images in (("members", members), ("others", others)):
        if len(images) < FEWEST:
            raise UserError(f"a membership attack takes at least {FEWEST} images on each side, got {len(images)} {side}")
    inside, outside = features(network, members), features(network, others)
    scores = {"loss": [(-inside[:, 0], -outside[:, 0])], "logistic": cross_fitted(inside, outside, seed)}
    return {name: _attack(parts, generator(seed, "membership", name), resamples) for name, parts in scores.items()}


def features(network: nn.Module, images: Images) -> Floats:
    """What an attacker sees of each image, [n, 5]: cross-entropy, probability of the true class, entropy (in nats),
    margin (true logit less the largest other one), and 1 for a right answer. UserError if an output is not finite.
    """
    logits, truth = _logits(network, images), images.y.cpu()[:, None]
    if not logits.isfinite().all():
        raise UserError("the network's outputs are not finite: no membership attack can rank them")
    logs = logits.log_softmax(dim=1)
    true = logs.gather(1, truth)
    margin = logits.gather(1, truth) - logits.scatter(1, truth, -math.inf).amax(dim=1, keepdim=True)
    entropy = torch.special.entr(logs.exp()).sum(dim=1, keepdim=True)
    right = logits.argmax(dim=1, keepdim=True) == truth
    return torch.cat([-true, true.exp(), entropy, margin, right], dim=1).numpy()


def cross_fitted(inside: Floats, outside: Floats, seed: int) -> list[Sides]:
    """Log-odds of membership from features [members, k] and [others, k], half by half.

    Both sides are halved at random; each half is scored by a logistic regression (both sides weigh the same) fitted on
    the other half, so no model scores an image that it has seen, and scores of two models are never compared.
    """
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    member = np.repeat([1, 0], [len(inside), len(outside)])
    images, found = np.concatenate([inside, outside]), []
    shuffle = int(generator(seed, "membership", "halves").integers(2**32))
    for fitted, held in StratifiedKFold(2, shuffle=True, random_state=shuffle).split(images, member):
        model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", max_iter=1000))
        odds = model.fit(images[fitted], member[fitted]).decision_function(images[held])
        found.append((odds[member[held] == 1], odds[member[held] == 0]))
    return found


def area(members: Floats, others: Floats) -> float:
    """Area under the ROC curve of the scores, [m] and [n]: P(member > other) + P(member = other) / 2.

    It is the Mann-Whitney statistic divided by m * n.
    """
    ordered = np.sort(others)
    twice = np.searchsorted(ordered, members, "left") + np.searchsorted(ordered, members, "right")
    return float(twice.mean() / (2 * len(others)))


def interval(members: Floats, others: Floats, random: np.random.Generator, resamples: int) -> tuple[float, float]:
    """The 95 % percentile interval of `area`, each side's images drawn again with replacement."""
    places = np.unique(np.concatenate([members, others]), return_inverse=True)[1]
    sides, areas = (places[: len(members)], places[len(members) :]), []
    for _ in range(resamples):
        drawn, against = (np.bincount(random.choice(side, len(side)), minlength=len(places)) for side in sides)
        areas.append(drawn @ (np.cumsum(against) - against / 2))
    low, high = np.percentile(areas, [2.5, 97.5]) / (len(members) * len(others))
    return float(low), float(high)


def distance(one: State, other: State) -> dict[str, float]:
    """`euclidean` distance over all floating tensors together, and `relative` to the norm of `other`, in float64.

    UserError, naming the tensor, if one of them has no counterpart of its shape; or if `other` is zero everywhere.
    """
    if odd := one.keys() ^ other.keys():
        raise UserError(f"tensor '{min(odd)}' is in one of the two states only")
    apart, size = 0.0, 0.0
    for name in sorted(one):
        here, there = one[name].detach().cpu(), other[name].detach().cpu()
        if (here.shape, here.is_floating_point()) != (there.shape, there.is_floating_point()):
            kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (here, there)]
            raise UserError(f"tensor '{name}' is {kinds[0]} in one state and {kinds[1]} in the other")
        if here.is_floating_point():
            apart += float((here.double() - there.double()).square().sum())
            size += float(there.double().square().sum())
    if size == 0.0:
        raise UserError("the other state is zero everywhere: no distance is relative to it")
    return {"euclidean": math.sqrt(apart), "relative": math.sqrt(apart / size)}


def disagreement(one: nn.Module, other: nn.Module, images: Images) -> float:
    """Share of the images that the two networks (in eval mode) put into different classes; UserError without images."""
    if not len(images):
        raise UserError("two networks cannot disagree on no images")
    return float((_logits(one, images).argmax(dim=1) != _logits(other, images).argmax(dim=1)).double().mean())


def time_to_relearn(
    network: nn.Module, train: Images, test: Images, target: float,
    training: TrainingConfig, *, seed: int, most: int = 500, every: int = 5,
) -> Relearned:  # fmt: skip
    """How many steps of SGD on `train` bring a copy of the network to `target` on `test` (Golatkar et al. 2020).

    As `training` says, but at a constant rate. Measured before the first step, after each `every` and after `most`.
    UserError if there is nothing to train or test on, DivergedError if the loss is no longer finite.
    """
    if not len(train) or not len(test) or every < 1:
        raise UserError(f"relearning takes images ({len(train)}, {len(test)}) and every ({every}) >= 1")
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
            raise DivergedError(f"the loss is no longer finite while relearning; a smaller rate than {rate} may help")
    return Relearned(done if reached >= target else None, reached, target, len(train))


def _attack(parts: Sequence[Sides], random: np.random.Generator, resamples: int) -> Attack:
    """The mean of the parts' areas; its interval is the mean of theirs, wide enough however they depend on each other."""
    low, high = np.mean([interval(*part, random, resamples) for part in parts], axis=0)
    members, others = (sum(map(len, sides)) for sides in zip(*parts, strict=True))
    return Attack(float(np.mean([area(*part) for part in parts])), float(low), float(high), members, others)


def _logits(network: nn.Module, images: Images) -> Tensor:
    """float64 [n, classes] on the CPU, computed on the network's device."""
    device = next(network.parameters()).device
    with torch.inference_mode():
        return torch.cat([network(to_float(x.to(device))).cpu() for x in images.x.split(EVALUATION_BATCH)]).double()


def _batches(images: Images, batch: int, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless epochs of float32 images [b, c, h, w] and labels [b], all of the same b <= batch: a shorter rest sits out."""
    draw = torch_generator(seed, "relearn", "batches")
    pixels, labels = images.x.to(device), images.y.to(device)
    size = min(batch, len(images))
    while True:
        order = torch.randperm(len(images), generator=draw)
        for chosen in order.split(size)[: len(images) // size]:
            yield to_float(pixels[chosen]), labels[chosen]
