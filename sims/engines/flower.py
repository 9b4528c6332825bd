"""The flower engine reaches the nodes of a real federation through Flower's SuperLink (flwr 1.41).

It submits a run whose ServerApp passes its connection data to this process (server.flower.relay). Then this process speaks
to the SuperLink, so progress, reports, resuming and unlearning work as with all other engines.
"""

import json
import shutil
import socket
import subprocess
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.supercore.utils import get_flwr_home

from fedloom.conf.errors import UserError, plain
from fedloom.conf.progress import under_way
from fedloom.conf.schema import Config
from fedloom.server.flower.grid import CarefulGrid
from fedloom.server.flower.relay import DONE, SOCKET
from fedloom.server.unlearning.superlink import scrub
from fedloom.sims.engines.share import WHOLE, Share
from fedloom.sims.federation.control import start_run
from fedloom.sims.federation.plan import FLOWER, server_of, sites_of
from fedloom.sims.federation.programs import BIN, environment, running
from fedloom.sims.federation.proxies import none_named, without
from fedloom.sims.federation.sheets import SERVER as SHEET
from fedloom.sims.federation.sheets import read_server

CONFIG = "config.toml"  # in Flower's folder
START_SECONDS = 90.0  # for a ServerApp to start on a busy machine
MOST_TOLD = 300  # characters of a program's output
MOST_PLACE = 1 << 20  # bytes of the ServerApp's connection data
APP = {
    "project": {"name": "fedloom-relay", "version": "1.0.0", "description": "", "license": "Apache-2.0"},
    "tool": {"flwr": {"app": {
        "publisher": "fedloom",
        "components": {"serverapp": "fedloom.server.flower.relay:app", "clientapp": "fedloom.sims.federation.node_app:app"},
        "config": {SOCKET: ""},
    }}},
}  # fmt: skip


class FlowerGrid(CarefulGrid):
    """The Grid of a run at a SuperLink. `place`: its connection data; `line`: the socket to its ServerApp."""

    def __init__(self, place: dict[str, Any], line: socket.socket, description: str, config: Config) -> None:
        root = place["certificates"].encode() if place["certificates"] else None
        super().__init__(place["address"], place["insecure"], root, place["token"])
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = place["run"], place["task"], place["node"]
        self.set_run(Run.create_empty(place["run"]))
        self._line, self._description, self._config = line, description, config

    def describe(self) -> str:
        """Return the federation's address and Flower's run."""
        return self._description

    def _connect(self) -> None:
        with none_named():
            super()._connect()

    def close(self) -> None:
        """End the run at the SuperLink."""
        with self._line as line:
            line.sendall(DONE)
        super().close()
        scrub(self._config)


def start(config: Config, share: Share = WHOLE) -> FlowerGrid:
    """Start a run at the SuperLink that engine.address names, and return its Grid. `share` is unused: nodes are not divided.

    Raises:
        UserError: The SuperLink does not run, or refuses the run.
    """
    server = _server(config.engine.address)
    folder = Path(tempfile.mkdtemp(prefix="fedloom-"))  # for this user only; a socket's path must be short
    try:
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(folder / SOCKET))
            door.listen(1)
            with under_way("asking the SuperLink for a run"):
                run = _submit(server, config.engine.address, folder)
            with under_way("waiting for the run's ServerApp"):
                line, place = _handed_over(door, run)
        return FlowerGrid(place, line, f"engine flower: {config.engine.address}, Flower's run {run}", config)
    finally:
        shutil.rmtree(folder)


def _server(address: str) -> Path | None:
    """The server's folder that an address names; None: a connection of Flower's own. Raises UserError for neither."""
    home = server_of(Path(address)) / FLOWER
    if (home.parent / SHEET).is_file():
        read_server(home.parent)
        if not running(home.parent):
            all_of_it = f", or all of it with `fedloom federation up {address}`" if sites_of(Path(address)) else ""
            how = f"start it with `fedloom federation server {home.parent}`{all_of_it}"
            raise UserError(f"engine.address: the server of '{address}' does not run on this machine: {how}")
    if home.is_dir():
        return home.parent
    if address not in (known := _connections(get_flwr_home() / CONFIG)):
        connections = f"it has {', '.join(known)}" if known else "it has none"
        raise UserError(f"engine.address: '{address}' is not a federation's folder (`fedloom federation up {address}` makes "
                        f"one), nor a connection in {get_flwr_home() / CONFIG} ({connections})")  # fmt: skip
    return None


def _connections(path: Path) -> list[str]:
    """The names of the SuperLinks in Flower's configuration file. Raises UserError if it cannot be read."""
    try:
        section = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    return sorted(name for name, link in section.items() if isinstance(link, dict)) if isinstance(section, dict) else []


def _submit(server: Path | None, address: str, folder: Path) -> str:
    """Make the SuperLink start the ServerApp; return the run's id. `folder`: has the socket, and room for the app."""
    how = "see `fedloom federation status`"
    if server is not None:
        try:
            return start_run(server, tomli_w.dumps(APP), {SOCKET: str(folder / SOCKET)})
        except UserError as error:
            raise UserError(f"engine.address: the SuperLink refused the run ({how}): {error}") from None
    app = folder / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(tomli_w.dumps(APP), encoding="utf-8")
    words = ["run", str(app), address, "--run-config", f'{SOCKET}="{folder / SOCKET}"', "--format", "json"]
    done = subprocess.run(
        [str(BIN / "flwr"), *words],
        env=without(environment()),
        cwd=app,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    try:
        return str(json.loads(done.stdout)["run-id"])
    except (ValueError, KeyError):
        raise UserError(f"engine.address: the SuperLink refused the run ({how}): {_complaint(done)}") from None


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    """Return the error message of a failed Flower command as one line."""
    try:
        message = str(json.loads(done.stdout)["error-message"])
    except (ValueError, LookupError, TypeError):
        message = done.stdout + done.stderr
    return plain(" ".join(message.split()))[-MOST_TOLD:]


def _handed_over(door: socket.socket, run: str) -> tuple[socket.socket, dict[str, Any]]:
    """The socket to the ServerApp, and the connection data that it sent."""
    door.settimeout(START_SECONDS)
    try:
        line, _ = door.accept()
        line.settimeout(START_SECONDS)
        with line.makefile("rb") as file:
            place = json.loads(file.readline(MOST_PLACE))
    except (TimeoutError, ValueError) as error:
        raise UserError(f"engine.address: the ServerApp of Flower's run {run} did not start within {START_SECONDS:g} s; see "
                        "the server's log (`fedloom federation logs server`)") from error  # fmt: skip
    line.settimeout(None)
    return line, place
