"""Somebody who is no member of a federation, and what they try: `python -m tests.flower.outsider HOST PORT FOLDER`.

It starts from an empty folder and what the server's port says of itself, and prints what each attempt came to.
"""

import base64
import contextlib
import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import tomli_w
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key
from flwr.supercore.date import now
from flwr.supercore.primitives.asymmetric import public_key_to_bytes, sign_message

from tests.node_keys import write_node_key

BIN = Path(sys.executable).parent
CONTROL = (
    "start-run list-runs stop-run stream-logs pull-artifacts register-node unregister-node list-nodes get-login-details"
)
RUNTIME = "acquire-task pull-task-input push-task-output pull-messages push-messages get-nodes pull-object"
FLEET = "activate-node pull-messages push-messages get-run get-fab push-object pull-object confirm-message-received"
TYPE = {"content-type": "application/protobuf"}
APP = """
from pathlib import Path
from flwr.serverapp import ServerApp
app = ServerApp()
@app.main()
def main(grid, context):
    Path("{there}").write_text(Path("server.key").read_text())
"""


def answer(host: str, port: int, path: str, method: str = "POST", **headers: str) -> int:
    """The status of an answer; 0: none."""
    line = http.client.HTTPSConnection(host, port, timeout=10, context=ssl._create_unverified_context())
    try:
        line.request(method, path, headers={**TYPE, **{name.replace("_", "-"): text for name, text in headers.items()}})
        return line.getresponse().status
    except (OSError, http.client.HTTPException):
        return 0
    finally:
        line.close()


def said(host: str, port: int, text: bytes) -> bytes:
    """The answer to bytes that need not be HTTP."""
    output, context = b"", ssl._create_unverified_context()
    with socket.create_connection((host, port), timeout=10) as plain, context.wrap_socket(plain) as line:
        line.sendall(text)
        with contextlib.suppress(OSError):
            while piece := line.recv(4096):
                output += piece
    return output


def signed(key: ec.EllipticCurvePrivateKey, public: bytes | None = None) -> dict[str, str]:
    """Headers as Flower's nodes send them, signed by a key, and naming it or another one."""
    time = now().isoformat()
    named = public or public_key_to_bytes(key.public_key())
    return {
        "flwr-public-key": base64.b64encode(named).decode(),
        "flwr-signature": base64.b64encode(sign_message(key, time.encode())).decode(),
        "flwr-timestamp": time,
    }


def pem(path: Path) -> bytes:
    """A public key as Flower names it."""
    return load_ssh_public_key(path.read_bytes()).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def flwr(home: Path, *words: str) -> str:
    """What a command of Flower says."""
    environment = {**os.environ, "FLWR_HOME": str(home), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    command = [str(BIN / "flwr"), *words]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=120)
    return f"{done.returncode} {done.stdout} {done.stderr}"


def authority(host: str, port: int) -> str:
    """The certificates that the handshake tells."""
    command = ["openssl", "s_client", "-showcerts", "-connect", f"{host}:{port}"]
    output = subprocess.run(command, input="", capture_output=True, text=True, timeout=30).stdout
    parts = output.split("-----BEGIN CERTIFICATE-----")[1:]
    return "".join(f"-----BEGIN CERTIFICATE-----{part.split('-----END')[0]}-----END CERTIFICATE-----\n" for part in parts)


def main(host: str, port: int, folder: Path) -> dict[str, object]:
    """All attempts, and what came of them."""
    folder.mkdir()
    stolen, app = folder / "stolen", folder / "app"
    (folder / "ca.crt").write_text(authority(host, port))
    connection = {"address": f"{host}:{port}", "root-certificates": str(folder / "ca.crt")}
    (folder / "config.toml").write_text(tomli_w.dumps({"superlink": {"default": "there", "there": connection}}))
    app.mkdir()
    (app / "foreign.py").write_text(APP.format(there=stolen))
    components = {"serverapp": "foreign:app", "clientapp": "foreign:app"}
    project = {"name": "foreign", "version": "1.0.0", "description": "", "license": "Apache-2.0"}
    tool = {"flwr": {"app": {"publisher": "nobody", "components": components}}}
    (app / "pyproject.toml").write_text(tomli_w.dumps({"project": project, "tool": tool}))
    write_node_key(folder)
    commands = {
        "run": ("run", str(app), "there", "--format", "json"),
        "ls": ("ls", "there", "--format", "json"),
        "nodes": ("supernode", "list", "there", "--format", "json"),
        "register": ("supernode", "register", str(folder / "key.pub"), "there", "--format", "json"),
        "unregister": ("supernode", "unregister", "1", "there", "--format", "json"),
    }
    return {
        **{name: flwr(folder, *words) for name, words in commands.items()},
        "control": {name: answer(host, port, f"/v1/control/{name}") for name in CONTROL.split()},
        "runtime": {name: answer(host, port, f"/v1/runtime/{name}") for name in RUNTIME.split()},
        "stolen": stolen.exists(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))))
