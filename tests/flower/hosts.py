"""Machines of a network, each with an address of its own, made of Linux' network namespaces. Needs root and `ip`."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

NET = "10.219.87"


def why_not() -> str:
    """Why there can be no such machines here; empty: there can."""
    if os.geteuid():
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "network namespaces need the command ip"
    try:
        with network(["probe"]):
            return ""
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"


def address(place: int) -> str:
    """Of the machine at a place of the network."""
    return f"{NET}.{place + 1}"


@contextmanager
def network(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """Machines that reach each other and nothing else: the namespace of each, by its name."""
    tag = f"fl{os.getpid()}"
    bridge, spaces = f"{tag}b", {name: f"{tag}{name}" for name in names}
    _ip("link", "add", bridge, "type", "bridge")
    try:
        _ip("link", "set", bridge, "up")
        for place, space in enumerate(spaces.values()):
            near, far = f"{tag}n{place}", f"{tag}f{place}"
            _ip("netns", "add", space)
            _ip("link", "add", near, "type", "veth", "peer", "name", far)
            _ip("link", "set", far, "netns", space)
            _ip("link", "set", near, "master", bridge, "up")
            _ip("-n", space, "addr", "add", f"{address(place)}/24", "dev", far)
            _ip("-n", space, "link", "set", far, "up")
            _ip("-n", space, "link", "set", "lo", "up")
            subprocess.run(["ip", "netns", "exec", space, "true"], check=True, capture_output=True, text=True)
        yield spaces
    finally:
        for space in spaces.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def at(space: str, *words: str) -> list[str]:
    """The command line that does this on a machine."""
    return ["ip", "netns", "exec", space, *words]


def listening(space: str) -> list[tuple[str, int]]:
    """Addresses and ports at which something listens on a machine."""
    done = subprocess.run(at(space, "cat", "/proc/net/tcp"), capture_output=True, text=True, check=True)
    lines = [line.split() for line in done.stdout.splitlines()[1:]]
    return [_read(line[1]) for line in lines if line[3] == "0A"]


def _read(text: str) -> tuple[str, int]:
    host, port = text.split(":")
    return ".".join(str(part) for part in reversed(bytes.fromhex(host))), int(port, 16)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
