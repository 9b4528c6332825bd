"""Fork a process with all imports of a ClientApp for each message of a node: `python -m ... PID APPS`.

Flower's nodes start a program for every message, which needs seconds for its imports. This process ends with the process
PID. Each ClientApp is still a separate process.
"""

import contextlib
import importlib
import json
import os
import random
import signal
import socket
import sys
from pathlib import Path

import numpy as np

from fedloom.server.flower.http_answers import be_wary
from fedloom.sims.federation.executor import DOOR
from fedloom.sims.federation.heartbeats import keep_beating
from fedloom.sims.federation.own_app import be_client_app
from fedloom.sims.process import Ending

LOOK_SECONDS = 2.0  # between two checks whether the node is alive
MOST_BYTES = 1 << 16
PRELOADED = "cryptography.hazmat.backends.openssl dp_accounting.rdp httpcore numpy.ctypeslib torch.utils._device"


def next_words(parent: int) -> list[str] | None:
    """Fork for each message. Return its command line in the forked process; None in this one when the parent ended."""
    Path(DOOR).unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(DOOR)
        door.listen()
        door.settimeout(LOOK_SECONDS)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended children leave no zombies
        while _there(parent):
            with contextlib.suppress(TimeoutError, ValueError):
                line, _ = door.accept()
                with line, line.makefile("rb") as stream:
                    words = json.loads(stream.readline(MOST_BYTES))
                if not os.fork():
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    return words
    return None


def main(parent: int, apps: str) -> None:
    """Wait for messages, and run Flower's program in the forked process of each."""
    ending = Ending()
    from flwr.supernode.cli.flwr_clientapp import flwr_clientapp

    import fedloom.sims.federation.node_app  # noqa: F401
    from fedloom.clients.networks.base import NETWORKS
    from fedloom.clients.objectives.base import OBJECTIVES

    for registry in (NETWORKS, OBJECTIVES):
        registry.load()
    for module in PRELOADED.split():
        importlib.import_module(module)
    be_client_app(apps)
    keep_beating()
    be_wary()
    if (words := next_words(parent)) is not None:
        ending = Ending()  # ends the process before the handlers of imported packages, which take a third of its time
        random.seed()
        np.random.seed()  # noqa: NPY002
        sys.argv = words
        flwr_clientapp()
    ending.leave(0)


def _there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
