"""Limits for a Flower server's answers: no redirects, no compression, a bounded size.

Without them, Flower's client (1.41) sends a request, with its signature or token, wherever an answer redirects it. It also
reads answers of any size.
"""

from collections.abc import Callable, Iterator
from typing import Any

import httpx
from flwr.supercore.protobuf.client import ProtobufClient

from fedloom.conf.errors import plain

MOST_FAILURE = 1 << 16  # bytes of an error answer
MOST_SHOWN = 200  # characters of a redirect's target in a message

_init = ProtobufClient.__init__


class OddAnswerError(httpx.HTTPError):
    """An answer that is rejected unread. The message gives the reason in one line."""


def be_wary(most: Callable[[str], int] | None = None) -> None:
    """Limit the answers to all clients that this process creates from now on, as `wary` does."""

    def init(self: ProtobufClient, *args: Any, **more: Any) -> None:
        _init(self, *args, **more)
        wary(self, most)

    ProtobufClient.__init__ = init  # type: ignore[method-assign]


def wary(client: ProtobufClient, most: Callable[[str], int] | None = None) -> None:
    """Make a client reject redirects, compressed answers and large answers.

    The client then raises OddAnswerError.

    Args:
        client: The client.
        most: Returns the largest number of bytes of an answer to a path. None: no limit.
    """

    def look(answer: httpx.Response) -> None:
        where = f"{answer.url.host}:{answer.url.port}{answer.url.path}"
        if 300 <= answer.status_code < 400:
            target = plain(answer.headers.get("location", "nowhere"))[:MOST_SHOWN]
            raise OddAnswerError(f"{where} answers {answer.status_code} and redirects to '{target}', which is not followed")
        if answer.is_error:  # the status is enough; a proxy may have written the body
            answer.headers.pop("content-encoding", None)
            answer.stream = _Bounded(answer.stream, MOST_FAILURE)
            return
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise OddAnswerError(f"{where} answers with a compressed body, which is not read")
        if most is not None:
            answer.stream = _Bounded(answer.stream, most(answer.url.path), where)

    inner = client._client
    inner.follow_redirects = False
    inner.headers["accept-encoding"] = "identity"
    inner.event_hooks = {"response": [look]}


class _Bounded(httpx.SyncByteStream):
    """A body of at most `most` bytes. More bytes raise an error that names `where`, or are skipped if it is empty."""

    def __init__(self, stream: Any, most: int, where: str = "") -> None:
        self._stream, self._most, self._where = stream, most, where

    def __iter__(self) -> Iterator[bytes]:
        size = 0
        for piece in self._stream:
            size += len(piece)
            if size > self._most:
                if self._where:
                    raise OddAnswerError(f"{self._where} answers with more than {self._most} bytes; that is not read")
                return
            yield piece

    def close(self) -> None:
        """Close the stream without reading the rest."""
        self._stream.close()
