"""The doors of a server before an application that answers everything: what gets through, and how long they wait."""

import asyncio
import contextlib
import io
import logging
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.auth.superexec import create_superexec_auth_metadata, derive_auth_secret
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode.nodestate import NodeStateFactory
from starlette.types import Receive, Scope, Send

from fedloom.sims.federation import bodies, connections, quiet
from fedloom.sims.federation.bodies import LARGEST_PART, MOST_BYTES, SMALL, UNFOLDS, Room
from fedloom.sims.federation.doors import ACQUIRE, FLEET, RUNTIME, Door, for_apps, for_nodes, for_the_owner
from fedloom.sims.federation.keys import write_certificates
from fedloom.sims.federation.long_polling import Signals
from fedloom.sims.federation.programs import free_port
from fedloom.sims.federation.quiet import Quiet
from fedloom.sims.federation.supernode import open_door
from tests.sims.doors import HEAD, Say, everything, head, opened, until

SECRET = b"secret"
tasks = {"token": "task"}
NEWS = Signals()
PART, NOTE, LOG = LARGEST_PART, 2 << 20, 16 << 20
METHOD = "/flwr.proto.Runtime/AcquireTask"


def test_no_one_holds_a_connection_by_sending_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(bodies, "PIECE_SECONDS", 0.3)
    with opened(Door(everything, lambda path, headers: (0, None)), tmp_path) as say:
        assert say(b"") == say(b"POST /x HT") == say(HEAD) == b""
        assert say(HEAD + b"\r\nab").startswith(b"HTTP/1.1 500")
        assert say(HEAD + b"\r\nabcPOST /x").startswith(b"HTTP/1.1 200")


def test_what_a_caller_calls_the_server_reaches_no_application(tmp_path: Path):
    with opened(Door(everything, lambda path, headers: (0, None)), tmp_path) as say:
        for host in (b"a", b"h/v1/runtime/pull-object?", b"127.0.0.1:1"):
            output = say(HEAD.replace(b"Host: a", b"Host: " + host + b"\r\nConnection: close") + b"\r\nabc")
            assert output.endswith(b"\r\n\r\nsuperlink"), output
        for odd in (HEAD + b"Host: b\r\n", HEAD + b"X: 1\r\nX: 2\r\n", HEAD + b"Content-Length: 4\r\n"):
            assert say(odd + b"\r\nabc").startswith(b"HTTP/1.1 400")
        for length in (b"Transfer-Encoding: chunked", b"X: 1"):
            assert say(HEAD.replace(b"Content-Length: 3", length) + b"\r\n").startswith(b"HTTP/1.1 411")
        assert say(HEAD.replace(b": 3", b": 999999999999") + b"\r\n").startswith(b"HTTP/1.1 413")
        assert say(HEAD + b"X: " + b"x" * 70_000)[:12] in (b"HTTP/1.1 400", b"")  # closed while it is still sent


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/runtime/acquire-task", *sorted(FLEET)])
def test_each_path_has_one_door(path: str):
    nodes, owner = (
        for_nodes(everything, lambda key: None, NEWS),
        for_the_owner(everything, "token", SECRET, tasks.get, NEWS),
    )
    apps, fleet, control = for_apps(everything, SECRET, tasks.get, NEWS), path in FLEET, "control" in path
    assert nodes.admits(path, {})[0] == (401 if fleet else 404)
    assert owner.admits(path, {})[0] == (404 if fleet else 401)
    assert owner.admits(path, {b"authorization": b"Bearer token"})[0] == (404 if fleet else 0 if control else 401)
    assert owner.admits(path, {b"authorization": b"Bearer toke\xff"})[0] == (404 if fleet else 401)
    assert apps.admits(path, {})[0] == (404 if fleet or control else 401)


def test_the_programs_of_a_machine_say_who_they_are_before_their_bodies_are_read():
    door, key = for_apps(everything, SECRET, tasks.get, NEWS), derive_auth_secret(SECRET)
    words = create_superexec_auth_metadata(auth_secret=key, method=METHOD, request=AcquireTaskRequest())
    good = {name.encode(): text.encode() for name, text in words.items()}
    assert door.admits(ACQUIRE, good)[0] == 0
    for name in good:
        for odd in (b"", b"1", b"\xff", b"9" * 400):
            assert door.admits(ACQUIRE, {**good, name: odd})[0] == 401, (name, odd)
        assert door.admits(ACQUIRE, {other: text for other, text in good.items() if other != name})[0] == 401
    other = create_superexec_auth_metadata(auth_secret=b"other", method=METHOD, request=AcquireTaskRequest())
    assert door.admits(ACQUIRE, {name.encode(): text.encode() for name, text in other.items()})[0] == 401
    for path in RUNTIME:
        assert door.admits(path, {b"flwr-task-token": b"token"})[0] == 0
        for odd in (good, {b"flwr-task-token": b""}, {b"flwr-task-token": b"x"}, {b"flwr-task-token": b"\xff"}):
            assert door.admits(path, odd)[0] == 401
    for path in ("/docs", "/openapi.json", "/health", "/v1/runtime/", "/v1/runtime/create-task", "/v1/runtime/responses"):
        assert door.admits(path, {**good, b"flwr-task-token": b"token"})[0] == 404


