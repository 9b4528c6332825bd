"""Long polling: a request for something new waits at the door until there is something.

Flower's programs (1.41) ask again and again: a node every three seconds for an order, an executor ten times a second for a
task. Each request costs milliseconds of the machine's time, and each pause delays a round.
"""

import asyncio
import contextlib
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterable
from typing import Any

from starlette.types import Message, Receive

HELD_SECONDS = 5.0  # the longest wait for an order or a task
REPLIES_SECONDS = 1.0  # the longest wait for replies: the server looks at its clocks in between
MOST_SESSIONS = 10_000  # sessions whose parts are on their way

Wait = Coroutine[Any, Any, None]


class Signals:
    """Counts the news of each key, and wakes who waits for them. Any thread may notify."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news: Counter[Hashable] = Counter()
        self._seen: Counter[tuple[Hashable, Hashable]] = Counter()
        self._wakes: dict[asyncio.Event, Callable[[], object]] = {}
        self._ended = False

    def notify(self, key: Hashable) -> None:
        """Count one more of a key's news."""
        with self._lock:
            self._news[key] += 1
        self._wake()

    def end(self) -> None:
        """End all waits, now and later."""
        self._ended = True
        self._wake()

    async def wait(
        self, key: Hashable, listener: Hashable = "", at_once: bool = False, seconds: float = HELD_SECONDS
    ) -> None:
        """Wait until there are news of this key that the listener has not seen, at most so long.

        `at_once`: the listener then takes all of them; if not, one.
        """
        woken, loop = asyncio.Event(), asyncio.get_running_loop()
        with self._lock:
            self._wakes[woken] = lambda: loop.call_soon_threadsafe(woken.set)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not self._took(key, listener, at_once):
                        await woken.wait()
                        woken.clear()
        finally:
            with self._lock:
                del self._wakes[woken]

    def _wake(self) -> None:
        with self._lock:
            wakes = list(self._wakes.values())
        for wake in wakes:
            with contextlib.suppress(RuntimeError):  # its event loop has ended
                wake()

    def _took(self, key: Hashable, listener: Hashable, at_once: bool) -> bool:
        with self._lock:
            unseen = self._news[key] - self._seen[key, listener]
            if unseen:
                self._seen[key, listener] += unseen if at_once else 1
            return self._ended or unseen > 0


class Incoming:
    """Messages whose parts are on their way, in sessions. When a message is complete, its key is notified."""

    def __init__(self, notify: Callable[[Hashable], None]) -> None:
        self._notify, self._lock = notify, threading.Lock()
        self._sessions: OrderedDict[str, list[tuple[Hashable, set[str]]]] = OrderedDict()

    def announced(self, session: str, key: Hashable, missing: Iterable[str]) -> None:
        """Record a message of a session, and which of its parts are missing."""
        with self._lock:
            self._sessions.setdefault(session, []).append((key, set(missing)))
            while len(self._sessions) > MOST_SESSIONS:
                self._sessions.popitem(last=False)
        self.came(session, "")

    def came(self, session: str, part: str) -> None:
        """Record that a part has come."""
        with self._lock:
            messages = self._sessions.pop(session, [])
            for _, parts in messages:
                parts.discard(part)
            if left := [(key, parts) for key, parts in messages if parts]:
                self._sessions[session] = left
        for key in [key for key, parts in messages if not parts]:
            self._notify(key)


async def held(wait: Wait, receive: Receive) -> Receive | None:
    """Read a request's body, and wait. Return a `receive` with the body; None: the caller disconnected meanwhile.

    A request whose caller has left must not take an order, which no site would carry out.
    """
    waiting = asyncio.ensure_future(wait)
    body: list[Message] = []
    try:
        while not body or body[-1].get("more_body", False):
            body.append(await receive())
        if body[-1]["type"] == "http.disconnect":
            return None
        gone = asyncio.ensure_future(receive())
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        if gone.done() and gone.result()["type"] == "http.disconnect":
            return None
        gone.cancel()
    finally:
        waiting.cancel()

    async def again() -> Message:
        return body.pop(0) if body else await receive()

    return again
