"""Parts of replies under secure aggregation: bytes for other sites, and vectors that look drawn at random."""

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

MOST_SEALED = 256  # bytes of a share that is sealed


def content_of(received: "RawReply") -> RecordDict:
    """What a site has answered. ReplyError if it has not."""
    if received.content is None:
        raise ReplyError(received.reason)
    return received.content


def read(received: "RawReply") -> dict[str, State]:
    content = content_of(received)
    try:
        return to_states(content)
    except Exception as error:  # bytes from outside: NumPy raises EOFError, BadZipFile and more
        raise ReplyError(f"its arrays cannot be read ({error})") from None


def read_bytes(state: State, name: str, size: int = 0) -> bytes:
    """The bytes under a name. ReplyError for what is none, or of another size."""
    one = state.get(name)
    good = (
        one is not None
        and one.dtype == torch.uint8
        and one.ndim == 1
        and len(one) in ((size,) if size else range(MOST_SEALED))
    )
    if one is None or not good:
        raise ReplyError("its part of secure aggregation cannot be read")
    return bytes(one.numpy())


def to_tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def read_vector(state: State | None, record: str, like: Mapping[str, Tensor]) -> Tensor:
    """A masked record: int64, as long as what is under it. ReplyError for anything else."""
    size = sum(tensor.numel() for tensor in like.values())
    vector = (state or {}).get(MASKED)
    if vector is None or len(state or {}) != 1 or vector.dtype != torch.int64 or vector.shape != (size,):
        raise ReplyError(f"record '{record}' is no masked vector of {size} whole numbers")
    return vector.clone()


def shaped(vector: Tensor, like: Mapping[str, Tensor]) -> State:
    """The inverse of clients.privacy.secure_aggregation.contribution.flat, for the shapes of `like`."""
    names = sorted(like)
    parts = vector.split([like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}
