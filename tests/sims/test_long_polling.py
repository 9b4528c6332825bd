"""Requests that wait at a door for something new."""

import asyncio
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedloom.sims.federation.doors import ACQUIRE, ORDERS, REPLIES, REPLY, TASK, Door, for_apps, for_nodes, for_the_owner
from fedloom.sims.federation.long_polling import Incoming, Signals, Wait, held
from fedloom.sims.federation.pace import Pace
from tests.sims.doors import everything, opened, until

LONG = 60.0  # seconds that no test waits


def later(do: Callable[[], object], seconds: float = 0.2) -> None:
    threading.Timer(seconds, do).start()


def waited(signals: Signals, key: str, seconds: float = LONG, at_once: bool = False) -> float:
    """How long a wait takes."""
    began = time.monotonic()
    asyncio.run(signals.wait(key, at_once=at_once, seconds=seconds))
    return time.monotonic() - began


def test_a_wait_takes_one_of_the_news_that_came_before_or_come_after():
    signals = Signals()
    signals.notify("a")
    signals.notify("a")
    assert waited(signals, "b", 0.3) >= 0.3  # news of another key
    assert waited(signals, "a") < 0.2 and waited(signals, "a") < 0.2
    assert waited(signals, "a", 0.3) >= 0.3
    later(lambda: signals.notify("a"))
    assert 0.1 < waited(signals, "a") < 30


def test_one_wait_may_take_all_news():
    signals = Signals()
    for _ in range(3):
        signals.notify("a")
    assert waited(signals, "a", at_once=True) < 0.2
    assert waited(signals, "a", 0.3, at_once=True) >= 0.3


def test_each_listener_sees_all_news():
    async def both(signals: Signals) -> None:
        await asyncio.gather(*(signals.wait("a", listener, seconds=LONG) for listener in ("one", "two")))

    signals = Signals()
    later(lambda: signals.notify("a"))
    asyncio.run(both(signals))


def test_of_two_waits_each_news_ends_one():
    async def ended(signals: Signals, first: asyncio.Event) -> int:
        waits = [asyncio.ensure_future(signals.wait("a", seconds=LONG)) for _ in range(2)]
        await asyncio.sleep(0.1)
        signals.notify("a")
        done, left = await asyncio.wait(waits, timeout=0.5)
        for one in left:
            one.cancel()
        return len(done)

    assert asyncio.run(ended(Signals(), asyncio.Event())) == 1


def test_nobody_waits_after_the_end():
    signals = Signals()
    later(signals.end)
    assert waited(signals, "a") < 30
    assert waited(signals, "b") < 0.2


def test_a_message_is_news_when_all_its_parts_have_come():
    told: list[object] = []
    incoming = Incoming(told.append)
    incoming.announced("session", "nothing missing", [])
    assert told == ["nothing missing"]
    incoming.announced("session", "first", ["a", "b"])
    incoming.announced("session", "second", ["b", "c"])
    incoming.announced("other", "third", ["a"])
    incoming.came("session", "a")
    incoming.came("session", "unknown")
    assert told == ["nothing missing"]
    incoming.came("session", "b")
    assert told[1:] == ["first"]
    incoming.came("other", "a")
    incoming.came("session", "c")
    incoming.came("session", "c")
    assert told[2:] == ["third", "second"]


def answers(app: ASGIApp, path: str, signals: Signals) -> Door:
    """A door at which a request for this path waits for news of "a"."""

    def waits(asked: str, headers: object, node: object) -> Wait | None:
        return signals.wait("a") if asked == path else None

    return Door(app, lambda path, headers: 0, waits=waits)


def request(path: str, body: bytes = b"abc") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def test_a_request_is_answered_when_the_news_come_with_its_whole_body(tmp_path: Path):
    bodies: list[bytes] = []

    async def echo(scope: Scope, receive: Receive, send: Send) -> None:
        whole = b""
        while (message := await receive())["type"] == "http.request":
            whole += message["body"]
            if not message.get("more_body"):
                break
        bodies.append(whole)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    signals = Signals()
    with opened(answers(echo, "/x", signals), tmp_path) as say:
        began = time.monotonic()
        assert say(request("/y")).endswith(b"ok")  # does not wait
        later(lambda: signals.notify("a"))
        assert say(request("/x", b"abcdef" * 1000)).endswith(b"ok")
        assert time.monotonic() - began < 4
    assert bodies == [b"abc", b"abcdef" * 1000]


def test_a_caller_who_left_takes_nothing(tmp_path: Path):
    """The next one gets what it would have taken."""
    asked: list[str] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        await everything(scope, receive, send)

    signals = Signals()
    with opened(answers(note, "/x", signals), tmp_path) as say:
        line: ssl.SSLSocket = say.line()
        line.sendall(request("/x"))
        until(lambda: bool(signals._wakes))
        line.close()
        until(lambda: not signals._wakes)
        signals.notify("a")
        assert b"200" in say(request("/x"))
    assert asked == ["/x"]


def test_a_body_that_ends_with_its_caller_is_no_request():
    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def main() -> object:
        return await held(Signals().wait("a", seconds=LONG), gone)

    assert asyncio.run(main()) is None


def test_what_waits_at_which_door():
    signals = Signals()
    nodes = for_nodes(everything, lambda key: None, signals)
    apps = for_apps(everything, b"secret", {}.get, signals)
    owner = for_the_owner(everything, "token", b"secret", {}.get, signals)
    headers = {b"flwr-task-token": b"t"}

    def wait(door: Door, path: str) -> bool:
        there = door.waits(path, headers, 7)
        if there is not None:
            asyncio.run(there)
        return there is not None

    signals.notify(7)
    for _ in range(2):
        signals.notify(TASK)
    signals.notify(REPLY)
    assert wait(nodes, ORDERS) and wait(apps, ACQUIRE) and wait(owner, ACQUIRE) and wait(owner, REPLIES)
    assert not any(wait(door, "/v1/fleet/push-object") for door in (nodes, apps, owner))
    assert not wait(apps, REPLIES)
    owner.done("/v1/control/start-run")
    assert waited(signals, TASK) < 0.2


def test_a_node_pauses_unless_its_server_held_the_request(monkeypatch: pytest.MonkeyPatch):
    pace, runs = Pace(signals := Signals()), iter([None, None, 3])
    slow = iter([0.0, 1.1, 0.0])
    pull = pace._pulled(lambda: (time.sleep(next(slow)), next(runs))[1])  # type: ignore[func-returns-value]

    def pause(seconds: float) -> float:
        began = time.monotonic()
        pace.sleep(seconds)
        return time.monotonic() - began

    assert pull() is None and pause(0.7) >= 0.7
    assert pull() is None and pause(0.7) < 0.3
    assert pull() == 3 and waited(signals, TASK) < 0.2
    later(lambda: pace.replied("/v1/runtime/push-object"), 0.1)
    assert pause(0.5) < 0.4
    assert pause(0.2) >= 0.2
    assert pace.monotonic() <= time.monotonic()
