"""A linear head in closed form from class statistics, which add up over sites: Fisher's discriminant.

With classes as Gaussians of one covariance, the logarithms of their probabilities given x are linear in x (Hastie,
Tibshirani, Friedman: The Elements of Statistical Learning, Sec. 4.3). No image and no step of training is needed.
"""

import torch
from torch import Tensor

from fedloom.conf.errors import UserError

RIDGE = 1e-3  # of the mean variance, on the covariance
NEVER = 1e3  # nats: the class is never the answer


def discriminant(count: Tensor, total: Tensor, square: Tensor, never: float = NEVER) -> tuple[Tensor, Tensor]:
    """Weight [classes, d] and bias [classes], float64, of logits: log probability of each class but for a common summand.

    count: [classes] shares of the images, total: [classes, d] sums of their x by class, divided by the number of images,
    square: [d, d] the mean of x x^T. A class without images gets the weight 0 and a bias `never` nats below all others.
    UserError if nothing was counted.
    """
    shares = count.double().clamp(min=0.0)
    there = shares > 0.0
    if not bool(there.any()):
        raise UserError("discriminant: no class has an image")
    shares, whole = shares / shares.sum(), shares.sum()
    means = torch.where(there[:, None], total.double() / (shares * whole).clamp(min=1e-300)[:, None], 0.0)
    within = (square + square.T).double() / (2.0 * whole) - means.T @ (shares[:, None] * means)
    size = within.diagonal().mean().clamp(min=1e-12)
    within.diagonal().add_(RIDGE * size)
    values, vectors = torch.linalg.eigh(within)
    values = values.clamp(min=RIDGE * size)  # rounding, and what does not come from images
    weight = (means @ vectors / values) @ vectors.T
    bias = -0.5 * (weight * means).sum(dim=1) + shares.clamp(min=1e-300).log()
    return weight * there[:, None], torch.where(there, bias, bias[there].min() - never)


def scaled(weight: Tensor, bias: Tensor, norm: float) -> tuple[Tensor, Tensor]:
    """The same answers by logits of another scale: what all classes have in common taken away, the weight's norm as given.

    Features of almost one direction make a discriminant's weights large by thousands; no training can start from them.
    """
    weight, bias = weight - weight.mean(dim=0), bias - bias.mean()
    share = norm / weight.norm().clamp(min=1e-12)
    return weight * share, bias * share
