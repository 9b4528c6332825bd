"""A site's program: Flower's SuperNode, with what starts its ClientApps: `python -m ... PORT WARM APPS WORDS...`.

Every user of the machine reaches the node's port. It hands out tasks to those who know a secret, and proves by a certificate
that it is this node: nobody else can sit at its port and hand out tasks.
"""

import os
import secrets
import signal
import sys
import threading
import time
from pathlib import Path

from sims.federation.executor import start_executor
from sims.federation.keys import AUTHORITY, CERTIFICATE, SERVER_KEY, write_certificates

OWN = "own"  # folder of certificates that last as long as the program
SECRET = "secret"
HOST = "127.0.0.1"
LEAVE_SECONDS = 2.0  # for the node to end by itself, where both have to


def main(port: str, warm: str, apps: str, *words: str) -> None:
    """Until told to stop, or until the process that starts ClientApps ends."""
    from flwr.supercore.constant import TaskType
    from flwr.supernode.cli.flower_supernode import flower_supernode

    own, secret = _fresh(Path(OWN)), secrets.token_hex(32)
    file = own / SECRET
    file.write_text(secret, encoding="ascii")
    address, authority = f"{HOST}:{port}", (own / AUTHORITY).resolve()
    executor = start_executor(address, authority, secret, TaskType.CLIENT_APP, apps, warm == "warm")

    def watch() -> None:
        executor.wait()
        time.sleep(LEAVE_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    certificates = {"ssl-certfile": CERTIFICATE, "ssl-keyfile": SERVER_KEY, "ssl-ca-certfile": AUTHORITY}
    tls = [word for option, name in certificates.items() for word in (f"--{option}", str(own / name))]
    process = ["--isolation", "process", "--superexec-auth-secret-file", str(file), "--host", HOST, "--port", port]
    sys.argv = ["flower-supernode", *words, *process, *tls]
    flower_supernode()


def _fresh(folder: Path) -> Path:
    """The folder, with new certificates."""
    folder.mkdir(mode=0o700, exist_ok=True)
    for file in folder.iterdir():
        file.unlink()
    write_certificates(folder, [HOST])
    return folder


if __name__ == "__main__":
    main(*sys.argv[1:])
