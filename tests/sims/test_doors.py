"""The doors of a server before an application that answers everything: what gets through, and how long they wait."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from starlette.types import Receive, Scope, Send

from sims.federation import doors, superlink
from sims.federation.doors import FLEET, Door, for_nodes, for_the_owner, settings
from sims.federation.keys import write_certificates

HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n"
Say = Callable[[bytes], bytes]


async def everything(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the whole body, and says which host it was asked for."""
    while (message := await receive())["type"] == "http.request" and message.get("more_body"):
        pass
    if message["type"] == "http.request":
        host = dict(scope["headers"])[b"host"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(host))]})
        await send({"type": "http.response.body", "body": host})


@contextlib.contextmanager
def opened(door: Door, folder: Path) -> Iterator[Say]:
    """A server behind the door; what it answers to bytes on a new connection, until it closes that."""
    write_certificates(folder, ["127.0.0.1"])
    listening = socket.create_server(("127.0.0.1", 0))
    given = settings(door, str(folder / "server.crt"), str(folder / "server.key"), {"version": 1})
    server = uvicorn.Server(uvicorn.Config(**given, lifespan="off"))
    thread = threading.Thread(target=lambda: asyncio.run(server._serve([listening])))
    thread.start()
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))

    def say(text: bytes) -> bytes:
        told, plain = b"", socket.create_connection(listening.getsockname(), timeout=60)
        with context.wrap_socket(plain, server_hostname="127.0.0.1") as line, contextlib.suppress(OSError):
            line.sendall(text)
            while piece := line.recv(4096):
                told += piece
        return told

    try:
        yield say
    finally:
        server.should_exit = True
        thread.join()


def test_nobody_holds_a_connection_by_sending_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doors, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(doors, "PIECE_SECONDS", 0.3)
    with opened(Door(everything, lambda path, headers: 0), tmp_path) as say:
        assert say(b"") == say(b"POST /x HT") == say(HEAD) == b""
        assert say(HEAD + b"\r\nab").startswith(b"HTTP/1.1 500")
        assert say(HEAD + b"\r\nabcPOST /x").startswith(b"HTTP/1.1 200")


def test_what_a_caller_calls_the_server_reaches_no_application(tmp_path: Path):
    with opened(Door(everything, lambda path, headers: 0), tmp_path) as say:
        for host in (b"a", b"h/v1/runtime/pull-object?", b"127.0.0.1:1"):
            told = say(HEAD.replace(b"Host: a", b"Host: " + host + b"\r\nConnection: close") + b"\r\nabc")
            assert told.endswith(b"\r\n\r\nsuperlink"), told
        for odd in (HEAD + b"Host: b\r\n", HEAD + b"X: 1\r\nX: 2\r\n", HEAD + b"Content-Length: 4\r\n"):
            assert say(odd + b"\r\nabc").startswith(b"HTTP/1.1 400")
        for length in (b"Transfer-Encoding: chunked", b"X: 1"):
            assert say(HEAD.replace(b"Content-Length: 3", length) + b"\r\n").startswith(b"HTTP/1.1 411")
        assert say(HEAD.replace(b": 3", b": 999999999999") + b"\r\n").startswith(b"HTTP/1.1 413")
        assert say(HEAD + b"X: " + b"x" * 70_000)[:12] in (b"HTTP/1.1 400", b"")  # closed while it is still sent


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/acquire-task", *sorted(FLEET)])
def test_each_path_has_one_door(path: str):
    nodes, owner = for_nodes(everything, lambda key: None), for_the_owner(everything, "token")
    fleet = path in FLEET
    assert nodes.admits(path, {}) == (401 if fleet else 404)
    assert owner.admits(path, {}) == (404 if fleet else 401 if "control" in path else 0)
    assert owner.admits(path, {b"authorization": b"Bearer token"}) == (404 if fleet else 0)
    assert owner.admits(path, {b"authorization": b"Bearer toke\xff"}) == (404 if fleet else 401 if "control" in path else 0)


def test_a_node_sends_the_server_its_own_replies_and_nobody_anything_else(monkeypatch: pytest.MonkeyPatch):
    """Flower's SuperLink passes on what a node sends to whom the message names."""
    stored: list[object] = []

    def store(state: object, message: object, tree: object, session: str) -> tuple[bool, list[str]]:
        stored.append(message)
        return True, []

    monkeypatch.setattr(SqlLinkState, "store_message_and_object_tree", store)
    superlink._take_replies_alone()

    def passes(node: int | None, **parts: object) -> bool:
        about = {"src_node_id": 7, "dst_node_id": SUPERLINK_NODE_ID, "reply_to_message_id": "a", **parts}
        token = doors.NODE.set(node)
        try:
            message: Any = SimpleNamespace(metadata=SimpleNamespace(**about))
            state: Any = None
            return SqlLinkState.store_message_and_object_tree(state, message, state, "")[0]
        finally:
            doors.NODE.reset(token)

    assert passes(7) and passes(None, src_node_id=1, dst_node_id=9, reply_to_message_id="")
    assert not any((passes(7, reply_to_message_id=""), passes(7, src_node_id=1), passes(7, dst_node_id=9), passes(8)))
    assert len(stored) == 2
