"""Convert a tensor to a Flower array (a .npy file) and back, with cached .npy headers.

NumPy takes about 70 microseconds for the header of a .npy file, longer than for the contents of a small layer.
"""

import functools
import io
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib import format as npy
from torch import Tensor

from fedloom.fusion.flat import FlatState, copy_of, flat_of, layout_of_shapes
from fedloom.fusion.state import State

MOST_DECODED, MOST_BYTES = 2, 16 * 2**20  # decoded records that a thread holds, and bytes of each
MOST_DIMENSIONS = 8  # of shapes whose headers are cached: the sender chooses the shapes
NUMPY = "numpy.ndarray"  # Flower's name for this encoding
FLAT = {"float32", "int64"}  # types of states whose tensors share one vector


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


def encode_flat(state: FlatState) -> ArrayRecord:
    """Encode a flat state's tensors with the same bytes as `encode`."""
    array, arrays, begin = state.vector.contiguous().numpy(), ArrayRecord(), 0
    dtype = array.dtype.name
    for (name, shape), size in zip(state.layout.shapes, state.layout.sizes, strict=True):
        arrays[name] = Array(dtype, shape, NUMPY, b"".join((_header(dtype, shape), array[begin : begin + size].data)))
        begin += size
    return arrays


def decode_flat(arrays: Mapping[str, Array]) -> FlatState | None:
    """Decode float32 or int64 arrays, all of one type and with headers as `encode` writes them; None: they are not."""
    dtypes = {array.dtype for array in arrays.values()}
    if len(dtypes) != 1 or not dtypes <= FLAT or any(not _usual(array) for array in arrays.values()):
        return None
    layout = layout_of_shapes(tuple(sorted((name, tuple(array.shape)) for name, array in arrays.items())))
    vector, begin = np.empty(sum(layout.sizes), dtypes.pop()), 0
    for (name, shape), size in zip(layout.shapes, layout.sizes, strict=True):
        data = arrays[name].data
        vector[begin : begin + size] = np.frombuffer(data, vector.dtype, offset=len(_header(vector.dtype.name, shape)))
        begin += size
    return layout.state(torch.from_numpy(vector))


class _Decoded(threading.local):
    """The records that this thread has decoded last, by the identity of their bytes, which they hold."""

    def __init__(self) -> None:
        self.states: OrderedDict[tuple[object, ...], tuple[list[Any], FlatState]] = OrderedDict()


_decoded = _Decoded()


def decode_again(record: ArrayRecord, decoder: Callable[[ArrayRecord], State]) -> State:
    """Decode a record, or copy what it was decoded to if its bytes are those of a record that was decoded before.

    `decoder`: how to decode it otherwise.
    """
    held = [getattr(array.data, "obj", array.data) for array in record.values()]
    if any(memoryview(data).nbytes != len(array.data) for data, array in zip(held, record.values(), strict=True)):
        return decoder(record)  # parts of longer buffers, which their identity does not tell apart
    kinds = ((name, array.dtype, array.stype, tuple(array.shape)) for name, array in record.items())
    key = tuple(zip(kinds, map(id, held), strict=True))
    if (known := _decoded.states.get(key)) is not None:
        return copy_of(known[1])
    state = decoder(record)
    if (whole := flat_of(state)) is not None and whole.vector.nbytes <= MOST_BYTES:
        _decoded.states[key] = held, whole
        while len(_decoded.states) > MOST_DECODED:
            _decoded.states.popitem(last=False)
        return copy_of(whole)
    return state


def _usual(array: Array) -> bool:
    """Return whether an array has the header that `encode` writes, and as many bytes as its shape says."""
    shape = tuple(array.shape)
    if array.stype != NUMPY or len(shape) > MOST_DIMENSIONS or not all(type(size) is int and size >= 0 for size in shape):
        return False
    if math.prod(max(1, size) for size in shape) * np.dtype(array.dtype).itemsize >= 2**63:  # NumPy refuses it
        return False
    header = _header(array.dtype, shape)
    size = len(header) + np.dtype(array.dtype).itemsize * math.prod(shape)
    return len(array.data) == size and array.data[: len(header)] == header  # bytes or a memoryview


@functools.lru_cache(maxsize=1024)
def _header(dtype: str, shape: tuple[int, ...]) -> bytes:
    """Return the .npy header for an array in C order."""
    file = io.BytesIO()
    npy.write_array_header_1_0(file, {"descr": npy.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape})
    return file.getvalue()
