"""Pack contributions in half their bytes: as bfloat16, or as int16 with a scale for each tensor (federation.packed).

The server sums exactly the packed values. The site keeps the packed values too.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from torch import Tensor

from fedloom.clients.protocol.codec import decode, decode_flat, encode, encode_flat
from fedloom.fusion.flat import flat_of
from fedloom.fusion.state import State

NONE = "none"
STEPS = 2**15 - 1  # of an int16's magnitude
SCALE = struct.Struct("<d")


@dataclass(frozen=True)
class Packing:
    """An encoding of a float32 tensor of any shape. `error`: the largest rounding error, as text for people."""

    pack: Callable[[Tensor], bytes]
    unpack: Callable[[bytes], Tensor]  # float32, one dimension
    head: int  # bytes before two for each entry
    error: str


def _to_int16(tensor: Tensor) -> bytes:
    scale = float(tensor.abs().max()) / STEPS if tensor.numel() else 0.0
    integers = (tensor.double() / scale).round().clamp(-STEPS, STEPS) if scale else torch.zeros_like(tensor)
    return SCALE.pack(scale) + integers.to(torch.int16).numpy().tobytes()


def _from_int16(data: bytes) -> Tensor:
    (scale,) = SCALE.unpack_from(data)
    if not 0.0 <= scale < math.inf:
        raise ValueError("the tensor's scale is not a finite number")
    return (_words(data[SCALE.size :]).double() * scale).float()


def _to_bfloat16(tensor: Tensor) -> bytes:
    return tensor.to(torch.bfloat16).view(torch.int16).numpy().tobytes()


def _from_bfloat16(data: bytes) -> Tensor:
    return _words(data).view(torch.bfloat16).float()


PACKINGS = {
    "bf16": Packing(_to_bfloat16, _from_bfloat16, 0, "each entry is off by at most 1/256 of itself"),
    "int16": Packing(_to_int16, _from_int16, SCALE.size, "each entry is off by at most 1/65,534 of its tensor's largest"),
}
"""Packings by name. Both round to the nearest value, so the same network gives the same bytes everywhere. For finite x:

bf16: |x' - x| <= 2^-8 |x| + 2^-134. int16: |x' - x| <= (1/65534 + 2^-24) max|x| + 2^-149, the maximum over the tensor.
"""


def packed(state: Mapping[str, Tensor], name: str) -> ArrayRecord:
    """Pack a state's float32 tensors by packing `name` into a Flower record; those that would become infinite stay whole."""
    if name == NONE and (whole := flat_of(state)) is not None:
        return encode_flat(whole)
    return ArrayRecord({key: _packed(tensor.detach().cpu(), name) for key, tensor in state.items()})


def unpacked(record: ArrayRecord) -> State:
    """Return the state in a Flower record, packed or not. Raises ValueError for bytes of neither form."""
    return decode_flat(record) or {key: _unpacked(array) for key, array in record.items()}


def as_sent(own: State, contribution: Mapping[str, State], sent: Mapping[str, ArrayRecord]) -> State:
    """Return a site's state `own`, with the tensors that the server received replaced by their unpacked values.

    `sent`: the contribution, packed.
    """
    record_of = {
        name: record
        for record, state in contribution.items()
        for name, tensor in state.items()
        if name in own and torch.equal(own[name], tensor)
    }
    return {**own, **{name: _unpacked(sent[record][name]) for name, record in record_of.items()}}


def _packed(tensor: Tensor, name: str) -> Array:
    if name == NONE or tensor.dtype != torch.float32:
        return encode(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)
    packing = PACKINGS[name]
    data = packing.pack(tensor.contiguous().flatten()) if bool(tensor.isfinite().all()) else b""
    if not data or not bool(packing.unpack(data).isfinite().all()):
        return encode(tensor)
    return Array("float32", tuple(tensor.shape), name, data)


def _unpacked(array: Array) -> Tensor:
    packing = PACKINGS.get(array.stype)
    if packing is None:
        return decode(array)
    if not all(isinstance(size, int) and size >= 0 for size in array.shape) or array.dtype != "float32":
        raise ValueError("a packed tensor has no valid shape, or is not float32")
    if len(array.data) != packing.head + 2 * math.prod(array.shape):
        raise ValueError(f"a packed tensor of shape {list(array.shape)} has {len(array.data)} bytes")
    return packing.unpack(array.data).reshape(array.shape)


def _words(data: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, "<i2").copy())
