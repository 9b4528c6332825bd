"""Fisher's discriminant: a linear head in closed form from class statistics, which can be summed over sites.

If the classes are Gaussians with one covariance, their log probabilities at x are linear in x (Hastie, Tibshirani,
Friedman: The Elements of Statistical Learning, Sec. 4.3). It needs no images and no training.
"""

import torch
from torch import Tensor

from fedloom.conf.errors import UserError

RIDGE = 1e-3  # relative to the mean variance; added to the covariance
NEVER = 1e3  # nats, so that the class is never the answer


def discriminant(count: Tensor, total: Tensor, square: Tensor, never: float = NEVER) -> tuple[Tensor, Tensor]:
    """Return a linear head by Fisher's discriminant. Its outputs are log probabilities plus a constant.

    A class without images has the weight 0 and a bias `never` nats below all others.

    Args:
        count: The share of the images in each class, [classes].
        total: The sums of x by class, divided by the number of images, [classes, d].
        square: The mean of x x^T, [d, d].
        never: How far the bias of a class without images is below the others.

    Returns:
        Weight [classes, d] and bias [classes], float64.

    Raises:
        UserError: No class has images.
    """
    shares = count.double().clamp(min=0.0)
    counted = shares > 0.0
    if not bool(counted.any()):
        raise UserError("discriminant: no class has an image")
    shares, mass = shares / shares.sum(), shares.sum()
    means = torch.where(counted[:, None], total.double() / (shares * mass).clamp(min=1e-300)[:, None], 0.0)
    within = (square + square.T).double() / (2.0 * mass) - means.T @ (shares[:, None] * means)
    size = within.diagonal().mean().clamp(min=1e-12)
    within.diagonal().add_(RIDGE * size)
    values, vectors = torch.linalg.eigh(within)
    values = values.clamp(min=RIDGE * size)  # against rounding errors and added noise
    weight = (means @ vectors / values) @ vectors.T
    bias = -0.5 * (weight * means).sum(dim=1) + shares.clamp(min=1e-300).log()
    return weight * counted[:, None], torch.where(counted, bias, bias[counted].min() - never)


def scaled(weight: Tensor, bias: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """Return a linear head with the same predictions: without what all classes share, and with weights of norm `norm`.

    If features nearly share one direction, a discriminant's weights are thousands of times too large for training.
    """
    weight, bias = weight - weight.mean(dim=0), bias - bias.mean()
    share = norm / weight.norm().clamp(min=1e-12)
    return weight * share, bias * share
