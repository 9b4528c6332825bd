"""Check the machines of a federation from one of them, with a line for each check."""

import datetime
import email.utils
import http.client
import importlib.metadata
import os
import socket
import ssl
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from fedloom.conf.errors import UserError, plain
from fedloom.sims.federation import sheets
from fedloom.sims.federation.keys import check_validity
from fedloom.sims.federation.plan import machines_of
from fedloom.sims.federation.programs import running
from fedloom.sims.federation.proxies import named, usable
from fedloom.sims.federation.sheets import SiteSheet

SOON = datetime.timedelta(days=30)
APART_SECONDS = 60.0  # of two clocks
WAIT_SECONDS = 10.0
GOOD = "good"
OUTDATED = "has changed since the node started, which still follows the old settings; restart the node"
VERSIONS, PROXY = "versions", "proxy"  # rows for information only
OTHER_NAME = (62, 64)  # OpenSSL: X509_V_ERR_HOSTNAME_MISMATCH, X509_V_ERR_IP_ADDRESS_MISMATCH
NOT_FOR_NODES = ("/v1/control/list-runs", "/v1/runtime/acquire-task", "/v1/fleet/register-node")

Row = tuple[str, str, str]


def check(folder: Path) -> list[Row]:
    """Check machines. Return rows (machine, what was checked, "good" or the fault and its cure).

    `folder`: of a federation, or of one machine. Raises UserError for any other folder.
    """
    homes = machines_of(folder)
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("fedloom", "flwr"))
    rows: list[Row] = [("here", VERSIONS, versions), *_proxies()]
    for home in homes:
        look = _server if (home / sheets.SERVER).is_file() else _site
        rows += [(home.resolve().name, what, finding) for what, finding in look(home)]
    return rows


def sound(rows: Iterable[Sequence[str]]) -> bool:
    """Return whether no check has failed in the rows of `check`."""
    return all(finding == GOOD for _, what, finding in rows if what not in (VERSIONS, PROXY))


def _server(home: Path) -> Iterator[tuple[str, str]]:
    try:
        sheet = sheets.read_server(home)
    except UserError as error:
        yield sheets.SERVER, str(error)
        return
    yield "program", GOOD if running(home) else "is not running; run 'fedloom federation server .'"
    yield "certificate", _check_dates(home / sheet.certificate)
    yield "private key", _check_key(home / sheet.key)
    yield "folder", _check_folder(home)
    address = "127.0.0.1" if sheet.host in ("0.0.0.0", "::") else sheet.host
    yield "port", _or_fault(lambda: _check_server(address, sheet.port, home / sheet.authority))


def _site(home: Path) -> Iterator[tuple[str, str]]:
    try:
        sheet = sheets.read(SiteSheet, home / sheets.SITE)
    except UserError as error:
        yield sheets.SITE, str(error)
        return
    now = running(home)
    yield "program", GOOD if now else f"is not running; run 'fedloom federation node {sheets.SITE}'"
    yield sheets.SITE, OUTDATED if now and sheets.is_outdated(home) else GOOD
    if sheet.certificate:
        yield "certificate", _check_dates(home / sheet.certificate)
    if sheet.key:
        yield "private key", _check_key(home / sheet.key)
    yield "folder", _check_folder(home)
    try:
        sheets.check_superlink(sheet.superlink)
        if not (sheet.certificate and sheet.key):
            raise UserError(
                "has no certificate or no key, so anyone on the network could pose as the server or this site; plan again"
            )
    except UserError as error:
        yield "server", str(error)
        return
    host, _, port = sheet.superlink.rpartition(":")
    yield (
        f"server at {sheet.superlink}",
        _or_fault(lambda: _check_server(host.strip("[]"), int(port), home / sheet.certificate)),
    )


def _proxies() -> Iterator[Row]:
    """Yield the proxies in this machine's environment, which nodes use to reach a server elsewhere."""
    for name, text in named(os.environ).items():
        use = "nodes use it to reach a server elsewhere (no_proxy=HOST bypasses it)"
        if name not in usable(os.environ):
            use = "not used, since the package socksio is not installed"
        yield "here", PROXY, f"{name} is {plain(text).rpartition('@')[2]}: {use}"  # without a password


def _check_dates(path: Path) -> str:
    """Check whether a certificate is valid now and for some time."""
    try:
        ends = check_validity(path)
    except UserError as error:
        return str(error)
    if datetime.datetime.now(datetime.UTC) > ends - SOON:
        return f"{path.name} ends on {ends:%Y-%m-%d}; make a new plan before that"
    return GOOD


def _check_key(path: Path) -> str:
    if not path.is_file():
        return f"{path.name} is missing; 'fedloom federation rekey' makes a new one"
    mode = stat.S_IMODE(path.stat().st_mode)
    return f"other users can read {path.name}; run 'chmod 600 {path.name}'" if mode & 0o077 else GOOD


def _check_folder(folder: Path) -> str:
    return (
        "other users of this machine can open it; run 'chmod 700' on it"
        if stat.S_IMODE(folder.stat().st_mode) & 0o077
        else GOOD
    )


def _or_fault(ask: Callable[[], str]) -> str:
    """Return what `ask` finds, or why the connection failed."""
    try:
        return ask()
    except ssl.SSLCertVerificationError as error:
        if error.verify_code in OTHER_NAME:
            cure = "correct superlink, or add the name to a new plan"
            return f"has another name in its certificate ({error.verify_message}); {cure}"
        return f"does not match this certificate, or the clocks differ ({error.verify_message})"
    except ssl.SSLError as error:
        return f"has no TLS, or an incompatible version ({error.reason})"
    except socket.gaierror as error:
        return f"has an unknown name ({error.strerror}); correct superlink, or the network's names"
    except (OSError, http.client.HTTPException) as error:
        return f"cannot be reached ({error or type(error).__name__}); is it running, and does a firewall block the port?"


def _check_server(host: str, port: int, authority: Path) -> str:
    """Connect to the server as nodes do, and check what it answers to outsiders, and its clock."""
    if obeyed := [path for path in NOT_FOR_NODES if _answer(host, port, authority, "POST", path)[0] != 404]:
        return (
            f"anyone who reaches it can control it (it answers {obeyed[0]}); stop it, and serve a new plan with this version"
        )
    date = _answer(host, port, authority, "GET", "/")[1]
    try:
        theirs = email.utils.parsedate_to_datetime(date or "").timestamp()
    except (ValueError, OverflowError, OSError):
        return "answers, but not as Flower's SuperLink does"
    difference = theirs - datetime.datetime.now(datetime.UTC).timestamp()
    return GOOD if abs(difference) <= APART_SECONDS else f"its clock differs by {difference:+.0f} s; set both clocks by NTP"


def _answer(host: str, port: int, authority: Path, method: str, path: str) -> tuple[int, str | None]:
    """Return the status and the date of an answer. Raises TimeoutError if it is not complete in time."""
    answer: Future[tuple[int, str | None]] = Future()

    def ask() -> None:
        try:
            answer.set_result(_request(host, port, authority, method, path))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()  # a daemon, so that this process can end before it
    return answer.result(WAIT_SECONDS)


def _request(host: str, port: int, authority: Path, method: str, path: str) -> tuple[int, str | None]:
    context = ssl.create_default_context(cafile=str(authority))
    line = http.client.HTTPSConnection(host, port, timeout=WAIT_SECONDS, context=context)
    try:
        line.request(method, path, headers={"content-type": "application/protobuf"})
        answer = line.getresponse()
        return answer.status, answer.getheader("date")
    finally:
        line.close()
