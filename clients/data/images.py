"""A batch of labelled images, and what is done to it on the way into a network."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Images:
    """Labelled images. They may be shared with a cache: read them, never write into them.

    `x`: uint8 [n, c, h, w], 0 to 255; `y`: int64 [n], the domain's own class numbers.
    """

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the two tensors take."""
        return self.x.nbytes + self.y.nbytes


def to_float(x: Tensor) -> Tensor:
    """uint8 of any shape, 0 to 255, as float32 in [-1, 1]: (x / 255 - 0.5) / 0.5."""
    return x.to(torch.float32).div_(127.5).sub_(1.0)


def random_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """A copy of the batch [n, c, h, w] in which each image is mirrored left to right with probability 1/2."""
    mirrored = torch.rand(len(x), generator=generator, device=generator.device) < 0.5
    return torch.where(mirrored.to(x.device)[:, None, None, None], x.flip(-1), x)
