"""Limits of the desk: how often one caller may try something, and what every answer's headers allow a browser to do."""

import re
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse

MOST_BODY = 65_536  # bytes of a request's body
MOST_CALLERS = 10_000  # that a limit remembers
CONTENT_POLICY = ("default-src 'none'; style-src 'self'; script-src 'self'; img-src 'self'; connect-src 'self'; "
                  "form-action 'self'; base-uri 'none'; frame-ancestors 'none'")  # fmt: skip
HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_LABEL = re.compile(r"[a-z0-9_-]+")
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass
class RateLimit:
    """Lets each caller act `burst` times at once, and then `per_minute` times a minute."""

    burst: int
    per_minute: float
    _left: dict[str, tuple[float, float]] = field(default_factory=dict)  # by caller: acts left, at this time
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def allows(self, caller: str) -> bool:
        """Count an act of the caller, and return whether it may do it."""
        with self._lock:
            now = time.monotonic()
            left, then = self._left.get(caller, (float(self.burst), now))
            left = min(float(self.burst), left + (now - then) * self.per_minute / 60)
            if len(self._left) > MOST_CALLERS:
                self._left.clear()
            self._left[caller] = max(0.0, left - 1), now
            return left >= 1


class Shield:
    """Refuses requests for other hosts and with large bodies, and adds the headers of HEADERS to every answer.

    `hosts`: the names under which the desk may be called (see `serves`); a web page of another name cannot reach it
    through DNS.
    """

    def __init__(self, app: Callable[[Message, Receive, Send], Awaitable[None]], hosts: frozenset[str], tls: bool) -> None:
        self.app, self.hosts, self.tls = app, hosts, tls

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                headers.setdefault("Cache-Control", "no-store")
                if self.tls:
                    headers["Strict-Transport-Security"] = "max-age=31536000"
            await send(message)

        headers = Headers(scope=scope)
        if not serves(self.hosts, _host(headers)):
            return await PlainTextResponse("This host name is not served here.", 421)(scope, receive, sent)
        if not _fits(headers):
            return await PlainTextResponse("The body is too large, or has no length.", 413)(scope, receive, sent)
        return await self.app(scope, receive, sent)


def serves(names: frozenset[str], host: str) -> bool:
    """Return whether a host has one of the names. `*.example.org` stands for one left-most label (RFC 9525, 6.3).

    A wildcard needs two labels after it, and never stands for an address.
    """
    label, _, parent = host.partition(".")
    wide = bool(_LABEL.fullmatch(label)) and "." in parent and not parent.rpartition(".")[2].isdigit()
    return "*" not in host and (host in names or (wide and f"*.{parent}" in names))


def _host(headers: Headers) -> str:
    """Return the host that was called, without its port; empty unless exactly one was named."""
    named = headers.getlist("host")
    if len(named) != 1:
        return ""
    name, colon, port = named[0].rpartition(":")
    return (name if colon and port.isdigit() else named[0]).strip("[]").lower()


def _fits(headers: Headers) -> bool:
    """Return whether a body is short. One without a stated length (chunked) is refused."""
    length = headers.get("content-length", "0")
    return "transfer-encoding" not in headers and length.isdigit() and len(length) < 10 and int(length) <= MOST_BODY
