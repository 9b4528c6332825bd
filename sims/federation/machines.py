"""Run the machines of a federation: the server's SuperLink, and a Flower node at each site."""

import errno
import socket
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path

from fedloom.conf.errors import UserError, unknown
from fedloom.conf.machine import limit_memory
from fedloom.sims.federation import sheets
from fedloom.sims.federation.files import write_private, write_together
from fedloom.sims.federation.keys import NodeKey, check_certificate, check_private, peers_in
from fedloom.sims.federation.names import check_names, check_numbers, data_path
from fedloom.sims.federation.own_app import OWN
from fedloom.sims.federation.plan import FLOWER, ID, JOINED, KEYS, SERVER, write_public, written
from fedloom.sims.federation.programs import HOME, free_port, keep_running, listen, lock_away, running
from fedloom.sims.federation.sheets import ServerSheet, SiteSheet

SERVER_PACE = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"}  # seconds; it starts one program in a run
START_SECONDS = 60.0
LOOPBACK = "127.0.0.1"
TAKES = {"data": "a folder", "images": "a folder", "dataset": "a folder", "table": "a file", "npz": "an npz file"}
_IS_DATA: dict[str, Callable[[Path], bool]] = {
    "data": Path.is_dir, "images": Path.is_dir, "dataset": Path.is_dir, "table": Path.is_file,
    "npz": lambda path: path.is_file() and zipfile.is_zipfile(path),
}  # fmt: skip


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
    from fedloom.clients.privacy.policy import Policy  # imports torch

    sheet, folder = sheets.read(SiteSheet, path), path.parent.resolve()
    if not sheet.superlink:
        raise UserError(f"{path}: superlink: takes the server's address, HOST:PORT")
    try:
        sheets.check_superlink(sheet.superlink)
        check_names(sheet)
        _check_files(path, sheet)
        _check_places(folder, sheet)
        check_numbers(sheet, len(peers_in(folder / sheet.peers)) if sheet.peers else 0)
        Policy.of(tomllib.loads(sheets.node_config(sheet, folder)))
        _check_port(folder, sheet)
    except UserError as error:
        names_file = str(error).startswith((f"{folder}/", f"{path.parent}/"))
        raise UserError(str(error) if names_file else f"{path}: {error}") from None
    with written(folder):
        lock_away(folder)
        write_private(folder / sheets.NODE_CONFIG, sheets.node_config(sheet, folder).encode())
    words = ["--superlink", sheet.superlink, "--node-config", sheets.NODE_CONFIG, "--root-certificates", sheet.certificate]
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
            raise UserError(f"{key}: is empty, so anyone on the network could pose as the server or this site; "
                            "make a plan, or run 'fedloom federation join'")  # fmt: skip
    for name in filter(None, (sheet.certificate, sheet.key, sheet.peers)):
        if not (path.parent / name).is_file():
            how = "; 'fedloom federation accept' copies it from the operator's file" if name != sheet.key else ""
            raise UserError(f"the file {path.parent.resolve() / name} is missing{how}")
    check_private(path.parent / sheet.key)
    check_certificate(path.parent / sheet.certificate)


def _check_places(folder: Path, sheet: SiteSheet) -> None:
    """Raise UserError for data that do not exist or cannot be data, and for a store that is not a folder of its own."""
    for key, place in {"data": sheet.data, "domain": data_path(sheet.domain)}.items():
        places = [folder / Path(each).expanduser() for each in (place, place.partition("?")[0])]
        found = next((each for each in places if each.exists()), None)
        if place and not found:
            raise UserError(f"{key}: {places[-1]} does not exist; correct the path")
        kind = sheet.domain.partition(":")[0] if key == "domain" else "data"
        if place and found and not _IS_DATA[kind](found):
            raise UserError(f"{key}: {found} is not {TAKES[kind]}; correct the path")
    store = (folder / sheet.store).resolve()
    machine = any((store / name).exists() for name in (sheets.SITE, sheets.SERVER))
    if folder.is_relative_to(store) or machine or (store.exists() and not store.is_dir()):
        raise UserError(f"store: {store} is not a folder of its own for the site's data of runs; correct the path")


def _check_port(folder: Path, sheet: SiteSheet) -> None:
    """Raise UserError if the node cannot listen at the port that the sheet names, unless it is running already."""
    host, _, port = sheet.superlink.rpartition(":")
    if not sheet.port or running(folder):
        return
    if host in ("localhost", LOOPBACK, "[::1]") and sheet.port == int(port):
        raise UserError(f"port: {sheet.port} is the server's port; use 0 or another port")
    try:
        listen(LOOPBACK, sheet.port).close()
    except OSError as error:
        raise UserError(f"port: {sheet.port} is not available ({error.strerror}); use 0 or another port") from None


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
