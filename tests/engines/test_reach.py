"""A cluster that does not answer: reported within a stated time, by address, and an interruption is heard meanwhile."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest

from fedloom.conf import UserError, load
from fedloom.sims.engines import open_engine, reach
from fedloom.sims.engines.reach import ANSWER_SECONDS


@pytest.fixture
def mute() -> Iterator[socket.socket]:
    """A program that takes connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening


def port_of(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])


@pytest.fixture
def other() -> Iterator[str]:
    """Where a gRPC server answers that is not Ray's."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_one_who_listens_and_never_replies_is_abandoned_with_its_address(mute: socket.socket, scheme: str):
    address = f"{scheme}127.0.0.1:{port_of(mute)}"
    with pytest.raises(
        UserError, match=re.escape(f"engine.address: there is no Ray cluster at {address} (no answer within 1 s)")
    ):
        reach.reach(address, seconds=1.0)


def test_a_closed_port_is_one_clear_line(tmp_path: Path):
    config = load("digits", ["engine.name=ray", "engine.address=127.0.0.1:1", f"run.root={tmp_path}"])
    with pytest.raises(UserError) as caught, open_engine(config):
        pass
    message = str(caught.value)
    assert message.startswith("engine.address: there is no Ray cluster at 127.0.0.1:1 (Connection refused)")
    assert (
        "ray start --head --port=6379" in message and "ray status --address=127.0.0.1:1" in message and "\n" not in message
    )


def test_a_server_of_another_kind_is_none_of_rays(other: str):
    for address in (other, f"ray://{other}"):
        with pytest.raises(UserError, match=f"at {address} .what answers there is not Ray's"):
            reach.reach(address)


@pytest.mark.parametrize("address", ["local", "machine", "machine:port", "machine:70000", ":6379", "http://machine:6379"])
def test_what_is_not_an_address_says_what_is(address: str):
    with pytest.raises(UserError, match=f"engine.address: got {address}, takes HOST:PORT"):
        reach.reach(address)


def test_auto_is_where_the_environment_says(mute: socket.socket, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port_of(mute)}")
    with pytest.raises(UserError, match=f"at 127.0.0.1:{port_of(mute)} "):
        reach.reach("auto", seconds=0.5)


@pytest.mark.slow
def test_an_interruption_ends_the_wait_for_a_cluster(tmp_path: Path, mute: socket.socket):
    words = [f"engine.address=127.0.0.1:{port_of(mute)}", f"run.root={tmp_path}"]
    command = [sys.executable, "-m", "fedloom.sims.cli", "run", "digits", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            mute.settimeout(120)
            with mute.accept()[0]:  # it waits for an answer from here on
                running.send_signal(signal.SIGTERM)
                output = running.communicate(timeout=0.75 * ANSWER_SECONDS)[1]
        finally:
            running.kill()
    assert running.returncode == 130 and "interrupted" in output
