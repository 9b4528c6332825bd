"""A site's program: Flower's SuperNode, and the executor of its ClientApps: `python -m ... PORT WARM APPS LARGEST WORDS...`.

Every user of the machine can reach the node's port. So the node gives tasks only to programs that know a secret (see
sims.federation.doors). A certificate proves to them that the port belongs to this node.
"""

import asyncio
import functools
import importlib
import os
import secrets
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedloom.sims.federation.executor import Executor
from fedloom.sims.federation.keys import AUTHORITY, CERTIFICATE, SERVER_KEY, write_certificates

if TYPE_CHECKING:
    import uvicorn
    from flwr.supernode.cli.flower_supernode import SuperNodeLifespanConfig
    from flwr.supernode.nodestate import NodeStateFactory

    from fedloom.sims.federation.long_polling import Signals

OWN = "own"  # folder of certificates, new for each start
SECRET = "secret"
HOST = "127.0.0.1"
LOOK_SECONDS = 0.05  # between two checks whether the node's server has started


def main(port: str, warm: str, apps: str, largest: str, *words: str) -> None:
    """Run the node until a signal or an unexpected answer of the server. After the answer, the keeper restarts it."""
    from flwr.supercore.constant import TaskType

    from fedloom.sims.federation import own_app
    from fedloom.sims.federation.heartbeats import keep_beating
    from fedloom.sims.federation.long_polling import Signals
    from fedloom.sims.federation.orders import bound_orders
    from fedloom.sims.federation.pace import Pace
    from fedloom.sims.federation.quiet import quieten
    from fedloom.sims.process import Ending

    ending, status = Ending(), 1
    own, secret = _fresh(Path(OWN)), secrets.token_hex(32)
    file = own / SECRET
    file.write_text(secret, encoding="ascii")
    address, authority = f"{HOST}:{port}", (own / AUTHORITY).resolve()
    executor = Executor(address, authority, secret, TaskType.CLIENT_APP, apps, warm == "warm")
    certificates = {"ssl-certfile": CERTIFICATE, "ssl-keyfile": SERVER_KEY, "ssl-ca-certfile": AUTHORITY}
    tls = [word for option, name in certificates.items() for word in (f"--{option}", str(own / name))]
    process = ["--isolation", "process", "--superexec-auth-secret-file", str(file), "--host", HOST, "--port", port]
    sys.argv = ["flower-supernode", *words, *process, *tls]
    command = importlib.import_module("flwr.supernode.cli.flower_supernode")  # the package has a function of the same name
    pace = Pace(news := Signals())
    command._start_supernode_http_api = functools.partial(open_door, news, pace.replied)  # type: ignore[attr-defined]
    quieten()
    keep_beating()
    bound_orders(float(largest), apps == own_app.OWN)
    pace.follow()
    try:
        command.flower_supernode()  # returns after unexpected answers of the server
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
    finally:
        executor.terminate()
        ending.leave(status)


def open_door(
    news: "Signals", done: Callable[[str], None], config: "SuperNodeLifespanConfig", states: "NodeStateFactory"
) -> tuple["uvicorn.Server", threading.Thread]:
    """Serve the node's port, by TLS, only for programs that know the secret; Flower's own server (1.41) answers everyone.

    `news`, `done`: as in sims.federation.doors. Returns the running server and its thread. Ends the process if the server
    cannot start.
    """
    import uvicorn
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.supernode.main import create_app

    from fedloom.sims.federation.connections import Listening, settings
    from fedloom.sims.federation.doors import for_apps
    from fedloom.sims.federation.programs import listen

    secret, certificate, key = config.superexec_auth_secret, config.runtime_ssl_certfile, config.runtime_ssl_keyfile
    assert secret and certificate and key
    try:
        listening = listen(config.host, config.port)
    except OSError as error:
        sys.exit(f"{config.host}:{config.port}: cannot listen at this port ({error}); set another 'port' in site.yaml")
    door = for_apps(create_app(states, secret), secret, lambda token: states.state().get_task_by_token(token), news, done)
    server = uvicorn.Server(
        uvicorn.Config(**settings(door, certificate, key, get_uvicorn_log_config(console_handler.level)))
    )
    lines: list[socket.socket] = [Listening(listening, door.crowd)]

    def serve() -> None:
        try:
            asyncio.run(server.serve(lines))
        finally:
            if not server.should_exit:  # it failed, and without it no ClientApp gets a task
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=serve, name="supernode-runtime-http-api", daemon=True)
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(LOOK_SECONDS)
    if not server.started:
        sys.exit(f"{config.host}:{config.port}: the node's server does not start")
    return server, thread


def _fresh(folder: Path) -> Path:
    """Empty the folder, write new certificates to it, and return it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    write_certificates(folder, [HOST])
    return folder


if __name__ == "__main__":
    main(*sys.argv[1:])
