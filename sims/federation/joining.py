"""Sites whose keys nobody else ever has: each makes its own, asks the operator to be let in, and learns the others' keys.

Two files travel, with nothing secret in them: a site's request, to the operator, and the members' file, to all sites.
What is in them is only as true as the channel they came by: people compare fingerprints.
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
MOST_KEY = 1000  # letters of a public key


def ask(folder: Path, name: str, superlink: str, again: bool) -> str:
    """Make a site's key and its request in its folder, and its sheet if there is none; the key's fingerprint.

    `again`: in place of the key that is there. UserError if there is one, and for a name or address that cannot be.
    """
    _check_name(name, "NAME")
    sheet = folder / sheets.SITE
    if not sheet.is_file():
        sheets.check_superlink(superlink)
    elif sheets.read(SiteSheet, sheet).name != name:
        raise UserError(f"{sheet}: is the sheet of another site; name another folder (--folder)")
    key = folder / NODE_KEY
    if key.exists() and not again:
        raise UserError(f"{key}: is there already; --rekey makes another in its place")
    with written(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_away(folder)
        new, made = NodeKey(), {}
        if not sheet.is_file():
            own = SiteSheet(name=name, superlink=superlink, certificate=AUTHORITY, key=NODE_KEY, peers=PEERS)
            made[sheet] = sheets.text(own)
        request = {"name": name, "key": new.line, "signature": new.signed(signing_payload("join", name, new.line)).hex()}
        write_together({**made, folder / REQUEST: write_yaml(request).encode(), **new.files(folder)})
    return fingerprint(new.line)


@dataclass(frozen=True)
class Request:
    """What a site asks: to be let in under this name with this key."""

    name: str
    key: str

    @property
    def fingerprint(self) -> str:
        """Of the key."""
        return fingerprint(self.key)


def read_request(path: Path) -> Request:
    """The request in a file. UserError for anything else, also where whoever wrote it does not hold the key."""
    given = _read(path, MOST_REQUEST)
    name, key, signature = (given.get(one) for one in ("name", "key", "signature"))
    if not (isinstance(name, str) and isinstance(key, str) and isinstance(signature, str) and len(key) < MOST_KEY):
        raise UserError(f"{path}: is not a site's request; 'fedloom federation join' writes one")
    _check_name(name, f"{path}: name")
    line = public_key(key)
    try:
        good = is_signed(line, signing_payload("join", name, line), bytes.fromhex(signature))
    except ValueError:
        good = False
    if not good:
        raise UserError(f"{path}: is not signed by the key in it: it was altered, or the key is another's")
    return Request(name, line)


def check_admission(folder: Path, request: Request, again: bool) -> None:
    """UserError if a request cannot be granted in a server's folder. `again`: another key of a known site is taken."""
    server = server_of(folder)
    sheets.read_server(server)
    known = members(server)
    if other := next((name for name, key in known.items() if key == request.key and name != request.name), ""):
        raise UserError(f"{request.name}: its key is {other}'s already; each site needs one of its own")
    if any(name != request.name and name.casefold() == request.name.casefold() for name in known):
        raise UserError(f"{request.name}: a site of almost the same name is a member; have it take another")
    if known.get(request.name, request.key) != request.key and not again:
        told = f"is a member with another key, {fingerprint(known[request.name])}"
        raise UserError(f"{request.name}: {told}; --rekey takes that one back, if the site says that it is lost")


def admit(folder: Path, request: Request) -> Path:
    """Write a site's key where the server finds it; the server's folder."""
    server = server_of(folder)
    with written(folder):
        (server / KEYS).mkdir(exist_ok=True)
        write_private(server / KEYS / f"{request.name}.pub", f"{request.key} {JOINED}\n".encode())
        write_public(folder)
    return server


@dataclass(frozen=True)
class Members:
    """What the operator says of the federation: the server's address, its authority's certificate (PEM), all sites' keys."""

    superlink: str
    certificate: str
    sites: Mapping[str, str]

    @property
    def authority(self) -> str:
        """The fingerprint of the certificate."""
        return _authority(self.certificate.encode("ascii"))


