"""What is wrong with a federation's machines, seen from one of them: a line for each thing that was looked at."""

import datetime
import email.utils
import http.client
import importlib.metadata
import ssl
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from cryptography import x509

from conf.errors import UserError
from sims.federation import sheets
from sims.federation.plan import machines_of
from sims.federation.programs import running
from sims.federation.sheets import ServerSheet, SiteSheet

SOON = datetime.timedelta(days=30)
APART_SECONDS = 60.0  # of two clocks
WAIT_SECONDS = 10.0
GOOD = "good"

Row = tuple[str, str, str]


def check(folder: Path) -> list[Row]:
    """Machine, what was looked at, and "good" or what is wrong and how to mend it.

    `folder`: with the machines' folders, or that of one machine. UserError if it is neither.
    """
    homes = machines_of(folder)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("fedloom", "flwr"))
    rows: list[Row] = [("here", "versions", versions)]
    for home in homes:
        look = _server if (home / sheets.SERVER).is_file() else _site
        rows += [(home.resolve().name, what, told) for what, told in look(home)]
    return rows


def _server(home: Path) -> Iterator[tuple[str, str]]:
    sheet = sheets.read(ServerSheet, home / sheets.SERVER)
    yield "program", GOOD if running(home) else "does not run: fedloom federation server ."
    if sheet.certificate:
        yield "certificate", _dates(home / sheet.certificate)
        yield "private key", _private(home / sheet.key)
    yield "port", _tried(lambda: _clock("127.0.0.1", sheet.port, home / sheet.authority if sheet.authority else None))


def _site(home: Path) -> Iterator[tuple[str, str]]:
    sheet = sheets.read(SiteSheet, home / sheets.SITE)
    yield "program", GOOD if running(home) else f"does not run: fedloom federation node {sheets.SITE}"
    if sheet.certificate:
        yield "certificate", _dates(home / sheet.certificate)
    if sheet.key:
        yield "private key", _private(home / sheet.key)
    try:
        sheets.check_superlink(sheet.superlink)
    except UserError as error:
        yield "server", str(error)
        return
    host, _, port = sheet.superlink.rpartition(":")
    authority = home / sheet.certificate if sheet.certificate else None
    yield f"server at {sheet.superlink}", _tried(lambda: _clock(host, int(port), authority))


def _dates(path: Path) -> str:
    """Of a certificate: whether it is valid now, and for how long."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        return f"{path.name} cannot be read ({error}); put it back from the plan"
    now = datetime.datetime.now(datetime.UTC)
    begins, ends = found.not_valid_before_utc, found.not_valid_after_utc
    if not begins <= now <= ends:
        return f"{path.name} is valid from {begins:%Y-%m-%d} to {ends:%Y-%m-%d}: make a new plan, or set the clock"
    if now > ends - SOON:
        return f"{path.name} ends on {ends:%Y-%m-%d}: make a new plan before"
    return GOOD


def _private(path: Path) -> str:
    if not path.is_file():
        return f"{path.name} is not there; 'fedloom federation rekey' makes another"
    mode = stat.S_IMODE(path.stat().st_mode)
    return f"{path.name} may be read by others: chmod 600 {path.name}" if mode & 0o077 else GOOD


def _tried(ask: Callable[[], str]) -> str:
    """What is wrong with a connection, in words."""
    try:
        return ask()
    except ssl.SSLCertVerificationError as error:
        return f"is not the server of this certificate, or clocks differ ({error.verify_message})"
    except ssl.SSLError as error:
        return f"speaks no TLS, or another one ({error.reason})"
    except (OSError, http.client.HTTPException) as error:
        return f"cannot be reached ({error or type(error).__name__}): is it up, and does a firewall let this port through?"


def _clock(host: str, port: int, authority: Path | None) -> str:
    """Speak to the server as nodes do, and compare its clock with ours."""
    if authority:
        context = ssl.create_default_context(cafile=str(authority))
        line: http.client.HTTPConnection = http.client.HTTPSConnection(host, port, timeout=WAIT_SECONDS, context=context)
    else:
        line = http.client.HTTPConnection(host, port, timeout=WAIT_SECONDS)
    try:
        line.request("GET", "/")
        told = line.getresponse().getheader("date")
    finally:
        line.close()
    if told is None:
        return "answers, but not as Flower's SuperLink does"
    apart = (email.utils.parsedate_to_datetime(told) - datetime.datetime.now(datetime.UTC)).total_seconds()
    return GOOD if abs(apart) <= APART_SECONDS else f"its clock differs by {apart:+.0f} s: set both by NTP"
