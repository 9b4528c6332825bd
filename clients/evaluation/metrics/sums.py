"""The sums from which metrics follow. Each adds up over batches and sites, so no example leaves a site.

A function takes the network's `scores` (float [n, outputs]; for tokens [n, t, outputs]) and the `targets`, and returns
one tensor. Counts are int64. Confidences are whole numbers of 2**-24, so their sums do not depend on an order either.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedloom.clients.evaluation.metrics.bins import BINS, DIGITS, bins_of, histogram, margins, merged

Sums = Mapping[str, Tensor]  # by the name of a statistic
IGNORED = -100  # a token without a target
CONFIDENCE_BINS, CONFIDENCE_ONE = 15, 2**24
PAIR_DIGITS = 13  # of each number in the picture of predicted against true numbers: sign, exponent, 4 of the fraction
PAIRS = 2**PAIR_DIGITS


def plus(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two tensors of one shape."""
    return one + other


@dataclass(frozen=True)
class Statistic:
    """A sum over examples. `of` computes it for some examples, `add` adds two. `sparse`: a table with keys in column 0.

    `totals`: it has only totals over all examples, nothing about single classes or scores.
    """

    name: str
    of: Callable[[Tensor, Tensor], Tensor]
    add: Callable[[Tensor, Tensor], Tensor] = plus
    totals: bool = False

    @property
    def adds(self) -> bool:
        """Whether it adds up over sites without an example leaving one."""
        return self.add is not joined

    @property
    def sparse(self) -> bool:
        """Whether it is a table of the entries that are not 0, with their keys in the first column."""
        return self.add is merged


def right(scores: Tensor, targets: Tensor) -> Tensor:
    """Return int64 [2]: the numbers of right answers and of answers."""
    flat, labels = _counted(scores, targets)
    return torch.stack([(flat.argmax(1) == labels).sum(), torch.tensor(len(labels))])


def confusion(scores: Tensor, targets: Tensor) -> Tensor:
    """Return int64 [classes, classes]: the numbers of examples by true class (row) and predicted class (column)."""
    classes = scores.shape[1]
    return torch.bincount(targets * classes + scores.argmax(1), minlength=classes**2).reshape(classes, classes)


def class_scores(scores: Tensor, targets: Tensor) -> Tensor:
    """Return each class's histogram of scores, with this class against the others (`bins.histogram`)."""
    return histogram(margins(scores), targets[:, None] == torch.arange(scores.shape[1]))


def label_scores(scores: Tensor, targets: Tensor) -> Tensor:
    """Return each label's histogram of scores (`bins.histogram`)."""
    return histogram(scores, targets > 0.5)


def calibration(scores: Tensor, targets: Tensor) -> Tensor:
    """Return int64 [CONFIDENCE_BINS, 3]: examples, right answers and the sum of confidences, by confidence."""
    confidences, predicted = scores.double().softmax(1).max(1)
    bounds = torch.linspace(0, 1, CONFIDENCE_BINS + 1, dtype=torch.float64)
    place = (torch.bucketize(confidences, bounds, right=True) - 1).clamp(0, CONFIDENCE_BINS - 1)
    whole = (confidences.nan_to_num() * CONFIDENCE_ONE).round().long()
    rows = torch.stack([torch.ones_like(place), (predicted == targets).long(), whole], dim=1)
    return torch.zeros(CONFIDENCE_BINS, 3, dtype=torch.int64).index_add_(0, place, rows)


def labels(scores: Tensor, targets: Tensor) -> Tensor:
    """Return int64 [labels, 4]: true positives, false positives, true negatives, false negatives of each label."""
    said, true = scores > 0, targets > 0.5
    return torch.stack([(said & true).sum(0), (said & ~true).sum(0), (~said & ~true).sum(0), (~said & true).sum(0)], dim=1)


def subsets(scores: Tensor, targets: Tensor) -> Tensor:
    """Return int64 [2]: the number of examples with all labels right, and of examples."""
    return torch.stack([((scores > 0) == (targets > 0.5)).all(1).sum(), torch.tensor(len(targets))])


