"""Sketches of changes: short vectors whose angles are about those of the long ones (Charikar et al. 2002, count sketch)."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BUCKETS = 64
OWN_SKETCH = 256  # a tensor with at least so many entries has its own sketch
SMALL = ""  # the name of the common sketch of all smaller tensors
ALIKE = 0.99  # cosine above which two changes count as the same: the remainder of one is a seventh of it


Sketch = NDArray[np.float32]


def sketch(vector: Tensor, key: bytes) -> Sketch:
    """Return float32 [BUCKETS]: sums of a vector's entries, in random buckets with random signs. Sketches can be summed.

    `key`: 16 secret bytes that determine buckets and signs.
    """
    draw = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
    place = torch.randint(2 * BUCKETS, (vector.numel(),), generator=draw)
    both = torch.zeros(2 * BUCKETS, dtype=torch.float64).index_add_(0, place, vector.flatten().double())
    return (both[:BUCKETS] - both[BUCKETS:]).float().numpy()


def sketches(state: Mapping[str, Tensor], key: bytes) -> dict[str, Sketch]:
    """Return the sketch of each tensor, and one for all small tensors together.

    A large move in one tensor does not hide a small one in another.
    """
    large = {name: tensor for name, tensor in state.items() if tensor.numel() >= OWN_SKETCH}
    small = [tensor.flatten() for name, tensor in sorted(state.items()) if name not in large]
    return {name: sketch(tensor, key) for name, tensor in large.items()} | (
        {SMALL: sketch(torch.cat(small), key)} if small else {}
    )


def likeness(one: Mapping[str, Sketch], other: Mapping[str, Sketch]) -> float:
    """Return the largest absolute cosine between a sketch in `one` and one in `other`; 1 if any is not finite.

    Names do not matter, because the server names tensors. Tensors of different sizes have cosines near 0.
    """
    if not one or not other:
        return 0.0
    with np.errstate(invalid="ignore"):
        cosines = _directions(one) @ _directions(other).T
    return float(np.abs(cosines).max()) if np.isfinite(cosines).all() else 1.0


def _directions(sketches: Mapping[str, Sketch]) -> NDArray[np.float64]:
    """Return the sketches as rows with norm 1; zero sketches stay 0."""
    rows = np.stack([*sketches.values()]).astype(np.float64)
    rows /= np.maximum(np.abs(rows).max(1, keepdims=True), np.finfo(np.float64).tiny)
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), np.finfo(np.float64).tiny)


def packed(sketches: Mapping[str, Sketch]) -> dict[str, str]:
    """Return each tensor's sketch as a hexadecimal text, for JSON. `unpacked` reverses it."""
    return {name: vector.tobytes().hex() for name, vector in sketches.items()}


def unpacked(texts: Mapping[str, str]) -> dict[str, Sketch]:
    """Return the sketches from the texts that `packed` returned."""
    return {name: np.frombuffer(bytes.fromhex(text), np.float32) for name, text in texts.items()}
