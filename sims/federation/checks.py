"""What is wrong with a federation's machines, seen from one of them: a line for each thing that was looked at."""

import datetime
import email.utils
import http.client
import importlib.metadata
import os
import ssl
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from cryptography import x509

from fedloom.conf.errors import UserError, plain
from fedloom.sims.federation import sheets
from fedloom.sims.federation.plan import machines_of
from fedloom.sims.federation.programs import running
from fedloom.sims.federation.proxies import named, usable
from fedloom.sims.federation.sheets import SiteSheet

SOON = datetime.timedelta(days=30)
APART_SECONDS = 60.0  # of two clocks
WAIT_SECONDS = 10.0
GOOD = "good"
VERSIONS, PROXY = "versions", "proxy"  # rows for the reader's information
NOT_FOR_NODES = ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/v1/fleet/register-node")

Row = tuple[str, str, str]


def check(folder: Path) -> list[Row]:
    """Machine, what was looked at, and "good" or what is wrong and how to mend it.

    `folder`: with the machines' folders, or that of one machine. UserError if it is neither.
    """
    homes = machines_of(folder)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("fedloom", "flwr"))
    rows: list[Row] = [("here", VERSIONS, versions), *_proxies()]
    for home in homes:
        look = _server if (home / sheets.SERVER).is_file() else _site
        rows += [(home.resolve().name, what, told) for what, told in look(home)]
    return rows


def sound(rows: Iterable[Sequence[str]]) -> bool:
    """Whether nothing is wrong with what was looked at."""
    return all(told == GOOD for _, what, told in rows if what not in (VERSIONS, PROXY))


def _server(home: Path) -> Iterator[tuple[str, str]]:
    try:
        sheet = sheets.read_server(home)
    except UserError as error:
        yield sheets.SERVER, str(error)
        return
    yield "program", GOOD if running(home) else "does not run: fedloom federation server ."
    yield "certificate", _dates(home / sheet.certificate)
    yield "private key", _private(home / sheet.key)
    yield "folder", _locked(home)
    here = "127.0.0.1" if sheet.host in ("0.0.0.0", "::") else sheet.host
    yield "port", _tried(lambda: _spoken(here, sheet.port, home / sheet.authority))


def _site(home: Path) -> Iterator[tuple[str, str]]:
    sheet = sheets.read(SiteSheet, home / sheets.SITE)
    yield "program", GOOD if running(home) else f"does not run: fedloom federation node {sheets.SITE}"
    if sheet.certificate:
        yield "certificate", _dates(home / sheet.certificate)
    if sheet.key:
        yield "private key", _private(home / sheet.key)
    yield "folder", _locked(home)
    try:
        sheets.check_superlink(sheet.superlink)
        if not (sheet.certificate and sheet.key):
            raise UserError(
                "has no certificate or no key: anybody on the network could be the server, or this site; plan again"
            )
    except UserError as error:
        yield "server", str(error)
        return
    host, _, port = sheet.superlink.rpartition(":")
    yield f"server at {sheet.superlink}", _tried(lambda: _spoken(host.strip("[]"), int(port), home / sheet.certificate))


def _proxies() -> Iterator[Row]:
    """The proxies that this machine's environment names: nodes go by them to a server elsewhere."""
    for name, text in named(os.environ).items():
        use = "a node asks it for the way to a server elsewhere (no_proxy: HOST leaves it out)"
        if name not in usable(os.environ):
            use = "not used, as the package socksio is not installed"
        yield "here", PROXY, f"{name} is {plain(text).rpartition('@')[2]}: {use}"  # without a password


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


def _locked(folder: Path) -> str:
    return "others of this machine get into it: chmod 700" if stat.S_IMODE(folder.stat().st_mode) & 0o077 else GOOD


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


def _spoken(host: str, port: int, authority: Path) -> str:
    """Speak to the server as nodes do: what it lets others do, and whether its clock is ours."""
    if obeyed := [path for path in NOT_FOR_NODES if _answer(host, port, authority, "POST", path)[0] != 404]:
        return (
            f"whoever reaches it may control it ({obeyed[0]} is answered): stop it, and have this version serve a new plan"
        )
    told = _answer(host, port, authority, "GET", "/")[1]
    try:
        there = email.utils.parsedate_to_datetime(told or "").timestamp()
    except (ValueError, OverflowError, OSError):
        return "answers, but not as Flower's SuperLink does"
    apart = there - datetime.datetime.now(datetime.UTC).timestamp()
    return GOOD if abs(apart) <= APART_SECONDS else f"its clock differs by {apart:+.0f} s: set both by NTP"


def _answer(host: str, port: int, authority: Path, method: str, path: str) -> tuple[int, str | None]:
    """The status and the date of an answer. TimeoutError if it is not there in time, even if it comes bit by bit."""
    found: Future[tuple[int, str | None]] = Future()

    def ask() -> None:
        try:
            found.set_result(_asked(host, port, authority, method, path))
        except Exception as error:
            found.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()  # a process that ends does not wait for it
    return found.result(WAIT_SECONDS)


def _asked(host: str, port: int, authority: Path, method: str, path: str) -> tuple[int, str | None]:
    context = ssl.create_default_context(cafile=str(authority))
    line = http.client.HTTPSConnection(host, port, timeout=WAIT_SECONDS, context=context)
    try:
        line.request(method, path, headers={"content-type": "application/protobuf"})
        told = line.getresponse()
        return told.status, told.getheader("date")
    finally:
        line.close()
