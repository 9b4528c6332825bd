"""What a door holds of requests' bodies: so many bytes at once, in all and of one speaker, and they must keep coming."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable

from starlette.types import Message, Receive

MOST_BYTES = 128 << 20  # of a request; Flower sends arrays in parts of 5 MiB
MOST_HELD = 512 << 20  # of all requests that are under way at a door
MOST_SHARE = 128 << 20  # of those of one speaker
SMALL = 64 << 10  # a body that never waits for others' (heartbeats, say), and the least that a request counts as
MOST_WAITING = 64  # requests of one speaker that wait for room
ROOM_SECONDS = 10.0  # to wait for room; Flower's programs wait 30 s for an answer, and try again after a 503
PIECE_SECONDS = 60.0  # between two pieces of a body
SLOWEST = 16 << 10  # bytes per second of a body, on the whole


class Full(Exception):
    """There is no room for a body."""


class Room:
    """The bytes of the bodies that are under way at a door: `most` in all, `share` of one speaker."""

    def __init__(self, most: int = MOST_HELD, share: int = MOST_HELD) -> None:
        self._most, self._share = most, share
        self._held: Counter[Hashable] = Counter()
        self._waiting: Counter[Hashable] = Counter()
        self._freed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Of all bodies that are under way now."""
        return self._held.total()

    @contextlib.asynccontextmanager
    async def held(self, speaker: Hashable, size: int) -> AsyncIterator[None]:
        """Hold room for a body as long as its request is under way. Full: there is none, and none becomes free."""
        counted = max(size, SMALL)
        if not self._fits(speaker, counted):
            await self._wait(speaker, counted)
        self._held[speaker] += counted
        try:
            yield
        finally:
            self._held[speaker] -= counted
            self._held += Counter()  # whoever holds nothing is forgotten
            self._freed.set()
            self._freed = asyncio.Event()

    def _fits(self, speaker: Hashable, size: int) -> bool:
        of_all = size <= SMALL or self.held_bytes + size <= self._most
        return of_all and self._held[speaker] + size <= self._share

    async def _wait(self, speaker: Hashable, size: int) -> None:
        """Until there is room."""
        if self._waiting[speaker] >= MOST_WAITING:
            raise Full
        self._waiting[speaker] += 1
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                while not self._fits(speaker, size):
                    await self._freed.wait()
        except TimeoutError:
            raise Full from None
        finally:
            self._waiting[speaker] -= 1
            self._waiting += Counter()


class Measured:
    """What comes of a body, which must not stop coming, nor come by drops for ever."""

    def __init__(self, receive: Receive, size: int) -> None:
        self._receive, self._whole = receive, False
        self._end = time.monotonic() + PIECE_SECONDS + size / SLOWEST

    async def __call__(self) -> Message:
        if self._whole:
            return await self._receive()  # until the caller goes away
        try:
            message = await asyncio.wait_for(self._receive(), min(PIECE_SECONDS, self._end - time.monotonic()))
        except TimeoutError:
            return {"type": "http.disconnect"}
        self._whole = not message.get("more_body", False)
        return message
