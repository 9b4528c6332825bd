"""One tensor as a Flower array and back. The bytes are Flower's own (a .npy file), written and read without parsing it.

NumPy takes some 70 microseconds to write or read the header of a .npy file, more than the contents of a small layer take.
"""

import functools
import io
import math

import numpy as np
import torch
from flwr.app import Array
from numpy.lib import format as npy
from torch import Tensor

MOST_DIMENSIONS = 8  # of shapes whose headers are remembered: whoever sends them may choose them
NUMPY = "numpy.ndarray"  # Flower's name for this encoding


def encode(tensor: Tensor) -> Array:
    """The tensor (any shape and device, a dtype that NumPy has) as flwr.app.Array makes it, byte for byte."""
    array = tensor.detach().cpu().contiguous().numpy()
    dtype, shape = array.dtype.name, tuple(array.shape)
    return Array(dtype, shape, NUMPY, b"".join((_header(dtype, shape), array.data)))


def decode(array: Array) -> Tensor:
    """The tensor, on the CPU, with memory of its own. Raises what NumPy raises for bytes that are no .npy file."""
    try:
        header = _header(array.dtype, tuple(array.shape)) if len(array.shape) <= MOST_DIMENSIONS else b""
    except TypeError:  # no dtype of NumPy's: it will say so
        header = b""
    dtype, begin = np.dtype(array.dtype) if header else None, len(header)
    fits = dtype and len(array.data) == begin + dtype.itemsize * math.prod(array.shape)
    if not fits or array.data[:begin] != header:  # another writer's header, or damage
        return torch.from_numpy(array.numpy())
    return torch.from_numpy(np.frombuffer(array.data, dtype, offset=begin).reshape(array.shape).copy())


@functools.lru_cache(maxsize=1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """What np.save writes before the contents of an array in C order."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape})
    return file.getvalue()