def test_unfinished_bodies_take_so_much_memory_and_one_member_takes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "ROOM_SECONDS", 0.3)
    size, room = 150_000, Room(most=300_000, share=200_000)
    door = Door(everything, lambda path, headers: (0, int(headers[b"speaker"])), room=room)
    door = replace(door, largest={"/x": size})
    with opened(door, tmp_path) as say, say.line() as first, say.line() as second:
        first.sendall(head(1, size))
        until(lambda: room.held_bytes == size)
        assert say(head(1, size)).startswith(b"HTTP/1.1 503")  # its share is used up; nothing of the body is read
        second.sendall(head(2, size))
        until(lambda: room.held_bytes == 2 * size)
        assert say(head(3, size)).startswith(b"HTTP/1.1 503")  # the door's is
        assert say(head(3, 3) + b"abc").startswith(b"HTTP/1.1 200")  # small ones, such as heartbeats, get through
        monkeypatch.setattr(bodies, "ROOM_SECONDS", 60.0)
        threading.Timer(0.3, second.close).start()
        assert say(head(3, size) + b"x" * size).startswith(b"HTTP/1.1 200")  # waits until there is room
        first.sendall(b"x" * size)
        assert first.recv(99).startswith(b"HTTP/1.1 200")
    assert room.held_bytes == 0


LIMITS = {
    "/v1/fleet/push-object": PART, "/v1/fleet/push-messages": NOTE, "/v1/fleet/send-node-heartbeat": SMALL,
    "/v1/fleet/pull-messages": SMALL, "/v1/fleet/confirm-message-received": SMALL, "/v1/runtime/push-object": PART,
    "/v1/runtime/push-messages": MOST_BYTES, "/v1/runtime/acquire-task": SMALL, "/v1/control/start-run": 32 << 20,
    "/v1/runtime/push-logs": LOG, "/v1/control/list-runs": SMALL,
}  # fmt: skip


@pytest.mark.parametrize("path", LIMITS)
def test_a_body_is_as_large_as_its_path_needs(path: str):
    """A small protobuf may unfold to many times its bytes, and all others wait while it is read."""
    doors = [for_nodes(everything, lambda key: None, NEWS), for_the_owner(everything, "token", SECRET, tasks.get, NEWS),
             for_apps(everything, SECRET, tasks.get, NEWS)]  # fmt: skip
    known = [replace(door, admits=lambda path, headers: (0, None)) for door in doors]
    for door in [known[0]] if path in FLEET else known[1:]:
        for size, status in ((LIMITS[path], 0), (LIMITS[path] + 1, 413), (10**30, 413)):
            heads = [(b"content-length", b"%d" % size)]
            scope = {"method": "POST", "query_string": b"", "raw_path": path.encode(), "path": path, "headers": heads}
            assert asyncio.run(door._admission(scope))[0] == status, (size, path)


def test_what_unfolds_counts_as_what_it_unfolds_to():
    async def most(path: str, size: int) -> int:
        held: list[int] = []

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            held.append(door.room.held_bytes)

        door = replace(for_nodes(app, lambda key: 7, NEWS), admits=lambda path, headers: (0, 7))
        heads, nothing = [(b"content-length", b"%d" % size)], AsyncMock(return_value={"type": "http.request", "body": b""})
        scope = {"type": "http", "method": "POST", "query_string": b"", "raw_path": path.encode(), "path": path,
                 "headers": heads, "client": ("127.0.0.1", 1)}  # fmt: skip
        NEWS.notify(7)
        await door(scope, nothing, nothing)
        return held[0]

    assert asyncio.run(most("/v1/fleet/push-object", PART)) == PART
    assert asyncio.run(most("/v1/fleet/push-messages", NOTE)) == UNFOLDS * NOTE
    assert asyncio.run(most("/v1/fleet/pull-messages", SMALL)) == UNFOLDS * SMALL
    assert asyncio.run(most("/v1/fleet/pull-messages", 9)) == SMALL


async def much(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with more than the network takes at once."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (32 << 20))]})
    await send({"type": "http.response.body", "body": bytes(32 << 20)})


def test_answers_that_no_one_reads_count_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "ROOM_SECONDS", 0.3)
    room = Room(share=16 << 20)
    with opened(Door(much, lambda path, headers: (0, 1), room=room), tmp_path) as say:
        with say.line() as line:
            line.sendall(head(1, 0))
            until(lambda: room.held_bytes > 32 << 20)
            assert say(head(1, 0)).startswith(b"HTTP/1.1 503")
            got = 0
            while piece := line.recv(1 << 20):
                got += len(piece)
            assert got > 32 << 20
        until(lambda: room.held_bytes == 0)
        monkeypatch.setattr(bodies, "PIECE_SECONDS", 0.3)
        with say.line() as line:
            line.sendall(head(1, 0))
            until(lambda: room.held_bytes > 0)
            until(lambda: room.held_bytes == 0)  # nobody reads it, and nobody waits for that