def read_members(path: Path) -> Members:
    """The members' file of a server. UserError for anything else."""
    given = _read(path, MOST_MEMBERS)
    superlink, certificate, sites = (given.get(one) for one in ("superlink", "certificate", "sites"))
    if not (isinstance(superlink, str) and isinstance(certificate, str) and isinstance(sites, dict)):
        raise UserError(f"{path}: is not a members' file; the operator's 'fedloom federation admit' writes it")
    sheets.check_superlink(superlink)
    known: dict[str, str] = {}
    for name, key in sites.items():
        _check_name(name, f"{path}: sites")
        known[name] = public_key(key if isinstance(key, str) else "")
    if len(set(known.values())) < len(known):
        raise UserError(f"{path}: two sites have the same key")
    try:
        found = Members(superlink, certificate, known)
        _ = found.authority
    except ValueError:
        raise UserError(f"{path}: certificate: cannot be read; have the operator send the file again") from None
    return found


def changes(folder: Path, given: Members) -> list[list[str]]:
    """What a site's folder would learn from a members' file: rows of what it is, how it changes, its fingerprint.

    UserError if the file is of a federation in which this site is not, or has another key.
    """
    sheet = sheets.read(SiteSheet, folder / sheets.SITE)
    own = public_key((folder / f"{NODE_KEY}.pub").read_text(encoding="ascii")) if _has_public(folder) else ""
    if given.sites.get(sheet.name) != own:
        told = fingerprint(own) if own else "its fingerprint"
        raise UserError(f"{sheet.name}: is not in the members' file, or with a key that is not this site's: send the "
                        f"operator {REQUEST} and compare {told}")  # fmt: skip
    before = _peers(folder / (sheet.peers or PEERS))
    held = _held_authority(folder / (sheet.certificate or AUTHORITY))
    rows = [["the server's authority", _change(held, given.authority), given.authority]]
    if given.superlink != sheet.superlink:
        rows.append(["the server's address", f"{sheets.SITE} says {sheet.superlink}, and keeps it", given.superlink])
    for name in sorted({*before, *given.sites}):
        old, new = (fingerprint(one[name]) if name in one else "" for one in (before, given.sites))
        rows.append([name, _change(old, new), new or old])
    return rows


def accept(folder: Path, given: Members) -> None:
    """Let a site believe a members' file from now on."""
    sheet = sheets.read(SiteSheet, folder / sheets.SITE)
    with written(folder):
        write_together({
            folder / (sheet.certificate or AUTHORITY): given.certificate.encode("ascii"),
            folder / (sheet.peers or PEERS): peers_text(given.sites).encode("ascii"),
        })  # fmt: skip


def _change(old: str, new: str) -> str:
    if old == new:
        return "as before"
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
        return "one that cannot be read"


def _authority(pem: bytes) -> str:
    certificates = x509.load_pem_x509_certificates(pem)
    if len(certificates) != 1:
        raise ValueError(f"holds {len(certificates)} certificates, takes one")
    return f"SHA256:{certificates[0].fingerprint(hashes.SHA256()).hex()}"


def _check_name(name: object, where: str) -> None:
    if not (isinstance(name, str) and name.isascii() and is_name(name) and name != SERVER):
        told = plain(str(name))[:60]
        raise UserError(f"{where}: got '{told}', takes letters (a to z), digits, '-', '_' and '.', and not '{SERVER}'")


def _read(path: Path, most: int) -> Mapping[str, Any]:
    """The section in a file from elsewhere, which is not trusted with anything."""
    try:
        given = read_yaml(read_small(path, most).decode("utf-8"))
    except OSError as error:
        if error.errno == errno.EFBIG:  # no file of ours has so many bytes
            return {}
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from None
    return given if isinstance(given, dict) else {}