def errors(scores: Tensor, targets: Tensor) -> Tensor:
    """Return float64 [outputs, 5]: examples, and the sums of |error|, error**2, true number and its square."""
    true = targets.double()
    error = scores.double() - true
    parts = [torch.ones_like(true), error.abs(), error.square(), true, true.square()]
    return torch.stack([part.sum(0) for part in parts], dim=1)


def against(scores: Tensor, targets: Tensor) -> Tensor:
    """Return int64 [rows, 2]: the examples by output, true and predicted number, each rounded to 4 binary digits.

    The key is (output * PAIRS + bin of the true number) * PAIRS + bin of the predicted number.
    """
    first = torch.arange(scores.shape[1]) * PAIRS
    keys = (first + _coarse(targets)) * PAIRS + _coarse(scores)
    return torch.stack(keys.flatten().unique(return_counts=True), dim=1)


def numbers_of(bins: Tensor) -> Tensor:
    """Return the number in the middle of each bin of `against`."""
    mid = (bins << (32 - PAIR_DIGITS)) + (1 << (31 - PAIR_DIGITS))
    bits = torch.where(mid >= 2**31, mid - 2**31, (2**31 - 1 - mid) - 2**31)
    return bits.to(torch.int32).view(torch.float32).double()


def log_likelihood(scores: Tensor, targets: Tensor) -> Tensor:
    """Return float64 [2]: the sum of -log p over the tokens with a target, and their number."""
    flat, known = _counted(scores, targets)
    loss = cross_entropy(flat.double(), known, reduction="sum") if len(known) else torch.zeros((), dtype=torch.float64)
    return torch.stack([loss, torch.tensor(float(len(known)), dtype=torch.float64)])


def examples(scores: Tensor, targets: Tensor) -> Tensor:
    """Return all scores and targets, float64 [n, outputs + targets], for a metric that does not follow from sums."""
    flat = scores.flatten(0, -2).double()
    return torch.cat([flat, targets.reshape(len(flat), -1).double()], dim=1)


def joined(one: Tensor, other: Tensor) -> Tensor:
    """Return the examples of both."""
    return torch.cat([one, other])


STATISTICS = {
    each.name: each
    for each in (
        Statistic("right", right, totals=True),
        Statistic("confusion", confusion),
        Statistic("scores", class_scores, merged),
        Statistic("calibration", calibration),
        Statistic("labels", labels),
        Statistic("label_scores", label_scores, merged),
        Statistic("subsets", subsets, totals=True),
        Statistic("errors", errors, totals=True),
        Statistic("against", against, merged),
        Statistic("log_likelihood", log_likelihood, totals=True),
    )
}


def in_blocks(name: str, tensor: Tensor, first: int, outputs: int) -> Tensor:
    """Return a class statistic of a head with its classes moved to `first` and on, among `outputs` classes in all.

    So classes of different heads stay apart in the sum over domains.
    """
    if name == "confusion":
        whole = torch.zeros(outputs, outputs, dtype=tensor.dtype)
        whole[first : first + len(tensor), first : first + len(tensor)] = tensor
        return whole
    if name == "scores":
        return tensor + torch.tensor([first * BINS, 0, 0])
    return tensor


def _counted(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores [n, outputs] and labels [n] of the examples, or of the tokens with a target."""
    flat, known = scores.flatten(0, -2), targets.flatten()
    counts = known != IGNORED
    return flat[counts], known[counts]


def _coarse(numbers: Tensor) -> Tensor:
    """Return the bin of each number in `against`."""
    return bins_of(numbers) >> (DIGITS - PAIR_DIGITS)


def moved_sums(sums: Sums, first: int, outputs: int) -> dict[str, Tensor]:
    """Return sums with their classes at `first` and on, among `outputs` classes."""
    return {name: in_blocks(name, tensor, first, outputs) for name, tensor in sums.items()}


def weighted(sums: Sums, share: float) -> dict[str, Tensor]:
    """Return sums with all examples counted as `share` of one."""
    if share == 1.0:
        return dict(sums)
    result = {}
    for name, tensor in sums.items():
        keyed = name in STATISTICS and STATISTICS[name].sparse
        scale = torch.full(tensor.shape[-1:], share, dtype=torch.float64)
        scale[0] = 1.0 if keyed else share
        result[name] = tensor.double() * scale
    return result
