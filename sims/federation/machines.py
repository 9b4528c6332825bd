"""Run the machines of a federation: the server's SuperLink, and a Flower node at each site."""

import errno
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from fedloom.conf.errors import UserError, unknown
from fedloom.conf.machine import limit_memory
from fedloom.sims.federation import sheets
from fedloom.sims.federation.files import write_private, write_together
from fedloom.sims.federation.keys import NodeKey, check_certificate, check_private
from fedloom.sims.federation.names import check_names, data_path
from fedloom.sims.federation.own_app import OWN
from fedloom.sims.federation.plan import FLOWER, ID, JOINED, KEYS, SERVER, write_public, written
from fedloom.sims.federation.programs import HOME, free_port, keep_running, listen, lock_away, running
from fedloom.sims.federation.sheets import ServerSheet, SiteSheet

SERVER_PACE = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"}  # seconds; it starts one program in a run
NODE_CONFIG = "node.toml"
START_SECONDS = 60.0


def run_server(folder: Path) -> None:
    """Keep the SuperLink of a server's folder running until a signal stops it. Sites with a key in the folder may join."""
    refuse_port(folder, sheets.read_server(folder))
    with written(folder):
        lock_away(folder)
    home = {HOME: str(folder.resolve() / FLOWER), **SERVER_PACE}
    keep_running(folder, lambda: [sys.executable, "-m", "fedloom.sims.federation.superlink"], home)


def refuse_port(folder: Path, sheet: ServerSheet) -> None:
    """Raise UserError if the server cannot listen at its port, unless it is running already."""
    if running(folder):
        return
    where = f"{folder / sheets.SERVER}: port"
    change = f"change it there and in superlink of each {sheets.SITE}, or plan with another port"
    try:
        listen(sheet.host, sheet.port).close()
    except socket.gaierror as error:
        raise UserError(
            f"{folder / sheets.SERVER}: host: '{sheet.host}' is not an address of this machine ({error.strerror})"
        ) from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"{where} {sheet.port} is in use by another program; stop that program, or {change}") from None
        raise UserError(f"{where} {sheet.port} at {sheet.host} is not available ({error.strerror}); {change}") from None


def run_node(path: Path) -> None:
    """Keep the node of a site running until a signal stops it. `path`: its site.yaml."""
    sheet, folder = sheets.read(SiteSheet, path), path.parent.resolve()
    if not sheet.superlink:
        raise UserError(f"{path}: superlink: takes the server's address, HOST:PORT")
    try:
        sheets.check_superlink(sheet.superlink)
        check_names(sheet)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    _check_files(path, sheet)
    with written(folder):
        lock_away(folder)
        write_private(folder / NODE_CONFIG, sheets.node_config(sheet, folder).encode())
    words = ["--superlink", sheet.superlink, "--node-config", NODE_CONFIG, "--root-certificates", sheet.certificate]
    words += ["--auth-supernode-private-key", sheet.key]
    program = [sys.executable, "-m", "fedloom.sims.federation.supernode"]
    warm = "warm" if sheet.warm else "cold"
    more = {HOME: str(folder / FLOWER), **sheet.environment}
    arguments = [warm, sheet.apps or OWN, str(sheet.largest_order), *words]
    if sheet.max_memory:
        limit_memory(sheet.max_memory * 1e9)  # its programs inherit the limit
    keep_running(folder, lambda: [*program, str(sheet.port or free_port()), *arguments], more)


def _check_files(path: Path, sheet: SiteSheet) -> None:
    """Raise UserError if a file is missing that identifies the server or the site."""
    for key, name in {"certificate": sheet.certificate, "key": sheet.key}.items():
        if not name:
            raise UserError(f"{path}: {key}: is empty, so anyone on the network could pose as the server or this site; "
                            "make a plan, or run 'fedloom federation join'")  # fmt: skip
    for name in filter(None, (sheet.certificate, sheet.key, sheet.peers)):
        if not (path.parent / name).is_file():
            how = "; 'fedloom federation accept' copies it from the operator's file" if name != sheet.key else ""
            raise UserError(f"{path}: the file {path.parent.resolve() / name} is missing{how}")
    for key, place in {"data": sheet.data, "domain": data_path(sheet.domain)}.items():
        found = [path.parent.resolve() / Path(each).expanduser() for each in (place, place.partition("?")[0])]
        if place and not any(each.exists() for each in found):
            raise UserError(f"{path}: {key}: {found[-1]} does not exist; correct the path")
    check_private(path.parent / sheet.key)
    check_certificate(path.parent / sheet.certificate)


def let_in(folder: Path) -> str:
    """Wait until a running server has admitted the new keys in its folder. Return a message for the user."""
    if not running(folder):
        return f"{folder / KEYS} has the new sites' public keys. The server admits them when it starts."
    _await(lambda: all(registered(key) for key in (folder / KEYS).glob("*.pub")), folder)
    return "The server has admitted them."


def rekey(folder: Path, site: str) -> str:
    """Replace a site's lost key with a new one, written into the site's folder. Return the id of its new node.

    `folder`: contains the machines' folders. The server must be running. The site's owner restarts its node.
    """
    server, home = folder / SERVER, folder / site
    public = server / KEYS / f"{site}.pub"
    if not public.is_file():
        raise unknown("site", site, [path.stem for path in (server / KEYS).glob("*.pub")])
    if public.read_text(encoding="ascii").split()[2:] == [JOINED]:
        how = f"run 'fedloom federation join {site} --rekey' there, then 'fedloom federation admit REQUEST --rekey' here"
        raise UserError(f"{site}: makes its own keys; {how}")
    if not running(server):
        raise UserError(
            f"{server}: the server is not running, so no key can be changed; run 'fedloom federation server {server}'"
        )
    old = registered(public)
    with written(folder):
        home.mkdir(mode=0o700, exist_ok=True)
        new = NodeKey()
        write_together({**new.files(home), public: f"{new.line}\n".encode()})
        write_public(folder)
    _await(lambda: registered(public) != old, server)
    return registered(public)


def _await(ready: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > deadline:
            raise UserError(f"{folder}: the server does not admit the keys in {KEYS}; 'fedloom federation logs' shows why")
        time.sleep(0.1)


def registered(path: Path) -> str:
    """Return the id of the node with the public key in this file; empty if the server has not registered it yet."""
    id = path.with_suffix(ID)
    return id.read_text(encoding="ascii").strip() if id.is_file() else ""
