"""Run a federation on this machine: up, status, logs, down."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from subprocess import Popen

from fedloom.conf.errors import UserError, plain, unknown
from fedloom.conf.formatting import count
from fedloom.sims.federation import sheets
from fedloom.sims.federation.keys import check_validity
from fedloom.sims.federation.machines import START_SECONDS, refuse_port, registered
from fedloom.sims.federation.plan import KEYS, SERVER, Plan, machines_of, server_of, sites_of, write_plan
from fedloom.sims.federation.programs import LOG, Running, free_port, launch, running, stop

JOIN_SECONDS = 90.0
LOOK_SECONDS = 0.2  # between two checks whether machines have started
MOST_REASON = 300  # characters
OUTDATED = f"with settings from before {sheets.SITE} was changed; restart it"
DOWN, UNWATCHED = "down", "which nothing restarts if it ends"


def up(folder: Path, number: int, tls: bool = True) -> list[str]:
    """Start a SuperLink and `number` nodes, or those with existing folders. Return the sites when all have joined."""
    if not sites_of(folder):
        sites = [{"name": f"site-{index:04}"} for index in range(number)]
        write_plan(Plan(port=free_port(), tls=tls, sites=sites), folder)
    names = sites_of(folder)
    if not (folder / SERVER / sheets.SERVER).is_file():
        raise UserError(f"{folder}: has no {SERVER}/{sheets.SERVER}, so it is not the folder of a federation; name another")
    start_server(folder)
    stopped = [name for name in names if not running(folder / name)]
    started = {name: launch(folder / name, "federation", "node", sheets.SITE) for name in stopped}
    _await(folder, lambda: _all_online(folder / SERVER, len(names)), "the nodes", JOIN_SECONDS, names, started)
    return names


def start_server(folder: Path) -> None:
    """Start the SuperLink if it is not running, and wait until it knows all keys.

    Raises:
        UserError: A file is missing, a certificate is not valid at this moment, or the SuperLink does not start.
    """
    started = {}
    if not running(folder / SERVER):
        sheet = sheets.read_server(folder / SERVER)
        refuse_port(folder / SERVER, sheet)
        for file in filter(None, (sheet.certificate, sheet.authority)):
            try:
                check_validity(folder / SERVER / file)
            except UserError as error:
                raise UserError(f"{folder / SERVER}: {error}") from None
        started = {SERVER: launch(folder / SERVER, "federation", "server", ".")}
    _await(folder, lambda: _answers(folder), "the SuperLink", START_SECONDS, [SERVER], started)


def outdated(folder: Path) -> list[str]:
    """Return a line for each running node whose settings were changed after it started."""
    homes = [folder / name for name in sites_of(folder)]
    return [f"{home.name}: is up {OUTDATED} with 'fedloom federation down {home}', then 'up'"
            for home in homes if running(home) and sheets.is_outdated(home)]  # fmt: skip


def down(folder: Path) -> list[str]:
    """Stop the machines of the folder, the nodes first, and return the names of those that were running."""
    return [_name(home) for home in reversed(machines_of(folder)) if stop(home)]


def status(folder: Path) -> list[list[str]]:
    """Return a row for each machine of the folder: its name, its processes, its state at the SuperLink."""
    server, online = server_of(folder), {}
    summary = ""
    if running(server):
        try:
            online = _online(server)
            summary = f"{count(len(online), 'node')} online"
        except UserError as error:
            summary = str(error)
    rows = []
    for home in machines_of(folder):
        seen = summary
        if home != server:
            seen = _seen(server, home.name, online) if server.is_dir() else "see the server's machine"
        now = running(home)
        changed = f", {OUTDATED}" if now and home != server and sheets.is_outdated(home) else ""
        rows.append([_name(home), f"{_processes(now)}{changed}", seen])
    return rows


def ailing(rows: list[list[str]]) -> list[str]:
    """Return the names of machines that are not running, or not online at the server, in the rows of `status`."""
    seen = ("", "see the server's machine")
    return [
        name for name, here, there in rows
        if here == DOWN or UNWATCHED in here or not (there in seen or there.endswith((" online", ": online")))
    ]  # fmt: skip


def _name(home: Path) -> str:
    return home.resolve().name


def _seen(server: Path, site: str, online: Mapping[str, str]) -> str:
    """Return the state of a site at the SuperLink."""
    id = registered(server / KEYS / f"{site}.pub")
    return f"node {id}: {online.get(id, 'offline')}" if id else "not authenticated"


def logs(folder: Path, names: list[str], lines: int) -> list[tuple[str, str]]:
    """Return (machine, last lines of its log) for each machine. Raises UserError for an unknown machine."""
    homes = {_name(home): home for home in machines_of(folder)}
    if odd := [name for name in names if name not in homes]:
        raise unknown("machine", odd[0], homes)
    files = [(name, homes[name] / LOG) for name in names or homes]
    if not any(path.is_file() for _, path in files):
        raise UserError(f"{folder}: has no log of {', '.join(names) or 'any machine'}; start a machine first")
    texts = [(name, path.read_text(encoding="utf-8", errors="replace")) for name, path in files if path.is_file()]
    return [(name, plain("\n".join(text.splitlines()[-lines:]), lines=True)) for name, text in texts]


def _answers(folder: Path) -> bool:
    if not all(registered(key) for key in (folder / SERVER / KEYS).glob("*.pub")):
        return False
    try:
        _online(folder / SERVER)
    except UserError:
        return False
    return True


def _all_online(server: Path, number: int) -> bool:
    try:
        return len(_online(server)) >= number
    except UserError:
        return False  # the server is restarting


def _online(server: Path) -> dict[str, str]:
    from fedloom.sims.federation.control import nodes

    return {id: status for id, status in nodes(server).items() if status == "online"}


def _processes(found: Running) -> str:
    if found and not found.keeper:
        return f"process {found.program}, {UNWATCHED}; stop it with 'down' and start it again"
    return f"up, process {found.keeper}" if found else DOWN


def _await(
    folder: Path, ready: Callable[[], bool], what: str, seconds: float, names: list[str], started: Mapping[str, Popen[bytes]]
) -> None:
    """Wait until `ready`. `started`: processes of machines, among those in `names`.

    Raises UserError with the last lines of the machines' logs after `seconds`, or of those whose process has ended.
    """
    begin = time.monotonic()
    while not ready():
        waited = time.monotonic() - begin
        ended = [name for name, process in started.items() if process.poll() is not None]
        if ended or waited > seconds:
            last = "; ".join(f"{name}: {text.removeprefix('fedloom: ')[:MOST_REASON]}"
                             for name, text in logs(folder, ended or names, 1))  # fmt: skip
            raise UserError(f"{folder}: {what} did not start within {waited:.0f} s. {last}")
        time.sleep(LOOK_SECONDS)
