"""Conversion of images: channels, size, rotation, inversion. Pure functions on tensors."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fedloom.clients.data.schema import BYTE, UNIT, WORD
from fedloom.clients.data.sources import Pixels

CHUNK = 2000  # images converted to float at once
STACK = 2**23  # bytes of images of different sizes, stacked at once
LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601


TOPS = {np.dtype(np.uint8): BYTE, np.dtype(np.uint16): WORD}  # the brightest level of a type


@dataclass(frozen=True)
class Change:
    """What `render` does to images.

    Attributes:
        size: Height and width of the result; None: as they are.
        grey: True: RGB becomes one channel. False: one channel is repeated three times.
        rotation: In degrees, counter-clockwise.
        invert: Black becomes white.
        levels: BYTE: the result is uint8. WORD or UNIT: it is float32 from -1 to 1, without rounding.
        white: WORD: the level that becomes 1.
    """

    size: tuple[int, int] | None
    grey: bool
    rotation: float = 0.0
    invert: bool = False
    levels: int = BYTE
    white: int = WORD


def render(pixels: Pixels | Iterable[Pixels], change: Change) -> Tensor:
    """Convert images [n, h, w] or [n, h, w, c] of uint8, uint16 or float32, or images of different sizes, to [n, c, h, w].

    The order is: channels (luma by ITU-R BT.601, or grey repeated three times), bilinear resizing with antialiasing,
    rotation, one rounding (uint8 only), and inversion.
    """
    if not isinstance(pixels, np.ndarray):
        parts = [render(stack, change) for stack in _stacked(pixels)]
        return torch.cat(parts) if parts else render(np.empty((0, 1, 1), np.uint8), change)
    chunks = [
        _render(torch.from_numpy(_widened(pixels[start : start + CHUNK])), TOPS.get(pixels.dtype, UNIT), change)
        for start in range(0, max(len(pixels), 1), CHUNK)
    ]
    return torch.cat(chunks)


def _widened(pixels: Pixels) -> Pixels:
    """Return a copy in a type that torch can convert to float32."""
    return np.array(pixels, np.int32 if pixels.dtype == np.uint16 else pixels.dtype)


def _stacked(images: Iterable[Pixels]) -> Iterator[Pixels]:
    """Stack successive images of the same shape, at most STACK bytes at once."""
    for (shape, _), same in groupby(images, key=lambda image: (np.shape(image), image.dtype)):
        while some := list(islice(same, max(1, STACK // math.prod(shape)))):
            yield np.stack(some)


def _render(pixels: Tensor, top: int, change: Change) -> Tensor:
    x = pixels[..., None] if pixels.ndim == 3 else pixels
    x = x.permute(0, 3, 1, 2).to(torch.float32)
    if change.grey and x.shape[1] == 3:
        x = torch.einsum("nchw,c->nhw", x, torch.tensor(LUMA))[:, None]
    size = change.size or tuple(x.shape[-2:])
    if x.shape[-2:] != size and len(x):
        x = functional.interpolate(x, size, mode="bilinear", antialias=True, align_corners=False)
    x = rotate(x, change.rotation) if len(x) else x.new_empty(0, x.shape[1], *size)
    x = _levelled(x, top, change)
    return x if change.grey or x.shape[1] != 1 else x.expand(-1, 3, -1, -1).contiguous()


def _levelled(x: Tensor, top: int, change: Change) -> Tensor:
    """Return pixels from 0 to `top` as uint8, or as float32 from -1 to 1; inverted, if the change says so."""
    if change.levels == BYTE:
        x = x.round_().clamp_(0, BYTE).to(torch.uint8)
        return BYTE - x if change.invert else x
    x = x.div_((change.white if top == WORD else top) / 2).sub_(1.0).clamp_(-1.0, 1.0)
    return -x if change.invert else x


def rotate(x: Tensor, degrees: float) -> Tensor:
    """Rotate images, float32 [n, c, h, w], counter-clockwise about the centre: bilinear, 0 outside."""
    if degrees % 360 == 0:
        return x
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    high = x.shape[-2] / x.shape[-1]
    turn = torch.tensor([[cosine, -sine * high, 0.0], [sine / high, cosine, 0.0]])
    grid = functional.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return functional.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
