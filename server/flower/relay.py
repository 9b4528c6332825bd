"""The ServerApp of runs that `fedloom` itself conducts (engine.name=flower): it hands its place at the SuperLink to the
process that asked for it, and ends with it.

That process listens on a socket in a folder which only its user can open; the run-config names it.
"""

import json
import socket

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity  # flwr 1.41, as in sims/engines/adapter.py
from flwr.superlink.grid.http_grid import HttpGrid

SOCKET = "socket"  # the run-config's key
DONE = b"done"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Tell the process at the socket how to reach the SuperLink as this run, and wait until it is done.

    Raises RuntimeError if it goes away without a word: the run has failed, then.
    """
    if not isinstance(grid, HttpGrid):
        raise TypeError(
            f"fedloom.server.flower.relay: a {type(grid).__name__} cannot be handed over; this is for a SuperLink's runs"
        )
    place = {
        "address": grid._addr,
        "insecure": grid._insecure,
        "certificates": grid._cert.decode() if grid._cert else None,
        "token": grid._token,
        "run": TaskIdentity.run_id,
        "task": TaskIdentity.task_id,
        "node": TaskIdentity.node_id,
    }
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(str(context.run_config[SOCKET]))
        line.sendall(json.dumps(place).encode() + b"\n")
        if line.recv(len(DONE)) != DONE:
            raise RuntimeError("the process that conducts this run ended before it was done")
