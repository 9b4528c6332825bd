"""A federation on this machine: up, status, logs, down."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from fedloom.conf.errors import UserError, plain, unknown
from fedloom.conf.formatting import count
from fedloom.sims.federation import sheets
from fedloom.sims.federation.machines import START_SECONDS, nodes, refuse_port, registered
from fedloom.sims.federation.plan import KEYS, SERVER, Plan, machines_of, server_of, sites_of, write_plan
from fedloom.sims.federation.programs import LOG, Running, free_port, launch, running, stop

JOIN_SECONDS = 90.0
MOST_TOLD = 300  # letters
DOWN, UNWATCHED = "down", "which nothing restarts if it ends"


def up(folder: Path, number: int, tls: bool = True) -> list[str]:
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
    _await(folder, lambda: _all_online(folder / SERVER, len(names)), "the nodes", JOIN_SECONDS, *names)
    return names


def start_server(folder: Path) -> None:
    """Start the SuperLink if it does not run, and wait until it knows all keys."""
    if not running(folder / SERVER):
        refuse_port(folder / SERVER, sheets.read_server(folder / SERVER))
        launch(folder / SERVER, "federation", "server", ".")
    _await(folder, lambda: _answers(folder), "the SuperLink", START_SECONDS, SERVER)


def down(folder: Path) -> list[str]:
    """Stop the machines of the folder, the nodes first; what was stopped. UserError for one that holds none."""
    return [_name(home) for home in reversed(machines_of(folder)) if stop(home)]


def status(folder: Path) -> list[list[str]]:
    """A row for each machine of the folder, or for the one that it is: its name, its processes, what the SuperLink says."""
    server = server_of(folder)
    there = running(server)
    online = _online(server) if there else {}
    rows = []
    for home in machines_of(folder):
        told = f"{count(len(online), 'node')} online" if there else ""
        if home != server:
            told = _seen(server, home.name, online) if server.is_dir() else "see the server's machine"
        rows.append([_name(home), _processes(running(home)), told])
    return rows


def ailing(rows: list[list[str]]) -> list[str]:
    """Machines of a status that are not up, or that the server does not see."""
    seen = ("", "see the server's machine")
    return [
        name for name, here, there in rows
        if here == DOWN or UNWATCHED in here or not (there in seen or there.endswith((" online", ": online")))
    ]  # fmt: skip


def _name(home: Path) -> str:
    return home.resolve().name


def _seen(server: Path, site: str, online: Mapping[str, str]) -> str:
    """What the SuperLink says of a site."""
    id = registered(server / KEYS / f"{site}.pub")
    return f"node {id}: {online.get(id, 'offline')}" if id else "not authenticated"


def logs(folder: Path, names: list[str], lines: int) -> list[tuple[str, str]]:
    """The last lines of each machine's log. UserError for a name that is none."""
    homes = {_name(home): home for home in machines_of(folder)}
    if odd := [name for name in names if name not in homes]:
        raise unknown("machine", odd[0], homes)
    found = [(name, homes[name] / LOG) for name in names or homes]
    if not any(path.is_file() for _, path in found):
        raise UserError(
            f"{folder}: there is no log of {', '.join(names) or 'any machine'}: nothing has run in its folder yet"
        )
    texts = [(name, path.read_text(encoding="utf-8", errors="replace")) for name, path in found if path.is_file()]
    return [(name, plain("\n".join(text.splitlines()[-lines:]), lines=True)) for name, text in texts]


def _answers(folder: Path) -> bool:
    if not all(registered(key) for key in (folder / SERVER / KEYS).glob("*.pub")):
        return False
    try:
        nodes(folder / SERVER)
    except UserError:
        return False
    return True


def _all_online(server: Path, number: int) -> bool:
    try:
        return len(_online(server)) >= number
    except UserError:
        return False  # it is coming back


def _online(server: Path) -> dict[str, str]:
    return {one["node-id"]: one["status"] for one in nodes(server) if one["status"] == "online"}


def _processes(given: Running) -> str:
    if given and not given.keeper:
        return f"process {given.program}, {UNWATCHED}: 'down', then start it again"
    return f"up, process {given.keeper}" if given else DOWN


def _await(folder: Path, there: Callable[[], bool], what: str, seconds: float, *names: str) -> None:
    """Until it is there; UserError with the log's last line if it is not in time, or if a program ended for good."""
    deadline = time.monotonic() + seconds
    while not there():
        if time.monotonic() > deadline:
            told = " ".join(text.splitlines()[-1] for _, text in logs(folder, list(names), 1) if text)
            raise UserError(f"{folder}: {what} did not come within {seconds:g} s: {told[:MOST_TOLD]}")
        time.sleep(0.5)
