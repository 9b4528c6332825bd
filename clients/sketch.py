"""Sketches of changes: short vectors whose angle is about that of the long ones (Charikar et al. 2002, count sketch)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BUCKETS = 256
ALIKE = 0.99  # cosine above which two changes are about the same: what is left of one is a seventh of it


def sketch(vector: Tensor, key: bytes) -> NDArray[np.float32]:
    """float32 [BUCKETS] of length 1, or zeros: every entry of a vector [n] goes into a bucket, with a sign.

    `key`: 16 secret bytes, which draw buckets and signs.
    """
    draw = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
    place = torch.randint(2 * BUCKETS, (vector.numel(),), generator=draw)
    both = torch.zeros(2 * BUCKETS, dtype=torch.float64).index_add_(0, place, vector.flatten().double())
    found = both[:BUCKETS] - both[BUCKETS:]
    size = float(found.norm())
    return (found / size if size else found).float().numpy()


def nothing() -> NDArray[np.float32]:
    """The sketch of no change."""
    return np.zeros(BUCKETS, np.float32)


def likeness(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The cosine of the angle of two sketches, or of one and the other reversed; 0 where one is of nothing."""
    return abs(float(one @ other)) if one.shape == other.shape else 0.0
