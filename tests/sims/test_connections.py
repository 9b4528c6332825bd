"""A door's connections: no flood of them shuts others out."""

import contextlib
import socket
from pathlib import Path

import pytest

from fedloom.sims.federation import connections
from fedloom.sims.federation.bodies import SMALL
from fedloom.sims.federation.doors import Door
from tests.sims.doors import HEAD, everything, head, opened, until


def test_a_flood_of_connections_shuts_no_one_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Neither those that never begin to speak TLS, nor those that never say what they ask for."""
    monkeypatch.setattr(connections, "MOST_UNKNOWN", 8)
    door = Door(everything, lambda path, headers: (0 if path == "/x" else 404, None))
    with opened(door, tmp_path) as say, contextlib.ExitStack() as stack:
        member = stack.enter_context(say.line())
        member.sendall(HEAD + b"\r\na")  # known from here on, and slow
        until(lambda: len(door.crowd) == 0)
        flood = [stack.enter_context(socket.create_connection(("127.0.0.1", say.port))) for _ in range(30)]
        flood += [stack.enter_context(say.line()) for _ in range(30)]
        until(lambda: len(door.crowd) == 8)
        assert say(HEAD + b"Connection: close\r\n\r\nabc").startswith(b"HTTP/1.1 200")
        for line in flood[:50]:  # the oldest ones are closed
            line.settimeout(60)
            with contextlib.suppress(OSError):
                assert not line.recv(1)
        member.sendall(b"bc")
        assert member.recv(99).startswith(b"HTTP/1.1 200")


def test_a_flood_from_one_address_closes_no_connection_of_another(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "MOST_UNKNOWN", 4)
    crowd, pairs = connections.Crowd(), [socket.socketpair() for _ in range(20)]
    crowd.came(("10.0.0.1", 1), pairs[0][0])
    for port, (line, _) in enumerate(pairs[1:]):
        crowd.came(("10.0.0.2", port), line)
    pairs[0][1].setblocking(False)
    with pytest.raises(BlockingIOError):
        pairs[0][1].recv(1)  # it is open
    assert pairs[1][1].recv(1) == b"" and len(crowd) == 4
    for pair in pairs:
        for line in pair:
            line.close()


def test_a_member_closes_its_own_connections_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connections, "MOST_OF_MEMBER", 4)
    door = Door(everything, lambda path, headers: (0, int(headers[b"speaker"])), {"/x": 99})
    with opened(door, tmp_path) as say, contextlib.ExitStack() as stack:
        honest = [stack.enter_context(say.line()) for _ in range(3)]
        for line in honest:
            line.sendall(head(1, 2) + b"a")
        until(lambda: len(door.crowd) == 0 and door.room.held_bytes == 3 * SMALL)
        flood = []
        for number in range(12):
            flood.append(stack.enter_context(say.line()))
            flood[-1].sendall(head(2, 2) + b"a")
            until(lambda number=number: len(door.crowd) == 0 and door.room.held_bytes >= SMALL * (3 + min(number + 1, 4)))
        for line in flood[:8]:
            line.settimeout(60)
            with contextlib.suppress(OSError):
                assert b"200" not in line.recv(99)
        for line in honest + flood[8:]:
            line.sendall(b"b")
            assert line.recv(99).startswith(b"HTTP/1.1 200")
