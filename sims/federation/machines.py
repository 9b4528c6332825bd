"""What runs on a federation's machines: the server's SuperLink, and a node of Flower at each site."""

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from conf.errors import UserError, plain, unknown
from sims.federation import hand_over, sheets
from sims.federation.keys import NODE_KEY, write_node_key
from sims.federation.names import check_names
from sims.federation.plan import CONNECTION, FLOWER, KEYS, SERVER, write_connection, write_peers, written
from sims.federation.programs import BIN, environment, free_port, keep_running, running
from sims.federation.sheets import ServerSheet, SiteSheet

SERVER_PACE = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5"}  # seconds; it has a program to start once in a run
DATABASE = "state.db"  # of the SuperLink: its restart costs no node its registration
NODE_CONFIG = "node.toml"
ID = ".id"  # of the file beside a site's public key: the id of its node
START_SECONDS = 60.0
TOLD = 300  # letters of what a program said


def run_server(folder: Path) -> None:
    """Keep the SuperLink of a server's folder running, until told to stop; the sites' keys in it may join."""
    sheet = sheets.read(ServerSheet, folder / sheets.SERVER)
    refuse_port(folder, sheet)
    with written(folder):
        write_connection(folder, sheet)
    words = [str(BIN / "flower-superlink"), "--host", sheet.host, "--port", str(sheet.port), "--database", DATABASE]
    if sheet.certificate:
        words += ["--ssl-certfile", sheet.certificate, "--ssl-keyfile", sheet.key, "--ssl-ca-certfile", sheet.authority]
    else:
        words += ["--insecure"]
    words += ["--enable-supernode-auth"] if sheet.authenticate else []

    def ready() -> None:
        wait_for(sheet.port)
        if sheet.authenticate:
            register(folder)

    keep_running(folder, lambda: words, {"FLWR_HOME": str(folder.resolve() / FLOWER), **SERVER_PACE}, ready)


def refuse_port(folder: Path, sheet: ServerSheet) -> None:
    """UserError for a server's port that it cannot listen at, unless it is at work already."""
    if running(folder):
        return
    where = f"{folder / sheets.SERVER}: port"
    change = f"change it there and in superlink of each {sheets.SITE}, or make a plan with another port"
    try:
        found = socket.getaddrinfo(sheet.host, sheet.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        with socket.socket(found[0][0], socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a server that has just ended
            probe.bind(found[0][4])
    except socket.gaierror as error:
        raise UserError(f"{folder / sheets.SERVER}: host: '{sheet.host}' is no address here ({error.strerror})") from None
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"{where} {sheet.port} is in use by another program: stop that, or {change}") from None
        raise UserError(f"{where} {sheet.port} at {sheet.host} is not to be had ({error.strerror}): {change}") from None


def run_node(path: Path) -> None:
    """Keep the node of a site's sheet running, until told to stop."""
    sheet, folder = sheets.read(SiteSheet, path), path.parent.resolve()
    if not sheet.superlink:
        raise UserError(f"{path}: superlink: takes the server's address, HOST:PORT")
    try:
        sheets.check_superlink(sheet.superlink)
        check_names(sheet)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    for name in filter(None, (sheet.certificate, sheet.key, sheet.peers)):
        if not (folder / name).is_file():
            raise UserError(f"{path}: there is no {folder / name}")
    (folder / NODE_CONFIG).write_text(sheets.node_config(sheet, folder), encoding="utf-8")
    words = [str(BIN / "flower-supernode"), "--superlink", sheet.superlink, "--node-config", NODE_CONFIG]
    words += ["--root-certificates", sheet.certificate] if sheet.certificate else ["--insecure"]
    words += ["--auth-supernode-private-key", sheet.key] if sheet.key else []
    more = {"FLWR_HOME": str(folder / FLOWER), **(_warm(folder) if sheet.warm else {}), **sheet.environment}
    keep_running(folder, lambda: [*words, "--port", str(sheet.port or free_port())], more)


def _warm(folder: Path) -> dict[str, str]:
    """What makes a node's programs find our `flwr-clientapp` before Flower's (sims.federation.hand_over)."""
    command = folder / "bin" / "flwr-clientapp"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -IS "{hand_over.__file__}" "$@"\n', encoding="utf-8")
    command.chmod(0o700)
    return {"PATH": f"{command.parent}{os.pathsep}{environment()['PATH']}"}


def register(folder: Path) -> None:
    """Let the nodes whose public keys lie in the server's folder join; the id of each is put beside its key."""
    known = {one["node-id"] for one in nodes(folder)}
    for path in sorted((folder / KEYS).glob("*.pub")):
        if registered(path) not in known:
            words = ("supernode", "register", str(path.resolve()), CONNECTION, "--name", path.stem, "--format", "json")
            path.with_suffix(ID).write_text(str(json.loads(flwr(folder, *words))["node-id"]), encoding="ascii")


def let_in(folder: Path) -> str:
    """Let new sites' keys in, where the server of this folder is up; what there is to know of it."""
    if not running(folder):
        return f"{folder / KEYS}: the new sites' public keys; the server that has them here lets them in when it starts"
    if sheets.read(ServerSheet, folder / sheets.SERVER).authenticate:
        register(folder)
    return "the server lets them in"


def rekey(folder: Path, site: str) -> str:
    """Take a site's lost key back and let a new one in, which is written into the site's folder; the id of its new node.

    `folder`: with the machines' folders. The server must be up; the site's node is started again by its owner.
    """
    server, home = folder / SERVER, folder / site
    public = server / KEYS / f"{site}.pub"
    if not public.is_file():
        raise unknown("site", site, [path.stem for path in (server / KEYS).glob("*.pub")])
    if old := registered(public):
        flwr(server, "supernode", "unregister", old, CONNECTION, "--format", "json")
    with written(folder):
        home.mkdir(mode=0o700, exist_ok=True)
        (home / NODE_KEY).unlink(missing_ok=True)
        public.write_text(write_node_key(home) + "\n", encoding="ascii")
        public.with_suffix(ID).unlink(missing_ok=True)
        register(server)
        write_peers(folder)
    return registered(public)


def registered(path: Path) -> str:
    """The id of the node of a public key's file; empty: it is not registered yet."""
    beside = path.with_suffix(ID)
    return beside.read_text(encoding="ascii").strip() if beside.is_file() else ""


def nodes(folder: Path) -> list[dict[str, Any]]:
    """The nodes that the SuperLink of a server's folder knows: {"node-id", "status", ...}."""
    return json.loads(flwr(folder, "supernode", "list", CONNECTION, "--format", "json"))["nodes"]


def flwr(folder: Path, *words: str) -> str:
    """What a command of Flower says, spoken to the SuperLink of a server's folder. UserError if it fails."""
    more = environment({"FLWR_HOME": str(folder.resolve() / FLOWER)})
    done = subprocess.run([str(BIN / "flwr"), *words], env=more, cwd=folder, capture_output=True, text=True, timeout=120)
    if done.returncode or '"success": false' in done.stdout:
        raise UserError(f"{folder}: 'flwr {words[0]}' failed: {complaint(done)}")
    return done.stdout


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """What a command of Flower says that is wrong, in a line."""
    try:
        told = str(json.loads(done.stdout)["error-message"])
    except (ValueError, LookupError, TypeError):
        told = done.stdout + done.stderr
    return plain(" ".join(told.split()))[-TOLD:]


def wait_for(port: int, seconds: float = START_SECONDS) -> None:
    """Until something listens at a port of this machine. UserError if nothing does in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.2)
    raise UserError(f"nothing listens at port {port} after {seconds:g} s")
