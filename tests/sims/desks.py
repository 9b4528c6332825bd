"""Parts of the tests of the desk: a folder with one run, tokens of each role, and who calls."""

import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from starlette.testclient import TestClient

from fedloom.sims.desk.app import make_app
from fedloom.sims.desk.tokens import Tokens
from tests.sims.commands import FEDLOOM, ONE

API = "/api/v1"
ROLES = {"viewer": (), "requester": (ONE,), "operator": ()}
CSRF = re.compile(r'name="csrf" value="([0-9a-f]{64})"')


@dataclass
class Folder:
    """A folder of runs with a run `digits`, and a token of each role."""

    root: Path
    secrets: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Path:
        return self.root / "digits"

    def bearer(self, role: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[role]}"} if role in self.secrets else {}


def folder_with(run: Path, root: Path) -> Folder:
    """Copy a run into a new folder of runs, and make tokens named after their roles."""
    root.mkdir(parents=True)
    shutil.copytree(run, root / "digits")
    tokens = Tokens(root)
    return Folder(root, {role: tokens.make(role, role, sites) for role, sites in ROLES.items()})


def browser(folder: Folder, role: str = "", authority: str = "", **options: Any) -> TestClient:
    """A client with cookies, logged in with the role's token. `app`: the desk, if it exists already."""
    app = options.pop("app", None) or make_app(folder.root, authority=authority)
    client = TestClient(app, base_url="http://localhost", raise_server_exceptions=False, **options)
    if role:
        said = log_in(client, folder.secrets[role])
        assert said.status_code == 200 and said.url.path == "/", said.text
    return client


def log_in(client: TestClient, secret: str, next: str = "/") -> httpx.Response:
    return client.post("/login", data={"csrf": csrf_of(client, "/login"), "token": secret, "next": next})


def csrf_of(client: httpx.Client, page: str) -> str:
    found = CSRF.search(client.get(page).text)
    assert found, page
    return found[1]


def certificate(folder: Path, *hosts: str, phrase: str = "") -> tuple[Path, Path]:
    """A certificate for localhost and the hosts (desk.example), and its key. `phrase`: the key's pass phrase."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    names = x509.SubjectAlternativeName([x509.DNSName(host) for host in ("localhost", *(hosts or ["desk.example"]))])
    made = (x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
            .serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
            .add_extension(names, critical=True).sign(key, hashes.SHA256()))  # fmt: skip
    cert, secret = folder / "cert.pem", folder / "key.pem"
    lock = serialization.BestAvailableEncryption(phrase.encode()) if phrase else serialization.NoEncryption()
    cert.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, lock))
    return cert, secret


@contextmanager
def served(folder: Folder, port: int, *words: str, scheme: str = "http") -> Iterator[subprocess.Popen]:
    """The desk as a process of its own."""
    process = subprocess.Popen([FEDLOOM, "serve", str(folder.root), "--port", str(port), *words], stderr=subprocess.PIPE)
    try:
        until(lambda: _answers(f"{scheme}://localhost:{port}/health"), "the desk answers")
        yield process
    finally:
        process.kill()
        process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, verify=False, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def until(holds: Any, what: str, seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"not in {seconds} s: {what}"
        time.sleep(0.1)
