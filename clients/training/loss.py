"""The loss of a site's task: cross-entropy with label smoothing."""

import torch
import torch.nn.functional as F
from torch import Tensor


def full(scores: Tensor) -> Tensor:
    """Convert scores to at least float32, since a sum over classes in bfloat16 has two digits."""
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def task_loss(scores: Tensor, labels: Tensor, smoothing: float, reduction: str = "mean") -> Tensor:
    """Return the cross-entropy of scores [n, classes] with labels [n], in at least float32.

    The target is smoothing / classes for every class, plus 1 - smoothing for the label (Szegedy et al. 2016, Sec. 7).
    """
    return F.cross_entropy(full(scores), labels, label_smoothing=smoothing, reduction=reduction)
