"""A federation on this machine: up, status, logs, down."""

import time
from collections.abc import Callable
from pathlib import Path

from conf.errors import UserError, unknown
from sims.federation import sheets
from sims.federation.machines import START_SECONDS, nodes, registered
from sims.federation.plan import KEYS, SERVER, Plan, sites_of, write_plan
from sims.federation.programs import LOG, Running, free_port, launch, running, stop

JOIN_SECONDS = 90.0
MOST_TOLD = 300  # letters


def up(folder: Path, number: int, tls: bool) -> list[str]:
    """Start a SuperLink and so many nodes, or those whose folders are there already; the sites, when all have joined."""
    if not sites_of(folder):
        sites = [{"name": f"site-{place:04}"} for place in range(number)]
        write_plan(Plan(port=free_port(), tls=tls, sites=sites), folder)
    names = sites_of(folder)
    if not (folder / SERVER / sheets.SERVER).is_file():
        raise UserError(f"{folder}: has no {SERVER}/{sheets.SERVER}; this is no federation's folder")
    start_server(folder)
    for name in names:
        if not running(folder / name):
            launch(folder / name, "federation", "node", sheets.SITE)
    _await(folder, lambda: len(_online(folder)) >= len(names), "the nodes", JOIN_SECONDS, *names)
    return names


def start_server(folder: Path) -> None:
    """Start the SuperLink if it does not run, and wait until it knows all keys."""
    if not running(folder / SERVER):
        launch(folder / SERVER, "federation", "server", ".")
    _await(folder, lambda: _answers(folder), "the SuperLink", START_SECONDS, SERVER)


def down(folder: Path) -> list[str]:
    """Stop what `up` started, the nodes first; what was stopped."""
    return [name for name in [*sites_of(folder), SERVER] if stop(folder / name)]


def status(folder: Path) -> list[list[str]]:
    """A row for each machine of the folder: its name, its processes, what the SuperLink says of it."""
    names = sites_of(folder)
    if not names and not (folder / SERVER).is_dir():
        raise UserError(f"{folder}: is no federation's folder; 'fedloom federation up {folder}' makes one")
    there = running(folder / SERVER)
    online = _online(folder) if there else {}
    rows = [[SERVER, _processes(there), f"{len(online)} nodes online" if there else ""]]
    for name in names:
        id = registered(folder / SERVER / KEYS / f"{name}.pub")
        told = f"node {id}: {online.get(id, 'offline')}" if id else "not authenticated"
        rows.append([name, _processes(running(folder / name)), told])
    return rows


def logs(folder: Path, names: list[str], lines: int) -> list[tuple[str, str]]:
    """The last lines of each machine's log. UserError for a name that is none."""
    known = [SERVER, *sites_of(folder)]
    if odd := [name for name in names if name not in known]:
        raise unknown("machine", odd[0], known)
    found = [(name, folder / name / LOG) for name in names or known]
    return [(name, "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]))
            for name, path in found if path.is_file()]  # fmt: skip


def _answers(folder: Path) -> bool:
    try:
        nodes(folder / SERVER)
    except UserError:
        return False
    keys = list((folder / SERVER / KEYS).glob("*.pub"))
    return all(registered(key) for key in keys)


def _online(folder: Path) -> dict[str, str]:
    return {one["node-id"]: one["status"] for one in nodes(folder / SERVER) if one["status"] == "online"}


def _processes(given: Running) -> str:
    return f"up, process {given.keeper or given.program}" if given else "down"


def _await(folder: Path, there: Callable[[], bool], what: str, seconds: float, *names: str) -> None:
    """Until it is there; UserError with the log's last line if it is not in time, or if a program ended for good."""
    deadline = time.monotonic() + seconds
    while not there():
        if time.monotonic() > deadline:
            told = " ".join(text.splitlines()[-1] for _, text in logs(folder, list(names), 1) if text)
            raise UserError(f"{folder}: {what} did not come within {seconds:g} s: {told[:MOST_TOLD]}")
        time.sleep(0.5)
