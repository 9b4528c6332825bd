"""Convert a tensor to a Flower array (a .npy file) and back, with cached .npy headers.

NumPy takes about 70 microseconds for the header of a .npy file, longer than for the contents of a small layer.
"""

import functools
import io
import math

import numpy as np
import torch
from flwr.app import Array
from numpy.lib import format as npy
from torch import Tensor

MOST_DIMENSIONS = 8  # of shapes whose headers are cached: the sender chooses the shapes
NUMPY = "numpy.ndarray"  # Flower's name for this encoding


def encode(tensor: Tensor) -> Array:
    """Encode a tensor (any shape and device, a dtype of NumPy) with the same bytes as flwr.app.Array."""
    array = tensor.detach().cpu().contiguous().numpy()
    dtype, shape = array.dtype.name, tuple(array.shape)
    return Array(dtype, shape, NUMPY, b"".join((_header(dtype, shape), array.data)))


def decode(array: Array) -> Tensor:
    """Decode a Flower array to a new tensor on the CPU. Raises NumPy's errors for bytes that are not a .npy file."""
    try:
        header = _header(array.dtype, tuple(array.shape)) if len(array.shape) <= MOST_DIMENSIONS else b""
    except TypeError:  # not a NumPy dtype: array.numpy() below raises
        header = b""
    dtype, begin = np.dtype(array.dtype) if header else None, len(header)
    fits = dtype and len(array.data) == begin + dtype.itemsize * math.prod(array.shape)
    if not fits or array.data[:begin] != header:  # another writer's header, or damage
        return torch.from_numpy(array.numpy())
    return torch.from_numpy(np.frombuffer(array.data, dtype, offset=begin).reshape(array.shape).copy())


@functools.lru_cache(maxsize=1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the .npy header for an array in C order."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape})
    return file.getvalue()
