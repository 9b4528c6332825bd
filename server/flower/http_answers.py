"""What our programs take of a Flower server's answers: they follow no redirection, unpack nothing, and read so many bytes.

Flower's own client (1.41) sends a request, with its signature or token, wherever an answer says, and reads all that comes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
from flwr.supercore.protobuf.client import ProtobufClient

from fedloom.conf.errors import plain

MOST_FAILURE = 1 << 16  # bytes of an answer that says that something failed
MOST_TOLD = 200  # letters of where an answer sends on to

_init = ProtobufClient.__init__


class OddAnswerError(httpx.HTTPError):
    """An answer that is not read; the message says why, in one line."""


def be_wary(most: Callable[[str], int] | None = None) -> None:
    """From now on all clients of this process are wary (`wary`)."""

    def init(self: ProtobufClient, *args: Any, **more: Any) -> None:
        _init(self, *args, **more)
        wary(self, most)

    ProtobufClient.__init__ = init  # type: ignore[method-assign]


def wary(client: ProtobufClient, most: Callable[[str], int] | None = None) -> None:
    """Have a client be wary of answers. `most`: bytes of an answer to a path; None: any. It raises OddAnswerError."""

    def look(answer: httpx.Response) -> None:
        where = f"{answer.url.host}:{answer.url.port}{answer.url.path}"
        if 300 <= answer.status_code < 400:
            there = plain(answer.headers.get("location", "nowhere"))[:MOST_TOLD]
            raise OddAnswerError(f"{where} answers {answer.status_code} and sends on to '{there}'; that is not followed")
        if answer.is_error:  # its status says enough, whoever on the way made its body
            answer.headers.pop("content-encoding", None)
            answer.stream = _Bounded(answer.stream, MOST_FAILURE)
            return
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise OddAnswerError(f"{where} answers with a body that is packed; that is not read")
        if most is not None:
            answer.stream = _Bounded(answer.stream, most(answer.url.path), where)

    inner = client._client
    inner.follow_redirects = False
    inner.headers["accept-encoding"] = "identity"
    inner.event_hooks = {"response": [look]}


class _Bounded(httpx.SyncByteStream):
    """A body, up to so many bytes. `where`: who is named if there are more; empty: the rest is left."""

    def __init__(self, stream: Any, most: int, where: str = "") -> None:
        self._stream, self._most, self._where = stream, most, where

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._stream:
            size += len(piece)
            if size > self._most:
                if self._where:
                    raise OddAnswerError(f"{self._where} answers with more than {self._most} bytes; they are not read")
                return
            yield piece

    def close(self) -> None:
        """The rest is not read."""
        self._stream.close()
