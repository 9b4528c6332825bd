"""The doors of a federation's ports: the server's for nodes, the server's for its owner, and a node's for its programs.

Flower (1.41) answers everything at one port, so that anyone who reaches it can start runs, and admit or remove nodes. Here
each door answers only its own paths, and identifies the caller before it reads a body. `bodies.py` bounds the bytes,
`connections.py` the callers.
"""

import base64
import binascii
import datetime
import hmac
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.auth.superexec import compute_superexec_signature, derive_auth_secret
from flwr.supercore.constant import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    SUPEREXEC_AUTH_BODY_SHA256_HEADER,
    SUPEREXEC_AUTH_NONCE_HEADER,
    SUPEREXEC_AUTH_SIGNATURE_HEADER,
    SUPEREXEC_AUTH_TIMESTAMP_HEADER,
    TASK_TOKEN_HEADER,
)
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fedloom.sims.federation.bodies import (
    LARGEST_PART,
    MOST_BYTES,
    MOST_SHARE,
    SMALL,
    UNFOLDS,
    Answered,
    Full,
    Measured,
    Room,
)
from fedloom.sims.federation.connections import Crowd
from fedloom.sims.federation.long_polling import REPLIES_SECONDS, Signals, Wait, held

ORDERS = "/v1/fleet/pull-messages"  # path for a node's next order
FLEET = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "activate-node",
        "deactivate-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)  # paths for nodes
CONTROL = "/v1/control/"  # path prefix for the commands that start runs
START = "/v1/control/start-run"
ACQUIRE = "/v1/runtime/acquire-task"  # path for the executor
REPLIES = "/v1/runtime/pull-messages"  # path for a run's replies
RUNTIME = frozenset(
    f"/v1/runtime/{name}"
    for name in (
        "send-task-heartbeat",
        "pull-task-input",
        "push-task-output",
        "push-object",
        "pull-object",
        "confirm-message-received",
        "push-logs",
        "push-messages",
        "pull-messages",
        "get-nodes",
    )
)  # paths for ServerApps and ClientApps
OF_BYTES = "/push-object"  # its bodies are plain bytes
OF_NODES = {
    "/v1/fleet/push-object": LARGEST_PART,
    "/v1/fleet/push-messages": 2 << 20,
}  # most bytes of a body; other paths: SMALL
OF_OWN = {
    START: 32 << 20,  # Flower's limit for an app's bundle is 10 MB
    "/v1/runtime/push-object": LARGEST_PART,
    "/v1/runtime/push-messages": MOST_BYTES,  # the heads of a round's orders, with the ids of their parts
    REPLIES: 4 << 20,  # ids of orders
    "/v1/runtime/push-task-output": MOST_BYTES,  # with the app's state
    "/v1/runtime/push-logs": 16 << 20,
}
NODE: ContextVar[int | None] = ContextVar("node", default=None)  # the caller of the current request; None: not a node
HOST = [(b"host", b"superlink")]  # replaces the caller's header; no answer depends on it
NO_NEWS = Response(b"", media_type=PROTOBUF_MEDIA_TYPE)  # an empty message: no order, task or reply
Admission = tuple[int, int | None]
TASK, REPLY = "task", "reply"  # news that executors and ServerApps wait for


