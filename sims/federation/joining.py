"""Let sites join that make their own keys: a site sends a request, the operator admits it, all sites get the members' file.

Neither file is secret. Since the channel may change them, people compare fingerprints.
"""

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes

from fedloom.clients.protocol.signatures import is_signed, signing_payload
from fedloom.conf.errors import UserError, plain
from fedloom.conf.yaml_text import read_yaml, write_yaml
from fedloom.sims.federation import sheets
from fedloom.sims.federation.files import read_small, write_private, write_together
from fedloom.sims.federation.keys import AUTHORITY, NODE_KEY, NodeKey, fingerprint, public_key
from fedloom.sims.federation.plan import (
    JOINED,
    KEYS,
    PEERS,
    SERVER,
    is_name,
    members,
    peers_text,
    server_of,
    write_public,
    written,
)
from fedloom.sims.federation.programs import lock_away
from fedloom.sims.federation.sheets import SiteSheet

REQUEST = "join.request"
MOST_REQUEST, MOST_MEMBERS = 1 << 14, 1 << 24  # bytes
MOST_KEY = 1000  # characters of a public key


def ask(folder: Path, name: str, superlink: str, again: bool) -> str:
    """Write a site's new key, its request to join and, if missing, its site.yaml.

    Args:
        folder: The site's folder.
        name: The site's name.
        superlink: The server's HOST:PORT.
        again: Whether to replace an existing key.

    Returns:
        The key's fingerprint.

    Raises:
        UserError: A key exists and `again` is not set, or the name or address is not valid.
    """
    _check_name(name, "NAME")
    sheet = folder / sheets.SITE
    if not sheet.is_file():
        sheets.check_superlink(superlink)
    elif sheets.read(SiteSheet, sheet).name != name:
        raise UserError(f"{sheet}: belongs to another site; name another folder (--folder)")
    key = folder / NODE_KEY
    if key.exists() and not again:
        raise UserError(f"{key}: exists already; --rekey replaces it")
    with written(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_away(folder)
        new, files = NodeKey(), {}
        if not sheet.is_file():
            own = SiteSheet(name=name, superlink=superlink, certificate=AUTHORITY, key=NODE_KEY, peers=PEERS)
            files[sheet] = sheets.text(own)
        request = {"name": name, "key": new.line, "signature": new.signed(signing_payload("join", name, new.line)).hex()}
        write_together({**files, folder / REQUEST: write_yaml(request).encode(), **new.files(folder)})
    return fingerprint(new.line)


@dataclass(frozen=True)
class Request:
    """A site's request to be admitted under this name with this key."""

    name: str
    key: str

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the site's key."""
        return fingerprint(self.key)


def read_request(path: Path) -> Request:
    """Return the request in a file. Raises UserError for any other file, and for one that its key did not sign."""
    content = _read(path, MOST_REQUEST)
    name, key, signature = (content.get(field) for field in ("name", "key", "signature"))
    if not (isinstance(name, str) and isinstance(key, str) and isinstance(signature, str) and len(key) < MOST_KEY):
        raise UserError(f"{path}: is not a site's request; make one with 'fedloom federation join'")
    _check_name(name, f"{path}: name")
    line = public_key(key)
    try:
        good = is_signed(line, signing_payload("join", name, line), bytes.fromhex(signature))
    except ValueError:
        good = False
    if not good:
        raise UserError(f"{path}: is not signed by the key in it; the file was altered, or the key belongs to someone else")
    return Request(name, line)


def check_admission(folder: Path, request: Request, again: bool) -> None:
    """Raise UserError if the server must not admit the site. `again`: accept another key of a known site."""
    server = server_of(folder)
    sheets.read_server(server)
    known = members(server)
    if other := next((name for name, key in known.items() if key == request.key and name != request.name), ""):
        raise UserError(f"{request.name}: {other} has the same key; each site needs its own key")
    if any(name != request.name and name.casefold() == request.name.casefold() for name in known):
        raise UserError(f"{request.name}: a member has almost the same name; the site must choose another")
    if known.get(request.name, request.key) != request.key and not again:
        other = f"is a member with another key, {fingerprint(known[request.name])}"
        raise UserError(f"{request.name}: {other}; if the site has lost that key, --rekey replaces it")


def admit(folder: Path, request: Request) -> Path:
    """Write a site's key to the server's folder and all members' files, and return the server's folder."""
    server = server_of(folder)
    with written(folder):
        (server / KEYS).mkdir(exist_ok=True)
        write_private(server / KEYS / f"{request.name}.pub", f"{request.key} {JOINED}\n".encode())
        write_public(folder)
    return server


@dataclass(frozen=True)
class Members:
    """The members' file: the server's address, its authority's certificate (PEM), and the keys of all sites."""

    superlink: str
    certificate: str
    sites: Mapping[str, str]

    @property
    def authority(self) -> str:
        """The fingerprint of the authority's certificate."""
        return _authority(self.certificate.encode("ascii"))


def read_members(path: Path) -> Members:
    """Return the content of a members' file. Raises UserError for any other file."""
    content = _read(path, MOST_MEMBERS)
    superlink, certificate, sites = (content.get(field) for field in ("superlink", "certificate", "sites"))
    if not (isinstance(superlink, str) and isinstance(certificate, str) and isinstance(sites, dict)):
        raise UserError(f"{path}: is not a members' file; the operator makes it with 'fedloom federation admit'")
    sheets.check_superlink(superlink)
    known: dict[str, str] = {}
    for name, key in sites.items():
        _check_name(name, f"{path}: sites")
        known[name] = public_key(key if isinstance(key, str) else "")
    if len(set(known.values())) < len(known):
        raise UserError(f"{path}: two sites have the same key")
    try:
        read = Members(superlink, certificate, known)
        _ = read.authority
    except ValueError:
        raise UserError(f"{path}: certificate: cannot be read; ask the operator to send the file again") from None
    return read


def changes(folder: Path, new: Members) -> list[list[str]]:
    """Return rows (who, change, fingerprint) of what a members' file would change in a site's folder.

    Raises UserError if the file does not have this site with this key.
    """
    sheet = sheets.read(SiteSheet, folder / sheets.SITE)
    own = public_key((folder / f"{NODE_KEY}.pub").read_text(encoding="ascii")) if _has_public(folder) else ""
    if new.sites.get(sheet.name) != own:
        mark = fingerprint(own) if own else "its fingerprint"
        raise UserError(f"{sheet.name}: is not in the members' file with this site's key; send the operator {REQUEST} "
                        f"and compare {mark}")  # fmt: skip
    before = _peers(folder / (sheet.peers or PEERS))
    held = _held_authority(folder / (sheet.certificate or AUTHORITY))
    rows = [["the server's authority", _change(held, new.authority), new.authority]]
    if new.superlink != sheet.superlink:
        rows.append(["the server's address", f"stays {sheet.superlink}, as in {sheets.SITE}", new.superlink])
    for name in sorted({*before, *new.sites}):
        old, now = (fingerprint(keys[name]) if name in keys else "" for keys in (before, new.sites))
        rows.append([name, _change(old, now), now or old])
    return rows


def accept(folder: Path, members: Members) -> None:
    """Write the certificate and the keys of a members' file to a site's folder."""
    sheet = sheets.read(SiteSheet, folder / sheets.SITE)
    with written(folder):
        write_together({
            folder / (sheet.certificate or AUTHORITY): members.certificate.encode("ascii"),
            folder / (sheet.peers or PEERS): peers_text(members.sites).encode("ascii"),
        })  # fmt: skip


def _change(old: str, new: str) -> str:
    if old == new:
        return "unchanged"
    return "new" if not old else "gone" if not new else f"ANOTHER KEY than {old}"


def _has_public(folder: Path) -> bool:
    return (folder / f"{NODE_KEY}.pub").is_file()


def _peers(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    lines = (line.split(maxsplit=1) for line in path.read_text(encoding="ascii", errors="replace").splitlines())
    return {parts[0]: public_key(parts[1]) for parts in lines if len(parts) == 2}


def _held_authority(path: Path) -> str:
    try:
        return _authority(path.read_bytes()) if path.is_file() else ""
    except ValueError:
        return "an unreadable one"


def _authority(pem: bytes) -> str:
    certificates = x509.load_pem_x509_certificates(pem)
    if len(certificates) != 1:
        raise ValueError(f"holds {len(certificates)} certificates, takes one")
    return f"SHA256:{certificates[0].fingerprint(hashes.SHA256()).hex()}"


def _check_name(name: object, where: str) -> None:
    if not (isinstance(name, str) and name.isascii() and is_name(name) and name != SERVER):
        text = plain(str(name))[:60]
        raise UserError(f"{where}: got '{text}', takes letters (a to z), digits, '-', '_' and '.', but not '{SERVER}'")


def _read(path: Path, most: int) -> Mapping[str, Any]:
    """Return the keys in a file from another machine, which is not trusted."""
    try:
        content = read_yaml(read_small(path, most).decode("utf-8"))
    except OSError as error:
        if error.errno == errno.EFBIG:  # no file of ours is so large
            return {}
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    return content if isinstance(content, dict) else {}
