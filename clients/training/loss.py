"""The loss of a site's own task: the one place of label smoothing."""

import torch
import torch.nn.functional as F
from torch import Tensor


def full(scores: Tensor) -> Tensor:
    """The same in float32, if they are in less: a sum over classes in bfloat16 has two digits."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def task_loss(scores: Tensor, labels: Tensor, smoothing: float, reduction: str = "mean") -> Tensor:
    """Cross-entropy of scores [n, classes] with labels [n], in float32 at least.

    Targets are 1 - smoothing for the label, and smoothing / classes on top for all classes (Szegedy et al. 2016, Sec. 7).
    """
    return F.cross_entropy(full(scores), labels, label_smoothing=smoothing, reduction=reduction)