@dataclass(frozen=True)
class Door:
    """An ASGI application that admits requests to another one. It refuses others without reading their bodies.

    Attributes:
        app: The application that receives admitted requests.
        admits: Returns the HTTP status of a refusal for a path and its headers (0 admits the request), and the node that
            sent it, or None. It may block.
        largest: By path, the largest body in bytes. Other paths: SMALL.
        wary: Whether to count bodies with the memory that their content may need.
        crowd: Counts connections.
        room: Counts the memory of bodies.
        waits: Returns what a request at a path, with headers, from a node waits for; None: it does not wait.
        done: Called after each answered request, with its path.
    """

    app: ASGIApp
    admits: Callable[[str, Mapping[bytes, bytes]], Admission]
    largest: Mapping[str, int] = field(default_factory=dict)
    wary: bool = False
    crowd: Crowd = field(default_factory=Crowd)
    room: Room = field(default_factory=Room)
    waits: Callable[[str, Mapping[bytes, bytes], int | None], Wait | None] = lambda path, headers, node: None
    done: Callable[[str], None] = lambda path: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        status, node = await self._admission(scope)
        if not status:
            self.crowd.known(scope["client"], node)
            try:
                return await self._pass_on(node, scope, receive, send)
            except Full:
                status = 503  # Flower's programs try again
        return await PlainTextResponse("", status, {"connection": "close"})(scope, receive, send)

    async def _pass_on(self, node: int | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the application answer. Raises Full, before it reads the body, if the room is full."""
        headers = dict(scope["headers"])
        size = int(headers[b"content-length"])
        others = [(name, content) for name, content in scope["headers"] if name != b"host"]
        times = UNFOLDS if self.wary and not scope["path"].endswith(OF_BYTES) else 1
        async with self.room.held(node, size, times) as grow:
            body: Receive | None = Measured(receive, size)
            if wait := self.waits(scope["path"], headers, node):
                body = await held(wait, body)
            if body is None:
                return await NO_NEWS(scope, receive, send)
            token = NODE.set(node)
            try:
                await self.app({**scope, "headers": HOST + others}, body, Answered(send, grow))
            finally:
                NODE.reset(token)
                self.done(scope["path"])

    async def _admission(self, scope: Scope) -> Admission:
        """Return the status of a refusal, before the body is read, or 0; and the node that sent the request."""
        if scope["method"] != "POST" or scope["query_string"] or scope["raw_path"] != scope["path"].encode():
            return 404, None
        headers = dict(scope["headers"])
        if len(headers) != len(scope["headers"]):
            return 400, None  # a repeated header; readers may disagree on which counts
        status, node = await run_in_threadpool(self.admits, scope["path"], headers)
        return status or self._too_large(scope["path"], headers), node

    def _too_large(self, path: str, headers: Mapping[bytes, bytes]) -> int:
        """Return the status of a refusal for the size of a body, or 0."""
        size = headers.get(b"content-length", b"")
        if not size.isdigit() or b"transfer-encoding" in headers:
            return 411
        most = self.largest.get(path, SMALL)
        return 413 if len(size) > len(str(most)) or int(size) > most else 0


def for_nodes(app: ASGIApp, node_of: Callable[[bytes], int | None], news: Signals) -> Door:
    """Return the door for nodes, which sign each request with the private key of an admitted node.

    `node_of`: returns the node id of a public key (PEM), or None. `news`: of orders, by node id.
    """

    def admits(path: str, headers: Mapping[bytes, bytes]) -> Admission:
        if path not in FLEET:
            return 404, None
        try:
            key = base64.b64decode(_header(headers, FLEET_HTTP_PUBLIC_KEY_HEADER), validate=True)
            node = node_of(key)
            return (0, node) if node is not None and _signed(key, headers) else (401, None)
        except (KeyError, ValueError, TypeError, OverflowError, binascii.Error):
            return 401, None

    def waits(path: str, headers: Mapping[bytes, bytes], node: int | None) -> Wait | None:
        return news.wait(node) if path == ORDERS else None

    return Door(app, admits, OF_NODES, wary=True, room=Room(share=MOST_SHARE), waits=waits)


def for_the_owner(app: ASGIApp, token: str, secret: bytes, task_of: Callable[[str], object], news: Signals) -> Door:
    """Return the door for the owner of the server's folder, who starts runs with the token, and for the server's programs.

    `secret`, `task_of`, `news`: as for `for_apps`; news also of REPLY.
    """
    expected, of_apps = f"Bearer {token}".encode(), for_apps(app, secret, task_of, news)

    def admits(path: str, headers: Mapping[bytes, bytes]) -> Admission:
        if path.startswith(CONTROL):
            return 0 if hmac.compare_digest(headers.get(b"authorization", b""), expected) else 401, None
        return of_apps.admits(path, headers)

    def waits(path: str, headers: Mapping[bytes, bytes], node: int | None) -> Wait | None:
        if path == REPLIES:
            return news.wait(REPLY, _header(headers, TASK_TOKEN_HEADER), at_once=True, seconds=REPLIES_SECONDS)
        return of_apps.waits(path, headers, node)

    def done(path: str) -> None:
        if path == START:
            news.notify(TASK)

    return Door(app, admits, waits=waits, done=done, largest=OF_OWN)


def for_apps(
    app: ASGIApp,
    secret: bytes,
    task_of: Callable[[str], object],
    news: Signals,
    done: Callable[[str], None] = lambda path: None,
) -> Door:
    """Return the door for a machine's programs: the executor signs with the secret, Apps have the tokens of their tasks.

    `task_of`: returns the task of a token, or None. Flower checks both again, together with the body. `news`: of TASK.
    `done`: as in Door.
    """
    key = derive_auth_secret(secret)

    def admits(path: str, headers: Mapping[bytes, bytes]) -> Admission:
        if path != ACQUIRE and path not in RUNTIME:
            return 404, None
        try:
            if path == ACQUIRE:
                return 0 if _of_executor(key, headers) else 401, None
            return 0 if task_of(_header(headers, TASK_TOKEN_HEADER).decode("ascii")) is not None else 401, None
        except (KeyError, ValueError, OverflowError):
            return 401, None

    def waits(path: str, headers: Mapping[bytes, bytes], node: int | None) -> Wait | None:
        return news.wait(TASK) if path == ACQUIRE else None

    return Door(app, admits, waits=waits, done=done, largest=OF_OWN)


def _of_executor(key: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the executor signed a request for a task just now. Raises KeyError or ValueError for bad headers."""
    names = (SUPEREXEC_AUTH_TIMESTAMP_HEADER, SUPEREXEC_AUTH_NONCE_HEADER, SUPEREXEC_AUTH_BODY_SHA256_HEADER)
    time, nonce, body = (_header(headers, name).decode("ascii") for name in names)
    expected = compute_superexec_signature(
        auth_secret=key, method="/flwr.proto.Runtime/AcquireTask", timestamp=int(time), nonce=nonce, body_sha256=body
    )
    signed = hmac.compare_digest(expected.encode(), _header(headers, SUPEREXEC_AUTH_SIGNATURE_HEADER))
    return signed and _recent(now().timestamp() - int(time))


def _signed(key: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the owner of a public key (PEM) signed a request just now. KeyError, ValueError: bad headers."""
    time = _header(headers, TIMESTAMP_HEADER).decode("ascii")
    signature = base64.b64decode(_header(headers, FLEET_HTTP_SIGNATURE_HEADER), validate=True)
    age = (now() - datetime.datetime.fromisoformat(time)).total_seconds()
    return _recent(age) and verify_signature(bytes_to_public_key(key), time.encode("ascii"), signature)


def _recent(age: float) -> bool:
    """Return whether a signature of this age in seconds is valid, by Flower's limits."""
    return -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


def _header(headers: Mapping[bytes, bytes], name: str) -> bytes:
    return headers[name.lower().encode("ascii")]
