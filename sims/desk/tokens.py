"""Tokens of the desk: who may do what, until when. Only their sha256 is stored, in a file that only its owner can read."""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import portalocker

from fedloom.clients.storage.states import write_bytes
from fedloom.conf.errors import UserError, plain, unknown
from fedloom.server.run_folder.folder import is_file_name

FOLDER, FILE = ".desk", "tokens.json"  # in the folder of runs
VIEWER, REQUESTER, OPERATOR = ROLES = ("viewer", "requester", "operator")  # each may do what those before it may
PREFIX = "fedloom_"
DAYS = 90


@dataclass(frozen=True)
class Token:
    """The record of a token.

    Attributes:
        name: Whose it is, for the ledger and the audit file.
        role: One of ROLES.
        sites: The sites that a requester may name.
        sha256: The digest of the secret.
        created: When it was made (ISO 8601, UTC).
        expires: When it ends.
        revoked: When it was revoked; empty: it was not.
    """

    name: str
    role: str
    sites: tuple[str, ...]
    sha256: str
    created: str
    expires: str
    revoked: str = ""

    @property
    def valid(self) -> bool:
        """Whether it was not revoked, by any clock, and has not expired."""
        return not self.revoked and datetime.now(UTC) < datetime.fromisoformat(self.expires)

    @property
    def state(self) -> str:
        """One of valid, revoked, expired."""
        return "revoked" if self.revoked else "valid" if self.valid else "expired"

    def may(self, role: str) -> bool:
        """Return whether the role includes `role`."""
        return ROLES.index(self.role) >= ROLES.index(role)

    @property
    def scope(self) -> str:
        """What the token is for: its role, and the sites of a requester."""
        return f"{self.role} for {', '.join(self.sites)}" if self.sites else self.role

    def may_name(self, sites: Sequence[str]) -> bool:
        """Return whether a request of this token may name the sites."""
        return self.may(OPERATOR) or (self.may(REQUESTER) and set(sites) <= set(self.sites))


class Tokens:
    """The tokens of a folder of runs. The file is read again when it changes, so a revoked token ends at once."""

    def __init__(self, root: Path) -> None:
        self.path = root / FOLDER / FILE
        self._read: tuple[tuple[int, int], dict[str, Token]] = (0, 0), {}

    def all(self) -> dict[str, Token]:
        """Return the tokens by the digest of their secret. Raises UserError for a file that is damaged or open to others."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return {}
        if found.st_mode & 0o077:
            raise UserError(f"{self.path}: others can read it; run `chmod 600 {self.path}`")
        if self._read[0] != (found.st_mtime_ns, found.st_ino):
            try:
                rows = [_token(row) for row in json.loads(self.path.read_bytes())]
            except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
                fault = plain(str(error))
                raise UserError(f"{self.path}: is damaged ({fault}); delete it and make new tokens") from None
            self._read = (found.st_mtime_ns, found.st_ino), {row.sha256: row for row in rows}
        return self._read[1]

    def find(self, secret: str) -> Token | None:
        """Return the token with this secret; None if it is unknown, revoked or expired."""
        return self.by_digest(digest(secret))

    def by_digest(self, sha256: str) -> Token | None:
        """Return the token whose secret has this digest; None if it is unknown, revoked or expired."""
        token = self.all().get(sha256)
        return token if token and token.valid else None

    def make(
        self, name: str, role: str, sites: Sequence[str] = (), days: int = DAYS, note: Callable[[], None] = lambda: None
    ) -> str:
        """Make a token and return its secret, which is not stored. Raises UserError for a wrong role, name or sites.

        `note`: records the act just before it happens; what it raises prevents the act.
        """
        if role not in ROLES:
            raise unknown("role", role, ROLES)
        if not is_file_name(name):
            raise UserError(f"--name: got {name!a}; use a short name of printable characters without '/'")
        if (role == REQUESTER) != bool(sites):
            raise UserError("--sites: name the sites of a requester (site-0001,site-0004); other roles take none")
        secret, now = PREFIX + secrets.token_urlsafe(32), datetime.now(UTC)
        ends = (now + timedelta(days=days)).isoformat(timespec="seconds")
        token = Token(name, role, tuple(sites), digest(secret), now.isoformat(timespec="seconds"), ends)
        with self._changing() as known:
            if other := next((token.name for token in known if token.name.casefold() == name.casefold()), ""):
                raise UserError(f"--name: '{other}' has or had a token; use another name, as requests belong to names")
            note()
            self._write([*known, token])
        return secret

    def revoke(self, name: str, note: Callable[[], None] = lambda: None) -> None:
        """End the token with this name now; the name stays in use. Raises UserError if it does not exist.

        `note`: records the act just before it happens; what it raises prevents the act.
        """
        names = [token.name for token in self.all().values()]
        if name not in names:
            raise unknown("token", name, names)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        with self._changing() as known:
            note()
            self._write([replace(token, revoked=now) if token.name == name else token for token in known])

    @contextlib.contextmanager
    def _changing(self) -> Iterator[list[Token]]:
        """Yield the tokens. Until the context ends, no other process or thread changes them."""
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        os.chmod(self.path.parent, 0o700)
        with portalocker.Lock(self.path.with_suffix(".lock"), "a", timeout=10):
            yield list(self.all().values())

    def _write(self, tokens: Sequence[Token]) -> None:
        write_bytes(self.path, json.dumps([asdict(token) for token in tokens], indent=1).encode(), private=True)


def _token(row: dict[str, Any]) -> Token:
    """Return the token in a row of the file. Raises ValueError, TypeError or KeyError if it cannot be one."""
    token = Token(**{**row, "sites": tuple(row["sites"])})
    texts = {name: text for name, text in asdict(token).items() if name != "sites"} | dict(enumerate(token.sites))
    if not isinstance(row["sites"], list) or not all(isinstance(text, str) for text in texts.values()):
        raise ValueError("a field of a token is not text")
    if token.role not in ROLES or not is_file_name(token.name):
        raise ValueError(f"a token has the name {token.name!a} and the role {token.role!a}")
    if datetime.fromisoformat(token.expires).tzinfo is None:
        raise ValueError(f"the time {token.expires!a} has no time zone")
    return token


def digest(secret: str) -> str:
    """Return the sha256 of a secret. It has 256 random bits, so it needs no slow hash."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
