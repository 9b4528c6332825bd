"""The doors of a federation's ports: a server's for nodes, a server's for its own user, and a node's for its own programs.

Flower (1.41) answers everything at one port: whoever reaches it may start runs, and let nodes in or throw them out. Here
each door answers its own paths alone, and asks who speaks before it reads what is said (`bodies.py`: how much of it at
once; `connections.py`: how many may ask).
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
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse
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
)  # what a node asks for
CONTROL = "/v1/control/"  # what starts runs
ACQUIRE = "/v1/runtime/acquire-task"  # what the executor asks for
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
)  # what ServerApps and ClientApps ask for
OF_BYTES = "/push-object"  # what is sent there is read as it is
OF_NODES = {"/v1/fleet/push-object": LARGEST_PART, "/v1/fleet/push-messages": 2 << 20}  # bytes of a body; others: SMALL
OF_OWN = {
    "/v1/control/start-run": 32 << 20,  # Flower's own limit to an app's bundle is 10 MB
    "/v1/runtime/push-object": LARGEST_PART,
    "/v1/runtime/push-messages": MOST_BYTES,  # heads of all orders of a round, with the ids of their parts
    "/v1/runtime/pull-messages": 4 << 20,  # ids of orders
    "/v1/runtime/push-task-output": MOST_BYTES,  # with what an app keeps
    "/v1/runtime/push-logs": 16 << 20,
}
NODE: ContextVar[int | None] = ContextVar("node", default=None)  # whose request is answered; None: not a node's
HOST = [(b"host", b"superlink")]  # in place of what a caller says: no answer depends on it


@dataclass(frozen=True)
class Door:
    """An ASGI application that passes on what `admits`; all other requests end here, with their bodies unread.

    `admits`: the status of an answer to a path with these headers; 0: the request is passed on. It may block.
    `speaker`: the node whose request it is, by its headers. `largest`: bytes of a body, by its path; others: SMALL. `wary`:
    whether callers may send what unfolds to many times its bytes. `crowd`: of connections; `room`: for bodies.
    """

    app: ASGIApp
    admits: Callable[[str, Mapping[bytes, bytes]], int]
    speaker: Callable[[Mapping[bytes, bytes]], int | None] = lambda headers: None
    largest: Mapping[str, int] = field(default_factory=dict)
    wary: bool = False
    crowd: Crowd = field(default_factory=Crowd)
    room: Room = field(default_factory=Room)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        status = await self._refused(scope)
        if not status:
            node = await run_in_threadpool(self.speaker, dict(scope["headers"]))
            self.crowd.known(scope["client"], node)
            try:
                return await self._pass_on(node, scope, receive, send)
            except Full:
                status = 503  # Flower's programs try again
        return await PlainTextResponse("", status, {"connection": "close"})(scope, receive, send)

    async def _pass_on(self, node: int | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Have the application answer. Full: there is no room for the body, of which nothing is read."""
        headers = dict(scope["headers"])
        size = int(headers[b"content-length"])
        seen = [(name, content) for name, content in scope["headers"] if name != b"host"]
        times = UNFOLDS if self.wary and not scope["path"].endswith(OF_BYTES) else 1
        async with self.room.held(node, size, times) as grow:
            token = NODE.set(node)
            try:
                await self.app({**scope, "headers": HOST + seen}, Measured(receive, size), Answered(send, grow))
            finally:
                NODE.reset(token)

    async def _refused(self, scope: Scope) -> int:
        """The status that ends a request, before anything of its body is read; 0: none."""
        if scope["method"] != "POST" or scope["query_string"] or scope["raw_path"] != scope["path"].encode():
            return 404
        headers = dict(scope["headers"])
        if len(headers) != len(scope["headers"]):
            return 400  # a header twice: two readers may not agree which counts
        if status := await run_in_threadpool(self.admits, scope["path"], headers):
            return status
        size = headers.get(b"content-length", b"")
        if not size.isdigit() or b"transfer-encoding" in headers:
            return 411
        most = self.largest.get(scope["path"], SMALL)
        return 413 if len(size) > len(str(most)) or int(size) > most else 0


