"""Convert a user's inputs to one array, and infer their schema."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedloom.clients.data.arrays import CHANNELS, MOST_CHANNELS, as_pixels
from fedloom.clients.data.form import ARRAY, FEATURES, IMAGE, MOST_VOCABULARY, SEQUENCE, TOKENS
from fedloom.clients.data.schema import BYTE, UNIT, WORD, Schema
from fedloom.clients.data.sources import Pixels

DIMENSIONS = {FEATURES: 2, SEQUENCE: 3, TOKENS: 2}  # of a batch
CHOOSE = "Write ?inputs={} behind the path to choose a kind."


def convert(inputs: Any, count: int, kind: str = "") -> tuple[Any, Schema]:
    """Return `count` inputs as one array (images of different sizes: a list), and their schema without a task.

    Args:
        inputs: An array, a nested sequence, or a list of images. Channels of images come last in arrays. In torch tensors
            of 1 or 3 channels they can come first, [n, c, h, w]; the last dimension is then neither 1 nor 3.
        count: The number of targets.
        kind: One of form.KINDS; empty: what the type and shape say.

    Raises:
        ValueError: They are of no kind that fits, or not finite. The message continues "domain PATH ...".
    """
    if len(inputs) != count:
        raise ValueError(f"has {len(inputs)} inputs and {count} targets")
    inputs = _channels_last(inputs, kind)
    if isinstance(inputs, list) and (kind == IMAGE or any(hasattr(item, "convert") for item in inputs[:1])):
        return _images(inputs, count)
    try:
        array = np.asarray(inputs)
    except ValueError:  # images of different sizes
        return _images(inputs, count)
    if 0 in array.shape:
        raise ValueError(f"has inputs of shape {list(array.shape)}: nothing to learn from")
    kind = kind or _kind(array)
    if kind == IMAGE:
        _check_layout(array)
        return _images(array, count)
    if array.ndim != DIMENSIONS.get(kind, array.ndim) or array.ndim < 2:
        raise ValueError(f"has inputs of shape {list(array.shape)}, which are not {kind}. {CHOOSE.format('KIND')}")
    return _tokens(array) if kind == TOKENS else _floats(array, kind)


def _channels_last(inputs: Any, kind: str) -> Any:
    """Return torch images [n, c, h, w] of 1 or 3 channels, also a list of [c, h, w], as [n, h, w, c]; others unchanged.

    Raises ValueError for torch images whose layout is not certain.
    """
    if isinstance(inputs, list | tuple) and inputs and isinstance(first := inputs[0], Tensor) and first.ndim == 3:
        same = all(isinstance(image, Tensor) and image.shape == first.shape for image in inputs)
        inputs = torch.stack(list(inputs)) if same else inputs
    if not isinstance(inputs, Tensor) or inputs.ndim != 4 or not inputs.numel() or kind not in ("", IMAGE):
        return inputs
    if not kind and inputs.is_floating_point() and not (inputs.min() >= 0 and inputs.max() <= 1):
        return inputs  # not images
    channels, height, width = inputs.shape[1:]
    if channels in CHANNELS and width not in CHANNELS:
        return inputs.movedim(1, -1)
    if channels in CHANNELS:
        raise ValueError(f"has images in a tensor of shape {list(inputs.shape)}, in which channels may come first or last; "
                         f"return a NumPy array [n, h, w, c]. {CHOOSE.format('array')}")  # fmt: skip
    if channels < height == width and width not in CHANNELS and channels <= MOST_CHANNELS:
        raise ValueError(f"has images in a tensor of shape {list(inputs.shape)}; channels of images come last, as after "
                         f"x.permute(0, 2, 3, 1). {CHOOSE.format('array')}")  # fmt: skip
    return inputs


def _kind(array: np.ndarray) -> str:
    """Return the kind that an array's type and shape say. Raises ValueError if several kinds fit."""
    whole, shape = array.dtype.kind in "iub", list(array.shape)
    if array.ndim == 2:
        if whole:
            raise ValueError(f"has inputs of whole numbers, {shape}. {CHOOSE.format('tokens')} Use features if they are "
                             "measurements.")  # fmt: skip
        return FEATURES
    if whole or _unit(array):
        _check_layout(array)
    if array.ndim == 4 and array.shape[-1] <= MOST_CHANNELS and (whole or _unit(array)):
        return IMAGE
    if array.ndim == 3 and (whole or _unit(array)):
        return IMAGE
    if array.ndim in (3, 4) and array.dtype.kind == "f":
        low, high = np.nanmin(array), np.nanmax(array)
        kinds, way = (
            "sequence" if array.ndim == 3 else "array",
            "use (x + 1) / 2" if -1 <= low < high <= 1 else "divide them",
        )
        raise ValueError(f"has {array.dtype} inputs {shape} with values from {low:g} to {high:g}; images take values from "
                         f"0 to 1: {way}, if these are images. {CHOOSE.format(kinds)}")  # fmt: skip
    return ARRAY


def _check_layout(array: np.ndarray) -> None:
    """Raise ValueError for images whose 1 or 3 channels come first."""
    if array.ndim == 4 and array.shape[1] in CHANNELS and array.shape[3] > 4:
        raise ValueError(f"has inputs of shape {list(array.shape)}; channels of images come last, as after "
                         f"x.transpose(0, 2, 3, 1). {CHOOSE.format('array')}")  # fmt: skip


def _unit(array: np.ndarray) -> bool:
    return array.dtype.kind == "f" and array.size > 0 and bool(array.min() >= 0 and array.max() <= 1)


def _images(images: Any, count: int) -> tuple[Any, Schema]:
    pixels = as_pixels(images, count)
    return pixels, Schema(levels=levels_of(pixels))


def levels_of(pixels: Any) -> int:
    """Return the brightest level of images: of an array, or the highest of a list's."""
    kinds = {pixels.dtype} if isinstance(pixels, np.ndarray) else {image.dtype for image in pixels}
    if np.dtype(np.float32) in kinds:
        return UNIT
    return WORD if np.dtype(np.uint16) in kinds else BYTE


def _tokens(array: np.ndarray) -> tuple[np.ndarray, Schema]:
    if array.dtype.kind not in "iu" or array.min() < 0 or array.max() >= MOST_VOCABULARY:
        raise ValueError(f"has tokens of the type {array.dtype}, from {array.min()} to {array.max()}; takes whole numbers "
                         "from 0 (padding) on")  # fmt: skip
    return array.astype(np.int64), Schema(TOKENS, shape=array.shape[1:], vocabulary=int(array.max()) + 1)


def _floats(array: np.ndarray, kind: str) -> tuple[Pixels, Schema]:
    if array.dtype.kind not in "fiub":
        raise ValueError(f"has inputs of the type {array.dtype}; takes numbers")
    numbers = array.astype(np.float32)
    if not np.isfinite(numbers).all():
        odd = int((~np.isfinite(numbers)).any(axis=tuple(range(1, array.ndim))).sum())
        raise ValueError(f"has {odd} inputs with missing or infinite values; fill them in, or leave these inputs out")
    return numbers, Schema(kind, shape=array.shape[1:])
