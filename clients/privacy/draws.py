"""Digests of the images that a site draws in a round: if two sums have the same ones, their difference reveals a site.

The server decides what is trained (network, rate, decay, the order of channels), so similar changes are not the only sign of
a repeated training. It does not decide which images a site draws from, and equal images give gradients that it can align.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

WHOLE = "all"  # instead of a digest: the batch has all images
MOST = 64  # images of the order that is stored, and batches
SHARED = 0.5  # share of equal batches above which two trainings count as the same


@dataclass
class Draws:
    """The batches of a training, as a site notes them."""

    _order: list[int] = field(default_factory=list)  # the first images
    _batches: list[str] = field(default_factory=list)

    def note(self, batch: Tensor, images: int) -> None:
        """Note a batch of image indices, int64 [b], of a site with this number of images."""
        if len(self._batches) < MOST:
            self._order += batch[: MOST - len(self._order)].tolist()
            self._batches.append(WHOLE if len(batch) == images else _digest(batch.sort().values))

    def digests(self) -> list[str]:
        """Return a digest of the order of the first images, then one for each of the first batches, whatever its order."""
        return [_digest(torch.tensor(self._order)), *self._batches] if self._batches else []


def repeated(one: Sequence[str], other: Sequence[str], whole: bool) -> bool:
    """Return whether two trainings drew the same images: in the same order, or in most of the shorter one's batches.

    `whole`: whether batches of all images count. They are the same in every round.
    """
    if not one or not other:
        return False
    if not whole and WHOLE in (one[1], other[1]):
        return False
    same = [mine == theirs for mine, theirs in zip(one[1:], other[1:], strict=False)]
    return one[0] == other[0] or sum(same) > SHARED * len(same)


def _digest(indices: Tensor) -> str:
    return hashlib.sha256(indices.numpy().tobytes()).hexdigest()[:16]