def for_nodes(app: ASGIApp, node_of: Callable[[bytes], int | None]) -> Door:
    """The door for nodes: each proves with every request that it holds the private key of one that is let in.

    `node_of`: the id of the node of a public key (PEM), if there is one.
    """

    def admits(path: str, headers: Mapping[bytes, bytes]) -> int:
        if path not in FLEET:
            return 404
        try:
            key = base64.b64decode(_header(headers, FLEET_HTTP_PUBLIC_KEY_HEADER), validate=True)
            return 0 if node_of(key) is not None and _signed(key, headers) else 401
        except (KeyError, ValueError, TypeError, OverflowError, binascii.Error):
            return 401

    def speaker(headers: Mapping[bytes, bytes]) -> int | None:
        return node_of(base64.b64decode(_header(headers, FLEET_HTTP_PUBLIC_KEY_HEADER)))

    return Door(app, admits, speaker, OF_NODES, wary=True, room=Room(share=MOST_SHARE))


def for_the_owner(app: ASGIApp, token: str, secret: bytes, task_of: Callable[[str], object]) -> Door:
    """The door for whoever may read the server's folder, who starts runs with this token; and for its own programs.

    `secret`, `task_of`: as `for_apps`.
    """
    expected, of_apps = f"Bearer {token}".encode(), for_apps(app, secret, task_of).admits

    def admits(path: str, headers: Mapping[bytes, bytes]) -> int:
        if path.startswith(CONTROL):
            return 0 if hmac.compare_digest(headers.get(b"authorization", b""), expected) else 401
        return of_apps(path, headers)

    return Door(app, admits, largest=OF_OWN)


def for_apps(app: ASGIApp, secret: bytes, task_of: Callable[[str], object]) -> Door:
    """The door for a machine's own programs: what starts Apps signs with the secret, Apps bring their tasks' tokens.

    `task_of`: the task that a token stands for; None: there is none. Flower checks both again, against the body, too.
    """
    key = derive_auth_secret(secret)

    def admits(path: str, headers: Mapping[bytes, bytes]) -> int:
        if path != ACQUIRE and path not in RUNTIME:
            return 404
        try:
            if path == ACQUIRE:
                return 0 if _of_executor(key, headers) else 401
            return 0 if task_of(_header(headers, TASK_TOKEN_HEADER).decode("ascii")) is not None else 401
        except (KeyError, ValueError, OverflowError):
            return 401

    return Door(app, admits, largest=OF_OWN)


def _of_executor(key: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the holder of a key signed a request for a task just now. KeyError, ValueError: it does not say."""
    names = (SUPEREXEC_AUTH_TIMESTAMP_HEADER, SUPEREXEC_AUTH_NONCE_HEADER, SUPEREXEC_AUTH_BODY_SHA256_HEADER)
    time, nonce, body = (_header(headers, name).decode("ascii") for name in names)
    expected = compute_superexec_signature(
        auth_secret=key, method="/flwr.proto.Runtime/AcquireTask", timestamp=int(time), nonce=nonce, body_sha256=body
    )
    signed = hmac.compare_digest(expected.encode(), _header(headers, SUPEREXEC_AUTH_SIGNATURE_HEADER))
    return signed and _recent(now().timestamp() - int(time))


def _signed(key: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the holder of a public key (PEM) signed a request's time just now. KeyError, ValueError: it says none."""
    time = _header(headers, TIMESTAMP_HEADER).decode("ascii")
    signature = base64.b64decode(_header(headers, FLEET_HTTP_SIGNATURE_HEADER), validate=True)
    age = (now() - datetime.datetime.fromisoformat(time)).total_seconds()
    return _recent(age) and verify_signature(bytes_to_public_key(key), time.encode("ascii"), signature)


def _recent(age: float) -> bool:
    """Whether what was signed so many seconds ago still counts, as Flower does."""
    return -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE


def _header(headers: Mapping[bytes, bytes], name: str) -> bytes:
    return headers[name.lower().encode("ascii")]
