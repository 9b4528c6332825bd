"""A run's connection to Flower's SuperLink (flwr 1.41). A bad message from a node counts as that node's failure only.

Flower's own HttpGrid has three faults. It raises for a reply that it cannot read, which ends the run and loses the replies
that came with it. It waits up to two hours for missing parts. And it trusts a reply's claim which message it answers.
"""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
from flwr.app import Error, Message
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.message_pb2 import Message as MessageInfo
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.supercore.inflatable.inflatable_object import get_object_head_values_from_object_content as head_of
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.retry import RetryInvoker
from flwr.supercore.run import RunNotRunningException
from flwr.superlink.grid.http_grid import HttpGrid

from fedloom.clients.protocol.bundles import bundled_orders, unbundled
from fedloom.clients.protocol.messages import array_bytes
from fedloom.conf.errors import UserError, plain
from fedloom.server.flower.http_answers import wary
from fedloom.server.flower.limits import LEAST_LIMIT, TIMES_SENT
from fedloom.server.flower.unfolding import UnreadableError, by_hash, check_unfolding

SLICE_SECONDS = 1.0  # time for one reply's parts before the next reply's turn
AT_ONCE = 4  # parts to fetch in parallel
MOST_SHOWN = 200  # characters of an error in a message
MOST_REASON = 10_000  # characters of a node's error


@dataclass
class _Coming:
    """An announced reply: the SuperLink's description of it, and the parts that have come."""

    info: MessageInfo
    missing: list[str]
    parts: dict[str, bytes] = field(default_factory=dict)
    confirmed: bool = False

    @property
    def size(self) -> int:
        """The bytes that have come."""
        return sum(map(len, self.parts.values()))


class Patient:
    """Retries requests as Flower does (`own`), and longer while the SuperLink fails (5xx).

    It raises UserError if the SuperLink refuses, or still fails after `wait_seconds`.
    """

    wait_seconds, pause_seconds = 30.0, 1.0

    def __init__(self, own: RetryInvoker, address: str) -> None:
        self._own, self._address, self._left = own, address, self.wait_seconds

    def invoke(self, send: Callable[[], httpx.Response]) -> httpx.Response:
        """Send until there is an answer, and return it. After a long failure, the next call does not wait again."""
        while True:
            try:
                answer = self._own.invoke(send)
                self._left = self.wait_seconds
                return answer
            except RunNotRunningException:
                raise self._error("has ended this run") from None
            except httpx.HTTPError as error:
                status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
                if status < httpx.codes.INTERNAL_SERVER_ERROR or self._left <= 0:
                    problem = f"answers {status}" if status else f"cannot be reached ({plain(str(error))[:MOST_SHOWN]})"
                    raise self._error(problem) from None
            self._left -= self.pause_seconds
            time.sleep(self.pause_seconds)

    def _error(self, problem: str) -> UserError:
        where = "see its log ('fedloom federation logs')"
        return UserError(f"engine.address: the SuperLink at {self._address} {problem}; {where}")


