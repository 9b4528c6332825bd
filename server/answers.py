"""What our programs take of a Flower server's answers: they follow no redirection, unpack nothing, and read so many bytes.

Flower's own client (1.41) sends a request, with its signature or token, wherever an answer says, and reads all that comes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
from flwr.supercore.protobuf.client import ProtobufClient

from conf.errors import plain

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
        where, size = f"{answer.url.host}:{answer.url.port}{answer.url.path}", answer.headers.get("content-length", "0")
        if 300 <= answer.status_code < 400:
            there = plain(answer.headers.get("location", "nowhere"))[:MOST_TOLD]
            raise OddAnswerError(f"{where} answers {answer.status_code} and sends on to '{there}'; that is not followed")
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise OddAnswerError(f"{where} answers with a body that is packed; that is not read")
        if most is not None:
            answer.stream = _Bounded(answer.stream, most(answer.url.path), int(size) if size.isdigit() else 0, where)

    inner = client._client
    inner.follow_redirects = False
    inner.headers["accept-encoding"] = "identity"
    inner.event_hooks = {"response": [look]}


class _Bounded(httpx.SyncByteStream):
    """A body, up to so many bytes."""

    def __init__(self, stream: Any, most: int, announced: int, where: str) -> None:
        self._stream, self._most, self._where = stream, most, where
        self._check(announced)

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._stream:
            size += len(piece)
            self._check(size)
            yield piece

    def _check(self, size: int) -> None:
        if size > self._most:
            raise OddAnswerError(f"{self._where} answers with more than {self._most} bytes; they are not read")

    def close(self) -> None:
        """The rest is not read."""
        self._stream.close()
