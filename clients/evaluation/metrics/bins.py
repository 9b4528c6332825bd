"""Histograms of scores in fixed bins, whose sums over sites give AUROC and average precision.

A score's bin is its float32 value, rounded down to 15 binary digits. So bins are fine near 0, where the scores of an
untrained network are, and their width grows with the score: 0.003% of it. A histogram has only the bins that are not
empty, so it has at most as many rows as scores.
"""

import torch
from torch import Tensor

DIGITS = 24  # binary digits of a bin's number: sign, 8 of the exponent, 15 of the fraction
BINS = 2**DIGITS  # for each output of the network
LARGEST = 3e38  # of a score
COLUMNS = 3  # of a histogram: output * BINS + bin, negative examples, positive examples


def margins(logits: Tensor) -> Tensor:
    """Return each class's log odds against the mean of the others, float64 [n, c]: 0 if all classes are equal.

    Over examples, they have the same order as the softmax probabilities of the class, but do not saturate near 1.
    """
    z = logits.double()
    if z.shape[1] < 2:
        return torch.zeros_like(z)
    first, place = z.max(dim=1, keepdim=True)
    powers = (z - first).exp()
    others = first + (powers.sum(dim=1, keepdim=True) - powers).log()
    alone = z.scatter(1, place, -torch.inf).logsumexp(dim=1, keepdim=True)
    return z - others.scatter(1, place, alone) + torch.tensor(float(z.shape[1] - 1)).log()


def bins_of(scores: Tensor) -> Tensor:
    """Return the number of each score's bin, int64 of the same shape, ascending with the scores."""
    known = torch.nan_to_num(scores.double(), nan=0.0, posinf=LARGEST, neginf=-LARGEST).clamp(-LARGEST, LARGEST)
    bits = (known.float() + 0.0).view(torch.int32).to(torch.int64)  # + 0.0: -0.0 becomes 0.0
    ordered = torch.where(bits >= 0, bits + 2**31, 2**31 - 1 - (bits & 0x7FFFFFFF))
    return ordered >> (32 - DIGITS)


def histogram(scores: Tensor, positive: Tensor) -> Tensor:
    """Return the histogram of scores [n, c], int64 [rows, COLUMNS]. `positive`: bool [n, c]."""
    place = bins_of(scores) + BINS * torch.arange(scores.shape[1])
    keys, which = place.flatten().unique(return_inverse=True)
    positives = torch.bincount(which, weights=positive.flatten().double(), minlength=len(keys)).long()
    return torch.stack([keys, torch.bincount(which, minlength=len(keys)) - positives, positives], dim=1)


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two sparse tables: rows with the same key (first column) become one, the rest is added."""
    rows = torch.cat([one, other])
    keys, which = rows[:, 0].unique(return_inverse=True)
    counts = torch.zeros(len(keys), rows.shape[1] - 1, dtype=rows.dtype).index_add_(0, which, rows[:, 1:])
    return torch.cat([keys[:, None], counts], dim=1)


def of_output(table: Tensor, output: int) -> tuple[Tensor, Tensor]:
    """Return one output's negative and positive examples by bin, in ascending order, float64."""
    rows = table[(table[:, 0] >= output * BINS) & (table[:, 0] < (output + 1) * BINS)].double()
    return rows[:, 1], rows[:, 2]


def auroc(negatives: Tensor, positives: Tensor) -> float:
    """Return the area under the ROC curve of a histogram; NaN if one of both classes is empty.

    A pair in one bin counts half, as equal scores do. So the error is at most half the share of such pairs.
    """
    below = negatives.cumsum(0) - 0.5 * negatives
    return float((positives * below).sum() / (positives.sum() * negatives.sum()))


def average_precision(negatives: Tensor, positives: Tensor) -> float:
    """Return the mean precision over the recall of a histogram; NaN without positive examples."""
    right, all_above = positives.flip(0).cumsum(0), (positives + negatives).flip(0).cumsum(0)
    return float((positives.flip(0) * right / all_above).sum() / positives.sum())
