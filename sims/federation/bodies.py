"""Bound the bytes of requests and answers at a door, in all and for one caller, and end those that stop moving."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Hashable

from starlette.types import Message, Receive, Send

MOST_BYTES = 128 << 20  # bytes of a request
LARGEST_PART = 64 << 20  # bytes of a part of a message; Flower sends arrays in parts of 5 MiB
MOST_HELD = 512 << 20  # bytes of all current requests at a door
MOST_SHARE = 128 << 20  # bytes of those of one caller
SMALL = (
    64 << 10
)  # bytes of a body that never waits for other callers (a heartbeat, say), and the least that a request counts
UNFOLDS = 32  # bytes of memory to read one byte of a body that lists small things
MOST_WAITING = 64  # waiting requests of one caller
ROOM_SECONDS = 10.0  # seconds to wait for room; Flower's programs wait 30 s for an answer, and try again after a 503
PIECE_SECONDS = 60.0  # seconds between two pieces of a body
SLOWEST = 16 << 10  # bytes per second of a body or an answer, on average


class Full(Exception):
    """A door has no room for a body."""


class Room:
    """The memory for bodies of current requests at a door: at most `most` bytes in all, `share` bytes for one caller."""

    def __init__(self, most: int = MOST_HELD, share: int = MOST_HELD) -> None:
        self._most, self._share = most, share
        self._held: Counter[Hashable] = Counter()
        self._waiting: Counter[Hashable] = Counter()
        self._freed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """How many bytes are reserved for all current bodies."""
        return self._held.total()

    @contextlib.asynccontextmanager
    async def held(self, speaker: Hashable, size: int, times: int = 1) -> AsyncIterator[Callable[[int], None]]:
        """Reserve `size` bytes for a caller's body during its request. Yields a function that adds bytes of the answer.

        `times`: bytes of memory for each byte of the body. Raises Full if no room becomes free in time.
        """
        counted, small = max(size * times, SMALL), size <= SMALL
        if not self._fits(speaker, counted, small):
            await self._wait(speaker, counted, small)
        self._held[speaker] += counted

        def grow(more: int) -> None:
            nonlocal counted
            counted += more
            self._held[speaker] += more

        try:
            yield grow
        finally:
            self._held[speaker] -= counted
            self._held += Counter()  # drops callers that hold nothing
            self._freed.set()
            self._freed = asyncio.Event()

    def _fits(self, speaker: Hashable, size: int, small: bool) -> bool:
        of_all = small or self.held_bytes + size <= self._most
        return of_all and self._held[speaker] + size <= self._share

    async def _wait(self, speaker: Hashable, size: int, small: bool) -> None:
        """Wait for room. Raises Full if that takes too long."""
        if self._waiting[speaker] >= MOST_WAITING:
            raise Full
        self._waiting[speaker] += 1
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                while not self._fits(speaker, size, small):
                    await self._freed.wait()
        except TimeoutError:
            raise Full from None
        finally:
            self._waiting[speaker] -= 1
            self._waiting += Counter()


class Measured:
    """An ASGI `receive` for a request's body, which disconnects a caller that stops sending or is too slow."""

    def __init__(self, receive: Receive, size: int) -> None:
        self._receive, self._whole = receive, False
        self._end = time.monotonic() + PIECE_SECONDS + size / SLOWEST

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()  # waits until the caller disconnects
        try:
            message = await asyncio.wait_for(self._receive(), min(PIECE_SECONDS, self._end - time.monotonic()))
        except TimeoutError:
            return {"type": "http.disconnect"}
        self._whole = not message.get("more_body", False)
        return message


class Answered:
    """An ASGI `send` that sends an answer in pieces; each waits until the caller has read most of the previous ones.

    `grow`: counts the bytes that wait for the caller. Raises TimeoutError if the caller does not read them.
    """

    def __init__(self, send: Send, grow: Callable[[int], None]) -> None:
        self._send, self._grow = send, grow

    async def __call__(self, message: Message) -> None:
        body = message.get("body", b"")
        if len(body) <= SMALL:
            return await self._in_time(message, PIECE_SECONDS)
        self._grow(len(body))
        end = time.monotonic() + PIECE_SECONDS + len(body) / SLOWEST
        for start in range(0, len(body), SMALL):
            more = start + SMALL < len(body) or message.get("more_body", False)
            piece = {**message, "body": body[start : start + SMALL], "more_body": more}
            await self._in_time(piece, min(PIECE_SECONDS, end - time.monotonic()))
        return None

    async def _in_time(self, message: Message, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            await self._send(message)