class CarefulGrid(HttpGrid):
    """Flower's grid with checks of replies. Of a reply's metadata, only fields that the SuperLink has checked are used."""

    pause_seconds, held_seconds = 0.25, 0.5  # a server that held a request for so long needs no pause before the next

    def __init__(self, address: str, insecure: bool, certificates: bytes | None, token: str) -> None:
        super().__init__(address, insecure, certificates, token=token)
        self._retry_invoker: Any = Patient(self._retry_invoker, address)
        self._coming: dict[str, _Coming] = {}  # by the id of the message that the reply answers
        self._largest = 0  # bytes of the largest message sent
        self.poll_seconds = self.pause_seconds  # before the next look for replies

    def _connect(self) -> None:
        super()._connect()
        if self._client is not None:
            wary(self._client)

    @classmethod
    def like(cls, grid: HttpGrid) -> "CarefulGrid":
        """Return a careful grid with the connection and run of Flower's grid."""
        careful = cls(grid._addr, grid._insecure, grid._cert, grid._token)
        careful.set_run(grid.run)
        return careful

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages and return their ids. An id is empty if the SuperLink refuses the message: its node is gone."""
        outgoing = list(messages)
        self._largest = max([self._largest, *(array_bytes(message.content) for message in outgoing)])
        ids = list(super().push_messages(bundled_orders(outgoing)))
        return [id or "" for id in ids] if ids else [""] * len(outgoing)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the complete replies to these messages, without waiting.

        A reply that cannot be read becomes an error message.
        """
        wanted, began = set(message_ids), time.monotonic()
        response = self._runtime_client.PullMessages(PullAppMessagesRequest(message_ids=wanted - self._coming.keys()))
        self.poll_seconds = 0.0 if time.monotonic() - began > self.held_seconds else self.pause_seconds
        for info, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            parts = dict.fromkeys(part.object_id for part in iterate_object_tree(tree))
            self._coming[info.metadata.reply_to_message_id] = _Coming(info, list(parts))
        replies = {asked: self._complete(self._coming[asked]) for asked in sorted(wanted & self._coming.keys())}
        self.cancel(asked for asked, reply in replies.items() if reply is not None)
        return [reply for reply in replies.values() if reply is not None]

    def cancel(self, message_ids: Iterable[str]) -> None:
        """Discard the arriving replies to these messages."""
        for message_id in message_ids:
            if (coming := self._coming.pop(message_id, None)) is not None and not coming.confirmed:
                with contextlib.suppress(UserError):  # the next request reports the error
                    self._confirm(coming)

    def _complete(self, coming: _Coming) -> Message | None:
        """Return the reply, or an error message if it cannot be read, or None if parts are still missing."""
        info, limit = coming.info, max(LEAST_LIMIT, TIMES_SENT * self._largest)
        try:
            self._fetch(coming, limit)
        except UnreadableError as error:
            self._confirm(coming)
            return _failed(info, error)
        if coming.missing:
            return None
        self._confirm(coming)
        return received(info, coming.parts, limit)

    def _confirm(self, coming: _Coming) -> None:
        """Let the SuperLink delete a reply that has come or is not wanted."""
        about, coming.confirmed = coming.info.metadata, True
        request = ConfirmMessageReceivedRequest(node=self.node, run_id=about.run_id, message_object_id=about.message_id)
        self._runtime_client.ConfirmMessageReceived(request)

    def _fetch(self, coming: _Coming, limit: int) -> None:
        """Fetch available parts for a while. Raise UnreadableError above `limit` bytes, or if a part is gone."""
        deadline = time.monotonic() + SLICE_SECONDS

        def fetch(part: str) -> bytes | None:
            request = PullObjectRequest(node=self.node, run_id=coming.info.metadata.run_id, object_id=part)
            response = self._runtime_client.PullObject(request)
            if not response.object_found:
                raise UnreadableError("a part of it is gone")
            return response.object_content if response.object_available else None

        with ThreadPoolExecutor(AT_ONCE) as pool:
            # Fetch the first part alone: while a node sends, most parts are missing.
            starts = [0, *range(1, len(coming.missing), AT_ONCE)]
            for start, end in itertools.pairwise([*starts, len(coming.missing)]):
                parts = coming.missing[start:end]
                fetched = {part: content for part, content in zip(parts, pool.map(fetch, parts), strict=True) if content}
                coming.parts |= fetched
                if coming.size > limit:
                    raise UnreadableError(f"it has more than {limit >> 20} MiB")
                if len(fetched) < len(parts) or time.monotonic() > deadline:
                    break
        coming.missing = [part for part in coming.missing if part not in coming.parts]


def received(info: MessageInfo, parts: dict[str, bytes], limit: int) -> Message:
    """Return the message that `read` makes of its parts or, if it cannot be read, an error message with the reason."""
    try:
        return read(info, parts, limit)
    except Exception as error:  # Flower raises many errors for untrusted bytes
        return _failed(info, error)


def read(info: MessageInfo, parts: dict[str, bytes], limit: int) -> Message:
    """Put a message together from its parts (by id), which may unfold to `limit` bytes.

    Raises:
        UnreadableError: The message is too large or holds no records. Flower raises its own errors for malformed parts.
    """
    metadata = metadata_from_proto(info.metadata)
    root, parts = by_hash(info.metadata.message_id, parts)
    check_unfolding(root, parts, limit)
    kinds = [head_of(parts[id])[0] for id in (root, *head_of(parts[root])[1])]
    if kinds not in (["Message"], ["Message", "RecordDict"]):
        raise UnreadableError("it holds no records")
    message: Any = inflate_object_from_contents(root, parts)
    if message.has_error():
        return make_message(metadata, error=Error(message.error.code, str(message.error.reason or "")[:MOST_REASON]))
    return make_message(metadata, content=unbundled(message.content))


def _failed(info: MessageInfo, error: Exception) -> Message:
    problem = str(error) if isinstance(error, UnreadableError) else f"{type(error).__name__}: {error}"
    reason = f"its reply cannot be read ({plain(problem)[:MOST_SHOWN]})"
    return make_message(metadata_from_proto(info.metadata), error=Error(ErrorCode.MESSAGE_UNAVAILABLE, reason))
