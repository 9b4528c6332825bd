"""Start the desk: check its address and certificate, then serve until it is stopped."""

import ipaddress
import os
import re
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import uvicorn
from cryptography import x509
from uvicorn.config import LOGGING_CONFIG

from fedloom.conf.errors import UserError, locked, plain, public
from fedloom.sims.desk.app import LOOPBACK, make_app
from fedloom.sims.desk.desk import Desk
from fedloom.sims.desk.runs import checked
from fedloom.sims.desk.tokens import Tokens
from fedloom.sims.desk.webhook import Webhook, secret_in
from fedloom.sims.federation.connections import Listening, Patient
from fedloom.sims.progress.output import json_logging, wants_json
from fedloom.sims.report.time_stamps import check_authority

NICE = 15  # on a busy machine, the desk takes under 4% of a core from a run's server
STOP_SECONDS = 2  # for open connections
STALE_SECONDS = 75  # an idle connection is closed
MOST_CONNECTIONS = 768  # more than those of unknown callers (MOST_UNKNOWN), which make room for new ones

MOST_NAME = 253  # characters of a host name
_HOST_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?(\.[a-z0-9]([a-z0-9-]*[a-z0-9])?)*", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Address:
    """Where the desk listens, and its TLS certificate and key (None: plain HTTP, on loopback only).

    `names`: further host names, at which a proxy serves the desk by https.
    """

    host: str
    port: int
    cert: Path | None = None
    key: Path | None = None
    names: Sequence[str] = ()

    @property
    def tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.cert is not None

    @property
    def secure(self) -> bool:
        """Whether browsers reach the desk by https, so that cookies travel encrypted only."""
        return self.tls or bool(self.names)

    @property
    def url(self) -> str:
        """The desk's first page."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"


def serve(
    root: Path,
    address: Address,
    say: Callable[[str], None],
    webhook: str = "",
    secret: Path | None = None,
    authority: str = "",
) -> None:
    """Serve the desk of a folder of runs until SIGINT or SIGTERM. Raises UserError if it cannot start.

    `say`: shows the user a line. `webhook`, `secret`: a URL, and the file with the secret that signs messages to it.
    `authority`: the URL of a time-stamping authority that stamps proofs.
    """
    if authority:
        check_authority(authority)
    app = make_app(checked(root), _checked(address), address.secure, lambda: server.should_exit, authority)
    tokens = Tokens(root).all()  # fails now if the file is damaged
    hook = _hook(webhook, secret, app.state.desk)
    config = uvicorn.Config(
        app, log_config=json_logging() if wants_json() else LOGGING_CONFIG, log_level="warning",
        access_log=False, proxy_headers=False, server_header=False, http=Patient, ws="none", loop="asyncio",
        ssl_certfile=address.cert, ssl_keyfile=address.key, timeout_graceful_shutdown=STOP_SECONDS,
        timeout_keep_alive=STALE_SECONDS, limit_concurrency=MOST_CONNECTIONS,
    )  # fmt: skip
    server = uvicorn.Server(config)
    with _listening(address) as listener, hook or nullcontext():
        say(f"desk of {root}: {address.url} (stop with Ctrl-C)")
        if not tokens:
            say(f"no tokens yet: `fedloom serve {root} token --role operator --name NAME` makes one")
        os.nice(NICE)
        with suppress(KeyboardInterrupt):  # uvicorn stops in order, and raises the signal again
            server.run(sockets=[Listening(listener, app.state.desk.gate.crowd)])
    say("the desk has stopped; runs and requests are not affected")


def _hook(url: str, secret: Path | None, desk: Desk) -> Webhook | None:
    if bool(url) != bool(secret):
        raise UserError("--webhook and --webhook-secret-file: name both, or neither")
    if not url or secret is None:
        return None
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise UserError(f"--webhook: got '{public(url)}', takes a URL that begins with https://")
    return Webhook(url, secret_in(secret), desk)


def _checked(address: Address) -> frozenset[str]:
    """Return the names under which the desk may be called. Raises UserError for a bad name, and missing or bad TLS."""
    for name in address.names:
        if len(name) > MOST_NAME or not _HOST_NAME.fullmatch(name):
            raise UserError(f"--host-name: got '{plain(name)[:MOST_NAME]}', takes a name such as desk.example.org: "
                            "only letters a-z, digits, '-' and '.', without https:// and port")  # fmt: skip
    known = LOOPBACK | {name.lower() for name in (address.host, *address.names)}
    if (address.cert is None) != (address.key is None):
        raise UserError("--cert and --key: name both, or neither")
    if address.cert is None or address.key is None:
        if not _is_loopback(address.host):
            raise UserError(
                f"--host {address.host}: is reachable from other machines; add --cert and --key, or use 127.0.0.1"
            )
        return known
    return known | _certified(address.cert, address.key)


def _certified(cert: Path, key: Path) -> frozenset[str]:
    """Return the hosts that a certificate is for. Raises UserError unless both files can be used without a pass phrase."""

    def phrase() -> str:
        raise locked(key, tls=True)

    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password=phrase)
        return _names(cert)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"--cert {cert} --key {key}: cannot be used ({error})") from None


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _names(cert: Path) -> frozenset[str]:
    """Return the hosts that a certificate is for; `*.example.org` is one of them (see limits.serves)."""
    found = x509.load_pem_x509_certificate(cert.read_bytes())
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    hosts = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    return frozenset(host.lower() for host in hosts)


def _listening(address: Address) -> socket.socket:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(found[0], found[1])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(found[4])
    except OSError as error:
        raise UserError(f"--host {address.host} --port {address.port}: {error.strerror}; use another port") from None
    return listener
