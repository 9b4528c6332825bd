"""Requests that wait at a door for something new."""

import asyncio
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fedloom.sims.federation import long_polling
from fedloom.sims.federation.doors import ACQUIRE, ORDERS, REPLIES, REPLY, TASK, Door, for_apps, for_nodes, for_the_owner
from fedloom.sims.federation.long_polling import Incoming, Signals, Wait, held
from fedloom.sims.federation.pace import Pace
from tests.sims.doors import everything, opened, until

LONG = 60.0  # seconds of a wait that ends before
AT_ONCE = LONG / 2


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
    assert waited(signals, "a") < AT_ONCE and waited(signals, "a") < AT_ONCE
    assert waited(signals, "a", 0.3) >= 0.3
    later(lambda: signals.notify("a"))
    assert 0.1 < waited(signals, "a") < AT_ONCE


def test_one_wait_may_take_all_news():
    signals = Signals()
    for _ in range(3):
        signals.notify("a")
    assert waited(signals, "a", at_once=True) < AT_ONCE
    assert waited(signals, "a", 0.3, at_once=True) >= 0.3


def test_each_listener_sees_all_news():
    async def both(signals: Signals) -> None:
        await asyncio.gather(*(signals.wait("a", listener, seconds=LONG) for listener in ("one", "two")))

    signals, began = Signals(), time.monotonic()
    later(lambda: signals.notify("a"))
    asyncio.run(both(signals))
    assert time.monotonic() - began < AT_ONCE


def test_a_newer_wait_of_a_listener_ends_its_older_one_which_takes_nothing():
    """The connection of the older one may be dead, and what it takes is lost."""

    async def both(signals: Signals) -> list[bool]:
        waits = [asyncio.ensure_future(signals.wait("a", seconds=LONG)) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert [one.done() for one in waits] == [True, True, False]
        signals.notify("a")
        return await asyncio.gather(*waits)

    assert asyncio.run(both(signals := Signals())) == [False, False, True]
    assert not signals._waits


def test_what_is_notified_from_threads_while_loops_come_and_go_ends_as_many_waits():
    signals, ended = Signals(), [0, 0]

    def wait(place: int) -> None:
        async def all_of_them() -> None:
            for _ in range(50):
                ended[place] += await signals.wait(place, seconds=LONG)

        for _ in range(4):
            asyncio.run(all_of_them())

    def notify() -> None:
        for _ in range(200):
            for place in (0, 1):
                signals.notify(place)

    threads = [threading.Thread(target=wait, args=(place,)) for place in (0, 1)] + [threading.Thread(target=notify)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert ended == [200, 200]


def test_no_one_waits_after_the_end():
    signals = Signals()
    later(signals.end)
    assert waited(signals, "a") < AT_ONCE
    assert waited(signals, "b") < AT_ONCE


def test_a_message_is_news_when_all_its_parts_have_come():
    complete: list[object] = []
    incoming = Incoming(complete.append)
    incoming.announced("session", "nothing missing", [])
    assert complete == ["nothing missing"]
    incoming.announced("session", "first", ["a", "b"])
    incoming.announced("session", "second", ["b", "c"])
    incoming.announced("other", "third", ["a"])
    incoming.came("session", "a")
    incoming.came("session", "unknown")
    assert complete == ["nothing missing"]
    incoming.came("session", "b")
    assert complete[1:] == ["first"]
    incoming.came("other", "a")
    incoming.came("session", "c")
    incoming.came("session", "c")
    assert complete[2:] == ["third", "second"]


def test_the_parts_of_a_session_that_is_forgotten_are_not_awaited(monkeypatch: pytest.MonkeyPatch):
    complete: list[object] = []
    incoming = Incoming(complete.append)
    incoming.announced("session", "first", ["a"])
    incoming.forget("session")
    incoming.forget("unknown")
    incoming.came("session", "a")
    monkeypatch.setattr(long_polling, "MOST_MISSING", 5)
    for number in range(4):
        incoming.announced(str(number), number, ["a", "b"])
    assert complete == [] and incoming._missing == 4 and list(incoming._sessions) == ["2", "3"]
    incoming.came("2", "a")
    incoming.came("2", "b")
    assert complete == [2] and incoming._missing == 2


def answers(app: ASGIApp, path: str, signals: Signals) -> Door:
    """A door at which a request for this path waits for news of "a"."""

    def waits(asked: str, headers: object, node: object) -> Wait | None:
        return signals.wait("a", seconds=LONG) if asked == path else None

    return Door(app, lambda path, headers: (0, None), waits=waits)


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
        assert time.monotonic() - began < AT_ONCE
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
        until(lambda: bool(signals._waits))
        line.close()
        until(lambda: not signals._waits)
        signals.notify("a")
        assert b"200" in say(request("/x"))
    assert asked == ["/x"]


def test_a_newer_request_ends_an_older_one_with_an_empty_message(tmp_path: Path):
    signals, answered = Signals(), list[bytes]()
    with opened(answers(everything, "/x", signals), tmp_path) as say:
        older = threading.Thread(target=lambda: answered.append(say(request("/x"))))
        older.start()
        until(lambda: bool(signals._waits))
        newer = threading.Thread(target=lambda: answered.append(say(request("/x"))))
        newer.start()
        older.join()
        signals.notify("a")
        newer.join()
    assert answered[0].startswith(b"HTTP/1.1 200") and answered[0].endswith(b"\r\n\r\n")
    assert answered[1].endswith(b"superlink")


def test_a_request_waits_when_its_body_is_there():
    """One whose body does not come takes nothing."""

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def main(signals: Signals) -> object:
        signals.notify("a")
        return await held(signals.wait("a", seconds=LONG), gone)

    assert asyncio.run(main(signals := Signals())) is None
    assert waited(signals, "a") < AT_ONCE


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
    assert signals._seen == {(7, ""): 1, (TASK, ""): 2, (REPLY, b"t"): 1}  # each has taken its own news
    assert not any(wait(door, "/v1/fleet/push-object") for door in (nodes, apps, owner))
    assert not wait(apps, REPLIES)
    owner.done("/v1/control/start-run")
    assert waited(signals, TASK) < AT_ONCE


def test_a_node_pauses_unless_its_server_held_the_request(monkeypatch: pytest.MonkeyPatch):
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr("fedloom.sims.federation.pace.LEAST_HELD_SECONDS", 0.3)
    pace, answers = Pace(signals := Signals()), iter([(0.0, None), (0.0, None), (0.4, None), (0.0, 3)])

    def pull() -> int | None:
        seconds, run = next(answers)
        threading.Event().wait(seconds)
        return run

    pulled = pace._pulled(pull)
    for expected in ([], [3.0], [3.0]):  # the second quick answer in a row is one of a server that holds nothing
        assert pulled() is None
        pace.sleep(3.0)
        assert pauses == expected
    assert pulled() == 3 and waited(signals, TASK) < AT_ONCE
    assert pace.monotonic() <= time.monotonic()


def test_a_node_continues_when_a_reply_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("fedloom.sims.federation.pace.FOR_REPLY_SECONDS", LONG)
    pace, began = Pace(Signals()), time.monotonic()
    later(lambda: pace.replied("/v1/runtime/push-object"), 0.1)
    pace.sleep(LONG)
    assert time.monotonic() - began < AT_ONCE
    began = time.monotonic()
    pace.sleep(0.2)  # the next reply has not come
    assert time.monotonic() - began >= 0.2
