"""The engine `flower`: a real federation's nodes, reached over a SuperLink of Flower (flwr 1.41).

A run is submitted whose ServerApp hands its place over (server.flower.relay); from then on this process speaks to the
SuperLink itself, so that progress, reports, resuming and unlearning are what they are with every other engine.
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

from fedloom.conf.errors import UserError
from fedloom.conf.progress import under_way
from fedloom.conf.schema import Config
from fedloom.server.flower.grid import CarefulGrid
from fedloom.server.flower.relay import DONE, SOCKET
from fedloom.server.unlearning.superlink import scrub
from fedloom.sims.engines.share import WHOLE, Share
from fedloom.sims.federation.machines import complaint
from fedloom.sims.federation.plan import CONNECTION, FLOWER, server_of
from fedloom.sims.federation.programs import BIN, environment, running
from fedloom.sims.federation.proxies import none_named, without
from fedloom.sims.federation.sheets import SERVER as SHEET
from fedloom.sims.federation.sheets import read_server

CONFIG = "config.toml"  # in Flower's folder
START_SECONDS = 90.0  # of a ServerApp, on a busy machine
MOST_PLACE = 1 << 20  # bytes of what the ServerApp tells
APP = {
    "project": {"name": "fedloom-relay", "version": "1.0.0", "description": "", "license": "Apache-2.0"},
    "tool": {"flwr": {"app": {
        "publisher": "fedloom",
        "components": {"serverapp": "fedloom.server.flower.relay:app", "clientapp": "fedloom.clients.app:app"},
        "config": {SOCKET: ""},
    }}},
}  # fmt: skip


class FlowerGrid(CarefulGrid):
    """A run's place at a SuperLink. `line`: to the ServerApp that holds it."""

    def __init__(self, place: dict[str, Any], line: socket.socket, told: str, config: Config) -> None:
        root = place["certificates"].encode() if place["certificates"] else None
        super().__init__(place["address"], place["insecure"], root, place["token"])
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = place["run"], place["task"], place["node"]
        self.set_run(Run.create_empty(place["run"]))
        self._line, self._told, self._config = line, told, config

    def describe(self) -> str:
        """Where the nodes are, in a line."""
        return self._told

    def _connect(self) -> None:
        with none_named():
            super()._connect()

    def close(self) -> None:
        """Give the place back: the run is done."""
        with self._line as line:
            line.sendall(DONE)
        super().close()
        scrub(self._config)


def start(config: Config, share: Share = WHOLE) -> FlowerGrid:
    """A run's place at the SuperLink that engine.address names, whose nodes are not divided among runs.

    UserError if there is none, or it takes no run.
    """
    home, connection = _connection(config.engine.address)
    folder = Path(tempfile.mkdtemp(prefix="fedloom-"))  # of this user alone; a socket's path must be short
    try:
        app = folder / "app"
        app.mkdir()
        (app / "pyproject.toml").write_text(tomli_w.dumps(APP), encoding="utf-8")
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(str(folder / SOCKET))
            door.listen(1)
            with under_way("asking the SuperLink for a run"):
                run = _submit(app, connection, folder / SOCKET, home)
            with under_way("waiting for its ServerApp"):
                line, place = _handed_over(door, run)
        return FlowerGrid(place, line, f"engine flower: {config.engine.address}, Flower's run {run}", config)
    finally:
        shutil.rmtree(folder)


def _connection(address: str) -> tuple[dict[str, str], str]:
    """Environment and name by which Flower's own command finds the SuperLink. UserError if it would not."""
    home = server_of(Path(address)) / FLOWER
    if (home.parent / SHEET).is_file():
        read_server(home.parent)
        if not running(home.parent):
            how = f"fedloom federation server {home.parent}, or up"
            raise UserError(f"engine.address: the server of '{address}' does not run on this machine: {how}")
    if home.is_dir():
        return {"FLWR_HOME": str(home.resolve())}, CONNECTION
    if address not in (known := _connections(get_flwr_home() / CONFIG)):
        told = f"Flower's own: {', '.join(known)}" if known else "of Flower's own there is none"
        how = f"'fedloom federation up {address}' makes one"
        where = f"nor a connection in {get_flwr_home() / CONFIG}"
        raise UserError(f"engine.address: '{address}' is no federation's folder ({how}), {where} ({told})")
    return {}, address


def _connections(path: Path) -> list[str]:
    """The names under which a configuration of Flower's keeps SuperLinks. UserError if it cannot be read."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8")).get("superlink", {})
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())}") from None
    return sorted(name for name, one in given.items() if isinstance(one, dict)) if isinstance(given, dict) else []


def _submit(app: Path, connection: str, door: Path, home: dict[str, str]) -> str:
    """Have the SuperLink start the ServerApp; the run's id."""
    words = [str(BIN / "flwr"), "run", str(app), connection, "--run-config", f'{SOCKET}="{door}"', "--format", "json"]
    done = subprocess.run(
        words, env=without(environment(home)), cwd=app, capture_output=True, text=True, timeout=START_SECONDS
    )
    try:
        return str(json.loads(done.stdout)["run-id"])
    except (ValueError, KeyError):
        how = "'fedloom federation status' says how it is"
        raise UserError(f"engine.address: the SuperLink there takes no run ({how}): {complaint(done)}") from None


def _handed_over(door: socket.socket, run: str) -> tuple[socket.socket, dict[str, Any]]:
    """What the ServerApp tells, and the line to it."""
    door.settimeout(START_SECONDS)
    try:
        line, _ = door.accept()
        line.settimeout(START_SECONDS)
        with line.makefile("rb") as told:
            place = json.loads(told.readline(MOST_PLACE))
    except (TimeoutError, ValueError) as error:
        raise UserError(f"engine.address: the ServerApp of Flower's run {run} did not come within {START_SECONDS:g} s; the "
                        "server's log says why ('fedloom federation logs server')") from error  # fmt: skip
    line.settimeout(None)
    return line, place
