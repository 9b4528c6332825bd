"""A network that can be cut: what goes through it stops, as where a cable is pulled, and goes on later."""

import contextlib
import socket
import threading
from collections.abc import Iterator

PIECE = 1 << 16


class Network:
    """Carries connections from `port` of this machine to another one."""

    def __init__(self, to: int) -> None:
        self._door, self._to = socket.create_server(("127.0.0.1", 0)), to
        self._whole = threading.Event()
        self._whole.set()
        self._ends: list[socket.socket] = []
        self.port: int = self._door.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Nothing goes through any more; no one notices."""
        self._whole.clear()

    def mend(self) -> None:
        """It goes through again."""
        self._whole.set()

    def close(self) -> None:
        """End it with all its connections."""
        self.mend()
        for end in [self._door, *self._ends]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._door.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._to))
                self._ends += [near, far]
                for one, other in [(near, far), (far, near)]:
                    threading.Thread(target=self._carry, args=[one, other], daemon=True).start()

    def _carry(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := one.recv(PIECE):
                self._whole.wait()
                other.sendall(piece)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def network(to: int) -> Iterator[Network]:
    """Closed at the end."""
    one = Network(to)
    try:
        yield one
    finally:
        one.close()
