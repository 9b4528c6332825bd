"""The two doors of a server's SuperLink: one for nodes, on the network, and one for this machine's own user, on loopback.

Flower (1.41) answers everything at one port: whoever reaches it may start runs, and let nodes in or throw them out. Here
each door answers its own paths alone, and asks who speaks before it reads what is said.
"""

import asyncio
import base64
import binascii
import datetime
import hmac
from asyncio import TimerHandle, Transport
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from starlette.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

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
CONTROL, RUNTIME = "/v1/control/", "/v1/runtime/"  # what starts runs, and what their ServerApps ask for
MOST_BYTES = 128 << 20  # of a request; Flower sends arrays in parts of 5 MiB
HEAD_SECONDS = 20.0  # for a request's head to come as a whole
PIECE_SECONDS = 60.0  # between two pieces of its body
NODE: ContextVar[int | None] = ContextVar("node", default=None)  # whose request is answered; None: not a node's
HOST = [(b"host", b"superlink")]  # in place of what a caller says: no answer depends on it


@dataclass(frozen=True)
class Door:
    """An ASGI application that passes on what `admits`; all other requests end here, with their bodies unread.

    `admits`: the status of an answer to a path with these headers; 0: the request is passed on. It may block.
    `speaker`: the node whose request it is, by its headers.
    """

    app: ASGIApp
    admits: Callable[[str, Mapping[bytes, bytes]], int]
    speaker: Callable[[Mapping[bytes, bytes]], int | None] = lambda headers: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return None
        if status := await self._refused(scope):
            return await PlainTextResponse("", status, {"connection": "close"})(scope, receive, send)
        headers = [(name, content) for name, content in scope["headers"] if name != b"host"]
        token = NODE.set(await run_in_threadpool(self.speaker, dict(headers)))
        try:
            await self.app({**scope, "headers": HOST + headers}, _Measured(receive), send)
        finally:
            NODE.reset(token)
        return None

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
        return 413 if int(size) > MOST_BYTES else 0


class _Measured:
    """What comes of a body, which must not stop coming."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self._whole = receive, False

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()  # until the caller goes away
        try:
            message = await asyncio.wait_for(self._receive(), PIECE_SECONDS)
        except TimeoutError:
            return {"type": "http.disconnect"}
        self._whole = not message.get("more_body", False)
        return message


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

    return Door(app, admits, speaker)


def for_the_owner(app: ASGIApp, token: str) -> Door:
    """The door for whoever may read the server's folder: runs are started with this token.

    ServerApps bring tokens of their own, and what starts them signs with a secret; Flower checks both.
    """
    expected = f"Bearer {token}".encode()

    def admits(path: str, headers: Mapping[bytes, bytes]) -> int:
        if path.startswith(CONTROL):
            return 0 if hmac.compare_digest(headers.get(b"authorization", b""), expected) else 401
        return 0 if path.startswith(RUNTIME) else 404

    return Door(app, admits)


def _signed(key: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the holder of a public key (PEM) signed a request's time just now. KeyError, ValueError: it says none."""
    time = _header(headers, TIMESTAMP_HEADER).decode("ascii")
    signature = base64.b64decode(_header(headers, FLEET_HTTP_SIGNATURE_HEADER), validate=True)
    age = (now() - datetime.datetime.fromisoformat(time)).total_seconds()
    recent = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
    return recent and verify_signature(bytes_to_public_key(key), time.encode("ascii"), signature)


def _header(headers: Mapping[bytes, bytes], name: str) -> bytes:
    return headers[name.lower().encode("ascii")]


class Patient(H11Protocol):
    """Uvicorn's HTTP/1.1, but that a request's head has to come in time: nobody holds a connection by sending nothing."""

    _late: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait() if self._at_head() else self._stop()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _at_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _wait(self) -> None:
        if self._late is None:
            self._late = self.loop.call_later(HEAD_SECONDS, self._end)

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        if self._at_head():
            self.transport.abort()


def settings(app: ASGIApp, certificate: str, key: str, log_config: Mapping[str, Any]) -> dict[str, Any]:
    """Of uvicorn, for a door."""
    return {
        "app": app, "http": Patient, "ws": "none", "ssl_certfile": certificate, "ssl_keyfile": key, "log_config": log_config,
        "server_header": False, "proxy_headers": False, "access_log": False, "timeout_graceful_shutdown": 3,
    }  # fmt: skip
