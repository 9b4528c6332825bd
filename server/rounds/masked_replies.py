"""Parts of replies under secure aggregation: encrypted bytes for other sites, and vectors that look random."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from flwr.app import RecordDict
from torch import Tensor

from fedloom.clients.protocol.messages import MASKED, to_states
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.fusion.state import State

if TYPE_CHECKING:
    from fedloom.server.rounds.channel import RawReply

MOST_SEALED = 256  # bytes of an encrypted share


def content_of(received: "RawReply") -> RecordDict:
    """Return the content of a site's answer. Raises ReplyError if the site has not answered."""
    if received.content is None:
        raise ReplyError(received.reason)
    return received.content


def read(received: "RawReply") -> dict[str, State]:
    """Return the states in a site's answer, by record name. Raises ReplyError if they cannot be read."""
    content = content_of(received)
    try:
        return to_states(content)
    except Exception as error:  # bytes from outside: NumPy raises EOFError, BadZipFile and more
        raise ReplyError(f"its arrays cannot be read ({error})") from None


def read_bytes(state: State, name: str, size: int = 0) -> bytes:
    """Return a uint8 tensor of a record as bytes. Raises ReplyError unless it has `size` bytes (0: under MOST_SEALED)."""
    tensor = state.get(name)
    good = (
        tensor is not None
        and tensor.dtype == torch.uint8
        and tensor.ndim == 1
        and len(tensor) in ((size,) if size else range(MOST_SEALED))
    )
    if tensor is None or not good:
        raise ReplyError("its message for secure aggregation cannot be read")
    return bytes(tensor.numpy())


def to_tensor(content: bytes) -> Tensor:
    """Return bytes as a uint8 tensor."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_vector(state: State | None, record: str, like: Mapping[str, Tensor]) -> Tensor:
    """Return a copy of a masked record: int64, as long as the tensors of `like` together. Raises ReplyError otherwise."""
    size = sum(tensor.numel() for tensor in like.values())
    vector = (state or {}).get(MASKED)
    if vector is None or len(state or {}) != 1 or vector.dtype != torch.int64 or vector.shape != (size,):
        raise ReplyError(f"record '{record}' must be a masked vector of {size} whole numbers")
    return vector.clone()


def shaped(vector: Tensor, like: Mapping[str, Tensor]) -> State:
    """Divide a vector into tensors with the names and shapes of `like`.

    The inverse of clients.privacy.secure_aggregation.contribution.flat.
    """
    names = sorted(like)
    parts = vector.split([like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}
