"""A membership attack fitted to each image: was a network made to forget the image, or did it never see it?

This is U-LiRA (Hayes et al. 2024, Sec. 4), after LiRA (Carlini et al. 2022, Alg. 1). Over many federations, the confidence
in an image's true class is nearly normal. Its mean differs between federations that forgot the image and federations that
never saw it. The score is the logarithm of the ratio of both densities.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedloom.conf.errors import UserError
from fedloom.server.unlearning.attacks import Floats, area

MIN_FEDERATIONS = 4  # federations
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Found:
    """The result of a likelihood-ratio attack.

    `rate`: true positives at a share `false` of false positives; `area` under the curve; `trials` on each side.
    """

    rate: float
    false: float
    area: float
    trials: tuple[int, int]


def confidence(logits: Tensor, labels: Tensor) -> Floats:
    """Return log p - log(1 - p) of the true class, [n], for logits [n, classes] (Carlini et al. 2022, Sec. VI-A)."""
    logs = logits.double().log_softmax(dim=1)
    true = labels[:, None]
    others = logs.scatter(1, true, -float("inf")).logsumexp(dim=1)
    return (logs.gather(1, true)[:, 0] - others).cpu().numpy()


def likelihood_ratio(forgotten: Floats, never: Floats, was: Mask, never_was: Mask, false: float = 0.01) -> Found:
    """Run the attack on each federation, with densities that are fitted on all others.

    Each image has its own means over the other federations. Each side has one variance for all images, as there are few
    federations (Carlini et al. 2022, Sec. VI-B). `forgotten`, `never`: confidences [federations, n]; `was`, `never_was`:
    which of them count. Raises UserError for fewer than MIN_FEDERATIONS federations.
    """
    if len(forgotten) < MIN_FEDERATIONS or forgotten.shape != never.shape:
        raise UserError(f"a likelihood-ratio attack needs the same images in at least {MIN_FEDERATIONS} federations")
    members, others = [], []
    for held in range(len(forgotten)):
        rest = np.arange(len(forgotten)) != held
        known = was[rest].any(0) & never_was[rest].any(0)
        sides = _fitted(forgotten[rest], was[rest]), _fitted(never[rest], never_was[rest])
        for values, mask, into in ((forgotten, was, members), (never, never_was, others)):
            asked = mask[held] & known
            ahead, behind = (_log_density(values[held], *side)[asked] for side in sides)
            into.append(ahead - behind)
    inside, outside = np.concatenate(members), np.concatenate(others)
    return Found(rate_at(inside, outside, false), false, area(inside, outside), (len(inside), len(outside)))


def rate_at(inside: Floats, outside: Floats, false: float) -> float:
    """Return the true-positive rate: the share of scores `inside` above all but a share `false` of scores `outside`."""
    threshold = np.sort(outside)[::-1][int(false * len(outside))]
    return float((inside > threshold).mean())


def _fitted(values: Floats, mask: Mask) -> tuple[Floats, float]:
    """Return each image's mean over the federations that count, [n] (0 if none), and one standard deviation for all."""
    count = mask.sum(0)
    means = np.where(mask, values, 0.0).sum(0) / np.maximum(count, 1)
    squares = np.where(mask, (values - means) ** 2, 0.0).sum()
    freedom = np.maximum(count - 1, 0).sum()
    return means, float(np.sqrt(squares / max(freedom, 1))) + 1e-9


def _log_density(values: Floats, mean: Floats, deviation: float) -> Floats:
    return -((values - mean) ** 2) / (2 * deviation**2) - np.log(deviation)
