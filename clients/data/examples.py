"""Examples with their targets, and the conversion of inputs for a network."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Examples:
    """Examples with their targets. A cache may share them, so never write into them.

    Attributes:
        x: Inputs: uint8 [n, c, h, w], 0 to 255, or float32 [n, c, h, w], -1 to 1, for images; float32 [n, ...] for features,
            sequences and arrays; int64 [n, t] for tokens.
        y: Targets, as schema.Schema says: the domain's own class numbers, int64 [n], or numbers or next tokens.
    """

    x: Tensor
    y: Tensor

    def __repr__(self) -> str:
        shown = (f"{name}: {str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for name, each in vars(self).items())
        return f"Examples({', '.join(shown)})"

    def __len__(self) -> int:
        return len(self.y)

    @property
    def nbytes(self) -> int:
        """Size of the two tensors in bytes."""
        return self.x.nbytes + self.y.nbytes


def to_float(x: Tensor) -> Tensor:
    """Convert uint8 of any shape, 0 to 255, to float32 in [-1, 1]: (x / 255 - 0.5) / 0.5. Other types stay as they are."""
    return x.to(torch.float32).div_(127.5).sub_(1.0) if x.dtype == torch.uint8 else x


def random_flip(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return a copy of the batch [n, c, h, w] with each image mirrored left to right with probability 1/2."""
    mirrored = torch.rand(len(x), generator=generator, device=generator.device) < 0.5
    return torch.where(mirrored.to(x.device)[:, None, None, None], x.flip(-1), x)
