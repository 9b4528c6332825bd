"""Bound the connections at a door: heads must arrive in time, and unknown callers cannot displace members."""

import contextlib
import socket
import threading
from asyncio import TimerHandle, Transport
from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Any

from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 20.0  # for the complete head of a request
MOST_UNKNOWN = 512  # connections whose callers are not identified yet
MOST_OF_MEMBER = 64  # connections of one member; its node uses ten
MOST_CONNECTIONS = 4096  # in all; further requests get the answer 503

Peer = tuple[str, int]  # address and port of a caller


class Crowd:
    """The connections at a door: those with unknown callers, and those of each member.

    A member with too many connections loses its oldest one. If there are too many unknown callers, the address with the
    most of them loses its oldest one. So a flood from one address cannot close connections of others.

    `of_member`: the most connections of one member.
    """

    def __init__(self, of_member: int = 0) -> None:
        self._of_member = of_member or MOST_OF_MEMBER
        self._unknown: dict[Peer, socket.socket] = {}
        self._known: dict[Hashable, dict[Peer, socket.socket]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._unknown)

    def came(self, peer: Peer, line: socket.socket) -> None:
        """Record a new connection `line`, whose caller is unknown. Close another one if there are too many."""
        with self._lock:
            if len(self._unknown) >= MOST_UNKNOWN:
                self._unknown = _open(self._unknown)
            if len(self._unknown) >= MOST_UNKNOWN:
                most = Counter(host for host, _ in self._unknown).most_common(1)[0][0]
                oldest = next(peer for peer in self._unknown if peer[0] == most)
                _close(self._unknown.pop(oldest))
            self._unknown[peer] = line

    def known(self, peer: Peer, member: Hashable = None) -> None:
        """Record that the caller at an address is this member, or a program of this machine (None)."""
        with self._lock:
            line = self._unknown.pop(peer, None)
            if line is None or member is None:
                return
            lines = self._known.setdefault(member, {})
            if len(lines) >= self._of_member:
                lines = self._known[member] = _open(lines)
            if len(lines) >= self._of_member:
                _close(lines.pop(next(iter(lines))))
            lines[peer] = line


def _open(lines: Mapping[Peer, socket.socket]) -> dict[Peer, socket.socket]:
    return {peer: line for peer, line in lines.items() if line.fileno() >= 0}


def _close(line: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        line.shutdown(socket.SHUT_RDWR)


class Listening(socket.socket):
    """A listening socket that takes over another one, and records each new connection in a crowd."""

    def __init__(self, listening: socket.socket, crowd: Crowd) -> None:
        super().__init__(fileno=listening.detach())
        self._crowd = crowd

    def accept(self) -> tuple[socket.socket, Any]:
        """Return the next connection and the address of its caller."""
        line, peer = super().accept()
        self._crowd.came((str(peer[0]), int(peer[1])), line)
        return line, peer


class Patient(H11Protocol):
    """Uvicorn's HTTP/1.1, with a time limit for the head of a request, so that silent callers lose their connection."""

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
    """Return the arguments of uvicorn.Config for a server with this door as its `app`."""
    return {
        "app": app, "http": Patient, "ws": "none", "ssl_certfile": certificate, "ssl_keyfile": key, "log_config": log_config,
        "server_header": False, "proxy_headers": False, "access_log": False, "timeout_graceful_shutdown": 3,
        "limit_concurrency": MOST_CONNECTIONS,
    }  # fmt: skip
