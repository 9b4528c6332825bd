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
MOST_MISSING = 200_000  # parts that are on their way, in all sessions; of the oldest sessions, none is awaited

Wait = Coroutine[Any, Any, bool]
Wake = Callable[[], None]


class Signals:
    """Counts the news of each key, and wakes who waits for them. Any thread may notify."""

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), False
        self._news: Counter[Hashable] = Counter()
        self._seen: Counter[tuple[Hashable, Hashable]] = Counter()
        self._waits: dict[Hashable, dict[Hashable, Wake]] = {}  # by key and listener

    def notify(self, key: Hashable) -> None:
        """Count one more of a key's news."""
        with self._lock:
            self._news[key] += 1
            wakes = list(self._waits.get(key, {}).values())
        _call(wakes)

    def end(self) -> None:
        """End all waits, now and later."""
        with self._lock:
            self._ended = True
            wakes = [wake for waits in self._waits.values() for wake in waits.values()]
        _call(wakes)

    async def wait(
        self, key: Hashable, listener: Hashable = "", at_once: bool = False, seconds: float = HELD_SECONDS
    ) -> bool:
        """Wait for news of a key that the listener has not taken yet, and take them.

        Args:
            key: What the news are about.
            listener: Who waits. Each listener takes all news once.
            at_once: Take all news; False: one.
            seconds: The longest wait.

        Returns:
            True; False if a newer wait of the same listener has begun, because the older connection may be dead. Then
            nothing is taken.
        """
        woken, loop = asyncio.Event(), asyncio.get_running_loop()

        def wake() -> None:
            loop.call_soon_threadsafe(woken.set)

        with self._lock:
            waits = self._waits.setdefault(key, {})
            older, waits[listener] = waits.get(listener), wake
        _call([older] if older else [])
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while not self._over(key, listener, at_once, wake):
                        await woken.wait()
                        woken.clear()
            return self._is_newest(key, listener, wake)
        finally:
            with self._lock:
                if self._is_newest(key, listener, wake):
                    del self._waits[key][listener]
                    if not self._waits[key]:
                        del self._waits[key]

    def _over(self, key: Hashable, listener: Hashable, at_once: bool, wake: Wake) -> bool:
        """Return whether a wait ends. It takes news, if there are any and it is the newest."""
        with self._lock:
            if self._ended or not self._is_newest(key, listener, wake):
                return True
            unseen = self._news[key] - self._seen[key, listener]
            if unseen:
                self._seen[key, listener] += unseen if at_once else 1
            return unseen > 0

    def _is_newest(self, key: Hashable, listener: Hashable, wake: Wake) -> bool:
        return self._waits.get(key, {}).get(listener) is wake


def _call(wakes: Iterable[Wake]) -> None:
    for wake in wakes:
        with contextlib.suppress(RuntimeError):  # its event loop has ended
            wake()


class Incoming:
    """Track messages whose parts arrive one by one, and call `notify` with a message's key when it has all its parts.

    A message belongs to a session, which `forget` drops.
    """

    def __init__(self, notify: Callable[[Hashable], None]) -> None:
        self._notify, self._lock, self._missing = notify, threading.Lock(), 0
        self._sessions: OrderedDict[str, list[tuple[Hashable, set[str]]]] = OrderedDict()

    def announced(self, session: str, key: Hashable, missing: Iterable[str]) -> None:
        """Record a message of a session, and which of its parts are missing."""
        with self._lock:
            self._sessions.setdefault(session, []).append((key, parts := set(missing)))
            self._missing += len(parts)
            while self._missing > MOST_MISSING:
                self._taken(next(iter(self._sessions)))
        self.came(session, "")

    def came(self, session: str, part: str) -> None:
        """Record that a part has come."""
        with self._lock:
            messages = self._taken(session)
            for _, parts in messages:
                parts.discard(part)
            if left := [(key, parts) for key, parts in messages if parts]:
                self._sessions[session] = left
                self._missing += sum(len(parts) for _, parts in left)
        for key in [key for key, parts in messages if not parts]:
            self._notify(key)

    def forget(self, session: str) -> None:
        """Forget the messages of a session."""
        with self._lock:
            self._taken(session)

    def _taken(self, session: str) -> list[tuple[Hashable, set[str]]]:
        messages = self._sessions.pop(session, [])
        self._missing -= sum(len(parts) for _, parts in messages)
        return messages


async def held(wait: Wait, receive: Receive) -> Receive | None:
    """Read a request's body, and wait. Return a `receive` with the body; None: the caller has left, or asks anew.

    A request whose caller has left must not take an order, which no site would carry out.
    """
    body: list[Message] = []
    while not body or body[-1].get("more_body", False):
        body.append(await receive())
    if body[-1]["type"] == "http.disconnect":
        wait.close()
        return None
    waiting, gone = asyncio.ensure_future(wait), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
        left = gone.done() and gone.result()["type"] == "http.disconnect"
        if left or not await waiting:
            return None
    finally:
        for task in (waiting, gone):
            task.cancel()

    async def again() -> Message:
        return body.pop(0) if body else await receive()

    return again
