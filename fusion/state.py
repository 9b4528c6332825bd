"""States (the tensors of a network by name), their digest, and the layers with running statistics."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

State = dict[str, Tensor]

BATCH_NORM = nn.modules.batchnorm._BatchNorm  # in one, two or three dimensions


def flat(state: Mapping[str, Tensor]) -> Tensor:
    """Return all entries of a state as one float64 vector on the CPU."""
    parts = [tensor.detach().cpu().flatten() for tensor in state.values()]
    if len({part.dtype for part in parts}) == 1:
        return torch.cat(parts).double()
    return torch.cat([torch.empty(0, dtype=torch.float64), *(part.double() for part in parts)])


def moved_back(state: Mapping[str, Tensor], initial: Mapping[str, Tensor], share: float) -> State:
    """Return `state`, moved by a share of the way (0 to 1) to the `initial` one. Integer tensors stay unchanged."""
    return {
        name: torch.lerp(tensor, initial[name], share) if tensor.is_floating_point() else tensor
        for name, tensor in state.items()
    }


def digest(state: Mapping[str, Tensor]) -> str:
    """Return the sha256 of names (sorted), dtypes, shapes and little-endian contents; equal only for equal states."""
    total = hashlib.sha256()
    for name in sorted(state):
        array = state[name].detach().cpu().contiguous().numpy()
        total.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        total.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return total.hexdigest()
