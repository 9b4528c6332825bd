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
    """The largest cosine of a sketch of one and a sketch of the other, or of the other reversed, whatever their names: the
    server names tensors. Sketches of tensors of other sizes have nothing in common. 1 for what is not finite."""
    if not one or not other:
        return 0.0
    with np.errstate(invalid="ignore"):
        cosines = _directions(one) @ _directions(other).T
    return float(np.abs(cosines).max()) if np.isfinite(cosines).all() else 1.0


def _directions(sketches: Mapping[str, Sketch]) -> NDArray[np.float64]:
    """The sketches, one a row, with norm 1; those of nothing stay 0."""
    rows = np.stack([*sketches.values()]).astype(np.float64)
    rows /= np.maximum(np.abs(rows).max(1, keepdims=True), np.finfo(np.float64).tiny)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)


def packed(sketches: Mapping[str, Sketch]) -> dict[str, str]:
    """As texts."""
    return {name: one.tobytes().hex() for name, one in sketches.items()}


def unpacked(texts: Mapping[str, str]) -> dict[str, Sketch]:
    """The inverse."""
    return {name: np.frombuffer(bytes.fromhex(text), np.float32) for name, text in texts.items()}
