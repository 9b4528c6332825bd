"""Conversion of images: channels, size, rotation, inversion. Pure functions on tensors."""

import math
from collections.abc import Iterable, Iterator
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedloom.clients.data.sources import Pixels

CHUNK = 2000  # images converted to float at once
STACK = 2**23  # bytes of images of different sizes, stacked at once
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


def render(pixels: Pixels | Iterable[Pixels], size: int, grey: bool, rotation: float = 0.0, invert: bool = False) -> Tensor:
    """Convert uint8 [n, h, w] or [n, h, w, 3], or images of different sizes, to uint8 [n, c, size, size].

    The order is: channels (luma by ITU-R BT.601, or grey repeated three times), bilinear resizing with antialiasing,
    rotation (degrees, counter-clockwise), one rounding, and inversion (255 - x).
    """
    if not isinstance(pixels, np.ndarray):
        parts = [render(stack, size, grey, rotation, invert) for stack in _stacked(pixels)]
        return torch.cat(parts) if parts else render(np.empty((0, 1, 1), np.uint8), size, grey)
    chunks = [
        _render(torch.from_numpy(np.array(pixels[start : start + CHUNK])), size, grey, rotation, invert)
        for start in range(0, max(len(pixels), 1), CHUNK)
    ]
    return torch.cat(chunks)


def _stacked(images: Iterable[Pixels]) -> Iterator[Pixels]:
    """Stack successive images of the same shape, at most STACK bytes at once."""
    for shape, same in groupby(images, key=np.shape):
        while some := list(islice(same, max(1, STACK // math.prod(shape)))):
            yield np.stack(some)


def _render(pixels: Tensor, size: int, grey: bool, rotation: float, invert: bool) -> Tensor:
    x = pixels[..., None] if pixels.ndim == 3 else pixels
    x = x.permute(0, 3, 1, 2).to(torch.float32)
    if grey and x.shape[1] == 3:
        x = torch.einsum("nchw,c->nhw", x, torch.tensor(LUMA))[:, None]
    if x.shape[-2:] != (size, size) and len(x):
        x = functional.interpolate(x, (size, size), mode="bilinear", antialias=True, align_corners=False)
    x = rotate(x, rotation) if len(x) else x.new_empty(0, x.shape[1], size, size)
    x = x.round_().clamp_(0, 255).to(torch.uint8)
    x = 255 - x if invert else x
    return x if grey or x.shape[1] == 3 else x.expand(-1, 3, -1, -1).contiguous()


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Rotate square images, float32 [n, c, s, s], counter-clockwise about the centre: bilinear, 0 outside."""
    if degrees % 360 == 0:
        return x
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]])
    grid = functional.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
