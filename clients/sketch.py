"""Sketches of changes: short vectors whose angle is about that of the long ones (Charikar et al. 2002, count sketch)."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BUCKETS = 64
OWN_SKETCH = 256  # entries from which a tensor has a sketch of its own
SMALL = ""  # the name of the sketch of all smaller ones
ALIKE = 0.99  # cosine above which two changes are about the same: what is left of one is a seventh of it


Sketch = NDArray[np.float32]


def sketch(vector: Tensor, key: bytes) -> Sketch:
    """float32 [BUCKETS]: every entry of a vector [n] goes into a bucket, with a sign. The sketch of a sum is the sum.

    `key`: 16 secret bytes, which draw buckets and signs.
    """
    draw = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
    place = torch.randint(2 * BUCKETS, (vector.numel(),), generator=draw)
    both = torch.zeros(2 * BUCKETS, dtype=torch.float64).index_add_(0, place, vector.flatten().double())
    return (both[:BUCKETS] - both[BUCKETS:]).float().numpy()


def sketches(state: Mapping[str, Tensor], key: bytes) -> dict[str, Sketch]:
    """By tensor, its sketch; small ones have one together: what moves far in one tensor does not hide what is in others."""
    large = {name: one for name, one in state.items() if one.numel() >= OWN_SKETCH}
    small = [one.flatten() for name, one in sorted(state.items()) if name not in large]
    return {name: sketch(one, key) for name, one in large.items()} | (
        {SMALL: sketch(torch.cat(small), key)} if small else {}
    )


def likeness(one: Mapping[str, Sketch], other: Mapping[str, Sketch]) -> float:
    """Of the tensors that both have, the largest cosine of two sketches, or of one and the other reversed."""
    return max((_cosine(one[name], other[name]) for name in one.keys() & other.keys()), default=0.0)


def _cosine(one: Sketch, other: Sketch) -> float:
    size = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return abs(float(one @ other)) / size if size and one.shape == other.shape else 0.0


def packed(sketches: Mapping[str, Sketch]) -> dict[str, str]:
    """As texts."""
    return {name: one.tobytes().hex() for name, one in sketches.items()}


def unpacked(texts: Mapping[str, str]) -> dict[str, Sketch]:
    """The inverse."""
    return {name: np.frombuffer(bytes.fromhex(text), np.float32) for name, text in texts.items()}