def test_a_body_does_not_come_by_drops_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bodies, "PIECE_SECONDS", 1.0)
    monkeypatch.setattr(bodies, "SLOWEST", 1 << 30)
    with opened(Door(everything, lambda path, headers: (0, None)), tmp_path) as say, say.line() as line:
        line.sendall(head(1, 100))
        line.settimeout(0.2)
        for _ in range(50):
            with contextlib.suppress(TimeoutError):
                line.sendall(b"x")
                assert line.recv(99).startswith(b"HTTP/1.1 500")
                break
        else:
            pytest.fail("it still waits")


def test_the_nodes_port_answers_its_own_programs_alone(tmp_path: Path):
    write_certificates(tmp_path, ["127.0.0.1"])
    config: Any = SimpleNamespace(
        superexec_auth_secret=SECRET, runtime_ssl_certfile=str(tmp_path / "server.crt"),
        runtime_ssl_keyfile=str(tmp_path / "server.key"), host="127.0.0.1", port=free_port(),
    )  # fmt: skip
    server, thread = open_door(NEWS, lambda path: None, config, NodeStateFactory(objectstore_factory=ObjectStoreFactory()))
    try:
        say = Say(config.port, tmp_path / "ca.crt")
        for path in (b"/docs", b"/openapi.json", b"/health", b"/"):
            for method in (b"GET", b"POST"):
                assert say(method + b" " + path + b" HTTP/1.1\r\nHost: a\r\n\r\n").startswith(b"HTTP/1.1 404")
        for path in (ACQUIRE, *RUNTIME):
            request = HEAD.replace(b"/x", path.encode()).replace(b" 3\r", b" 99999999\r") + b"flwr-task-token: x\r\n\r\n"
            assert say(request).startswith(b"HTTP/1.1 401")  # without waiting for what does not come
        with pytest.raises(SystemExit, match="set another 'port'"):
            open_door(NEWS, lambda path: None, config, NodeStateFactory(objectstore_factory=ObjectStoreFactory()))
        words = create_superexec_auth_metadata(
            auth_secret=derive_auth_secret(SECRET), method=METHOD, request=AcquireTaskRequest()
        )
        lines = "".join(f"{name}: {text}\r\n" for name, text in words.items()).encode()
        start = b"POST " + ACQUIRE.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\nConnection: close\r\n"
        output = say(start + b"Content-Type: application/protobuf\r\n" + lines + b"\r\n")
        assert output.split(b" ")[1] in (b"200", b"400", b"412", b"426"), output  # Flower's own answer
    finally:
        server.should_exit = True
        thread.join()


def test_no_one_fills_a_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    log, filtered = logging.getLogger("tests.doors"), Quiet()
    log.addFilter(filtered)
    try:
        for number in range(1000):
            try:
                raise ValueError(number)
            except ValueError:
                log.exception("caller %s sent nonsense", number)
        log.warning("another kind")
        texts = [record.getMessage() for record in caplog.records]
        assert texts == [f"caller {number} sent nonsense" for number in range(quiet.LINES)] + ["another kind"]
        assert [bool(record.exc_text) for record in caplog.records] == [True] + [False] * quiet.LINES
        caplog.clear()
        for minute in (60.0, 60.0, -1.0):
            monkeypatch.setattr(quiet, "MINUTE", minute)
            for text in ("x" * 9999,) * 8:
                log.warning(text)
        texts = [record.getMessage() for record in caplog.records]
        assert "(6 similar messages were left out)" in texts[quiet.LINES] and max(map(len, texts)) < quiet.MAX_LINE + 99
    finally:
        log.removeFilter(filtered)


FORGED = "x\n\x1b]0;owned\x07\x1b[2J\x1b[31mINFO :      site-0000 is thrown out\r\x9b31m\u2028y"


def test_no_one_writes_lines_of_others_in_a_log_or_steers_a_terminal_by_it():
    written = io.StringIO()
    handler, filtered, log = logging.StreamHandler(written), Quiet(), logging.getLogger("tests.lines")
    log.addFilter(filtered)
    log.addHandler(handler)
    try:
        log.error("no app of hash %s", FORGED)
        lines = written.getvalue().splitlines()
        assert len(lines) == 1 and lines[0].isprintable() and "thrown out" in lines[0]
        try:
            raise ValueError(FORGED)
        except ValueError:
            log.exception("%s", "no app")
        assert all(line.isprintable() for line in written.getvalue().splitlines())
        assert "Traceback" in written.getvalue()
    finally:
        log.removeHandler(handler)
        log.removeFilter(filtered)
