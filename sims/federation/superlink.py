"""The server's program: Flower's SuperLink behind two doors (sims.federation.doors), and the executor of its ServerApps.

Run it in the server's folder: `python -m fedloom.sims.federation.superlink`. It uses internals of Flower 1.41.
"""

import asyncio
import base64
import contextlib
import copy
import logging
import resource
import secrets
import signal
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, cast

import tomli_w
import uvicorn
import yaml
from fastapi import FastAPI
from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
from flwr.common.constant import ISOLATION_MODE_PROCESS, TRANSPORT_TYPE_GRPC_RERE, AuthnType
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.supercore.constant import SQLITE_PRAGMAS, TaskType
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
from flwr.superlink.config_loader import SuperLinkLifespanConfig
from flwr.superlink.main import create_app

from fedloom.conf.errors import UserError
from fedloom.server.unlearning.superlink import DATABASE, scrubbed
from fedloom.sims.federation import leftovers, members, sheets
from fedloom.sims.federation.connections import Listening, settings
from fedloom.sims.federation.doors import Door, for_nodes, for_the_owner
from fedloom.sims.federation.executor import Executor
from fedloom.sims.federation.files import write_private
from fedloom.sims.federation.long_polling import Signals
from fedloom.sims.federation.own_app import ANY
from fedloom.sims.federation.plan import CONNECTION, FLOWER, KEYS, write_public
from fedloom.sims.federation.programs import listen
from fedloom.sims.federation.quiet import quieten
from fedloom.sims.federation.replies import take_replies_alone
from fedloom.sims.federation.sheets import ServerSheet

LOOK_SECONDS = 0.5  # between two checks for new keys
BUSY_MILLISECONDS = 25_000  # to wait for a busy database; Flower's programs wait 30 s for an answer
MOST_JOURNAL = 64 << 20  # bytes of the database's log that stay on the disk
OWN = "127.0.0.1"
UNUSED = ("ControlEventLogMiddleware", "ControlLicenseMiddleware", "FleetEventLogMiddleware", "RuntimeTracingMiddleware")
FOR_CONTROL = ("ControlSensitiveResponseMiddleware", "ControlAuthenticationMiddleware")  # the nodes' door has no such path

log = logging.getLogger("flwr")


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals to the process, which has several servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main() -> None:
    """Run the SuperLink of the current folder until a signal stops it."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # so that strangers' connections leave enough for nodes
    sheet = sheets.read_server(Path())
    with listen(sheet.host, sheet.port) as outer, listen(OWN, 0) as inner:
        asyncio.run(_serve(sheet, outer, inner))


async def _serve(sheet: ServerSheet, outer: socket.socket, inner: socket.socket) -> None:
    secret, token = secrets.token_hex(32), secrets.token_urlsafe(32)
    limits = (("busy_timeout", str(BUSY_MILLISECONDS)), ("journal_size_limit", str(MOST_JOURNAL)))
    pragmas = (*SQLITE_PRAGMAS, *limits, ("secure_delete", "ON"))  # secure_delete overwrites deleted data
    sql_mixin.SQLITE_PRAGMAS = pragmas  # pyright: ignore[reportPrivateImportUsage]
    take_replies_alone(news := Signals())
    app = create_app(_config(secret.encode()), SuperLinkLifespan)
    state = cast(SqlLinkState, app.state.linkstate_factory.state())
    _take_over(state)
    of_owner, of_nodes = _without(app, UNUSED), _without(app, (*UNUSED, *FOR_CONTROL))
    doors: list[tuple[socket.socket, Door, Literal["on", "off"]]] = [
        (inner, for_the_owner(of_owner, token, secret.encode(), state.get_task_by_token, news), "on"),
        (outer, for_nodes(of_nodes, state.get_node_id_by_public_key, news), "off"),
    ]
    log_config = get_uvicorn_log_config(console_handler.level)
    servers = [
        _Server(uvicorn.Config(**settings(door, sheet.certificate, sheet.key, log_config), lifespan=lifespan))
        for _, door, lifespan in doors
    ]
    quieten()
    address = f"{OWN}:{inner.getsockname()[1]}"
    _write_connection(Path(FLOWER), address, Path(sheet.authority), token)

    def leave() -> None:
        news.end()
        for server in servers:
            server.should_exit = True

    for kind in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(kind, leave)
    executor = Executor(address, Path(sheet.authority).resolve(), secret, TaskType.SERVER_APP, ANY)
    following = asyncio.create_task(_follow(state))
    try:
        lines = [Listening(line, door.crowd) for line, door, _ in doors]
        await asyncio.gather(*(server.serve([line]) for server, line in zip(servers, lines, strict=True)))
    finally:
        following.cancel()
        executor.terminate()


def _without(app: FastAPI, unused: Sequence[str]) -> FastAPI:
    """Return the application without middleware of these names, each of which costs a millisecond of every request."""
    lean = copy.copy(app)
    lean.user_middleware = [each for each in app.user_middleware if each.cls.__name__ not in unused]  # type: ignore[attr-defined]
    return lean


def _config(secret: bytes) -> SuperLinkLifespanConfig:
    """Return the configuration of a SuperLink that opens no port and starts no program itself."""
    return SuperLinkLifespanConfig(
        control_address="", health_server_address=None, host=OWN, port=0, insecure=False, certificates=None,
        superexec_auth_secret=secret, authn_plugin=NoOpControlAuthnPlugin(), event_log_plugin=None,
        fleet_event_log_plugin=None, enable_event_log=False, artifact_provider=None, enable_supernode_auth=True,
        fleet_api_type=TRANSPORT_TYPE_GRPC_RERE, fleet_api_address=None, simulation=False, ssl_ca_certfile=None,
        ssl_certfile=None, ssl_keyfile=None, database=DATABASE, isolation=ISOLATION_MODE_PROCESS,
        runtime_dependency_install=False,
    )  # fmt: skip


def _write_connection(home: Path, address: str, authority: Path, token: str) -> None:
    """Write the files with which Flower's command connects to this SuperLink: `FLWR_HOME=flwr flwr ls here`."""
    home.mkdir(mode=0o700, exist_ok=True)
    where = {"address": address, "root-certificates": str(authority.resolve())}
    known = {AUTHN_TYPE_STORE_KEY: AuthnType.OIDC, ACCESS_TOKEN_STORE_KEY: token, REFRESH_TOKEN_STORE_KEY: "none"}
    words = {key % address: base64.b64encode(text.encode()).decode() for key, text in known.items()}
    write_private(home / "credentials.yaml", yaml.safe_dump(words).encode())
    config = {"superlink": {"default": CONNECTION, CONNECTION: where}}
    write_private(home / "config.toml", tomli_w.dumps(config).encode())


async def _follow(state: SqlLinkState) -> None:
    """Admit the keys in the folder whenever it changes, and delete the data of runs that have ended."""
    before, logged = members.seen(Path(KEYS)), ""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            if (current := members.seen(Path(KEYS))) != before:
                await asyncio.to_thread(_take_over, state)
                before = current
            if await asyncio.to_thread(leftovers.clear, state):
                await asyncio.to_thread(scrubbed, Path(DATABASE))
            logged = ""
        except Exception as error:  # such as a full disk; the next check tries again
            if str(error) != logged:
                log.exception("cannot update the members from the keys in %s, or cannot delete the data of ended runs", KEYS)
            logged = str(error)


def _take_over(state: SqlLinkState) -> None:
    members.follow(state, Path(KEYS))
    with contextlib.suppress(UserError):  # a file that is not a key; it is logged already
        write_public(Path())


if __name__ == "__main__":
    main()
