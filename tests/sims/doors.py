"""Parts of the tests of doors: a server behind one, what speaks to it, and applications that it may have."""

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from fedloom.sims.federation.connections import Listening, settings
from fedloom.sims.federation.doors import Door
from fedloom.sims.federation.keys import write_certificates

HEAD = b"POST /x HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n"

NO_LOG = {"version": 1, "disable_existing_loggers": False}  # as Flower's: loggers of other tests stay


class Say:
    """What a server answers to bytes on a new connection, until it closes that."""

    def __init__(self, port: int, authority: Path) -> None:
        self.port, self._context = port, ssl.create_default_context(cafile=str(authority))

    def line(self) -> ssl.SSLSocket:
        """A new connection."""
        plain = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        return self._context.wrap_socket(plain, server_hostname="127.0.0.1")

    def __call__(self, text: bytes) -> bytes:
        output = b""
        with self.line() as line, contextlib.suppress(OSError):
            line.sendall(text)
            while piece := line.recv(4096):
                output += piece
        return output


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
    """A server behind the door."""
    write_certificates(folder, ["127.0.0.1"])
    listening = Listening(socket.create_server(("127.0.0.1", 0)), door.crowd)
    words = settings(door, str(folder / "server.crt"), str(folder / "server.key"), NO_LOG)
    server = uvicorn.Server(uvicorn.Config(**words, lifespan="off"))
    port = listening.getsockname()[1]
    thread = threading.Thread(target=lambda: asyncio.run(server._serve([listening])))
    thread.start()
    try:
        yield Say(port, folder / "ca.crt")
    finally:
        server.should_exit = True
        thread.join()


def head(speaker: int, size: int) -> bytes:
    """Of a request whose body is still to come."""
    return b"POST /x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nSpeaker: %d\r\nContent-Length: %d\r\n\r\n" % (speaker, size)


def until(there: Callable[[], bool]) -> None:
    """Wait for it."""
    for _ in range(1000):
        if there():
            return
        threading.Event().wait(0.01)
    pytest.fail("it does not come")
