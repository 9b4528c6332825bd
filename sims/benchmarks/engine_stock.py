"""Flower's own simulation: a small Flower app in a folder, started with `flwr run`; its ServerApp is here."""

import os
import socket
import sys
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedloom.sims.benchmarks.engine_job import Job, keep, read_job
from fedloom.sims.benchmarks.engine_server import CLIENTS, POLL_SECONDS, ROUNDS

BIN = Path(sys.executable).parent
PROJECT = """
[project]
name = "fedloom-bench"
version = "0.1.0"
description = "Stock simulation, measured"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedloom"

[tool.flwr.app.components]
serverapp = "fedloom.sims.benchmarks.engine_stock:app"
clientapp = "{client}"

[tool.flwr.app.config]
job = "{job}"
"""

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the job that the run-config names."""
    job = read_job(Path(str(context.run_config["job"])))
    grid.poll_seconds = POLL_SECONDS  # type: ignore[attr-defined]  # read by Federation; Flower's own loop waits 0.1 s
    keep(job, ROUNDS[job.case.kind](job, grid))


def command(job: Job, path: Path) -> list[str]:
    """Write the Flower app into the job's folder; the command that runs it there."""
    project = PROJECT.format(client=CLIENTS[job.case.kind], job=path)
    folder = job.folder / "app"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(project, encoding="utf-8")
    options = f"num-supernodes={job.case.sites} client-resources-num-cpus=1"
    return [str(BIN / "flwr"), "run", str(folder), "--stream", "--federation-config", options]


def environment(job: Job) -> dict[str, str]:
    """A Flower of our own: home in the job's folder, free ports, nothing sent or installed."""
    return {
        "FLWR_HOME": str(job.folder / "flwr"),
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": str(_free_port()),
        "FLWR_LOCAL_CONTROL_API_PORT": str(_free_port()),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
