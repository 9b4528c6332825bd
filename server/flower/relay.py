"""The ServerApp of runs that `fedloom` itself conducts (engine.name=flower).

It passes its connection to the SuperLink to the process that conducts the run, and ends with that process. The process
listens on a socket in a folder that only its user can open. The run-config names the socket.
"""

import json
import socket

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.task_identity import TaskIdentity  # flwr 1.41, as in sims/engines/adapter.py
from flwr.superlink.grid.http_grid import HttpGrid

SOCKET = "socket"  # key in the run-config
DONE = b"done"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Send the process at the socket what it needs to reach the SuperLink as this run, and wait until it has finished.

    Raises:
        RuntimeError: The process ended without a final message, so the run has failed.
    """
    if not isinstance(grid, HttpGrid):
        raise TypeError(
            f"server.flower.relay: a {type(grid).__name__} cannot be passed on; only runs of a SuperLink can use this app"
        )
    connection = {
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
        line.sendall(json.dumps(connection).encode() + b"\n")
        if line.recv(len(DONE)) != DONE:
            raise RuntimeError("the process that conducts this run ended before it was done")
