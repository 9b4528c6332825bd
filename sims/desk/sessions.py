"""Who calls: a bearer token of a program, or the session of a browser, with tokens against forged forms (CSRF)."""

import hashlib
import hmac
import secrets
import threading
import time
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from fastapi import Request, Response

from fedloom.conf.errors import UserError
from fedloom.sims.desk.audit import Audit
from fedloom.sims.desk.limits import RateLimit
from fedloom.sims.desk.tokens import Token, Tokens
from fedloom.sims.federation.connections import Crowd

HOURS = 12  # of a session
MOST_SESSIONS, MOST_OF_TOKEN = 1000, 20
CSRF = "csrf"  # the field of a form


class DeniedError(UserError):
    """The caller may not do this. `status`: 401 (unknown caller), 403 (wrong role or form), 429 (too often)."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass
class Gate:
    """Decides who a caller is.

    Attributes:
        tokens: The tokens of this desk.
        audit: Notes log-ins and refused attempts.
        tls: Whether cookies travel encrypted only.
        attempts: Limits wrong tokens by address.
        acts: Limits what changes something, by token.
        crowd: Counts connections, so that callers without a token cannot shut out others.
    """

    tokens: Tokens
    audit: Audit
    tls: bool
    attempts: RateLimit = field(default_factory=lambda: RateLimit(10, 5))
    acts: RateLimit = field(default_factory=lambda: RateLimit(60, 60))
    crowd: Crowd = field(default_factory=lambda: Crowd(of_member=100))
    _sessions: dict[str, tuple[str, float]] = field(
        default_factory=dict
    )  # by digest of the cookie: token's digest, end (time.monotonic)
    _key: bytes = field(default_factory=lambda: secrets.token_bytes(32))
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def cookie(self) -> str:
        """The name of the session's cookie. Under TLS, browsers accept it from this host and with `Secure` alone."""
        return "__Host-desk" if self.tls else "desk"

    def by_bearer(self, request: Request) -> Token:
        """Return the token in `Authorization: Bearer`. Raises DeniedError without a valid one."""
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not secret:
            raise DeniedError(401, "Send a token: `Authorization: Bearer TOKEN`.")
        return self._known(request, secret.strip())

    def by_session(self, request: Request) -> Token | None:
        """Return the token with which this browser is logged in; None if it is not."""
        token, ends = self._sessions.get(_digest(request.cookies.get(self.cookie, "")), ("", 0.0))
        known = self.tokens.by_digest(token) if time.monotonic() < ends else None
        return self._admitted(request, known) if known else None

    def log_in(self, request: Request, secret: str, response: Response) -> None:
        """Begin a session with a new cookie. A token with too many sessions loses its oldest one.

        Raises DeniedError for a wrong token, and for one that logs in too often; RecordError if it cannot be recorded.
        """
        token, cookie = self._known(request, secret.strip()), secrets.token_urlsafe(32)
        self.count_act(token)
        self.audit.note("logged in", token.name, address=address(request))
        self.log_out(request)
        with self._lock:
            now = time.monotonic()
            live = {key: one for key, one in self._sessions.items() if now < one[1]}
            mine = [key for key, one in live.items() if one[0] == token.sha256]
            for oldest in mine[: 1 - MOST_OF_TOKEN]:
                del live[oldest]
            self._sessions = dict([*live.items()][1 - MOST_SESSIONS :])
            self._sessions[_digest(cookie)] = token.sha256, now + 3600 * HOURS
        self.set_cookie(response, cookie)

    def log_out(self, request: Request) -> None:
        """End the session of this browser."""
        with self._lock:
            self._sessions.pop(_digest(request.cookies.get(self.cookie, "")), None)

    def set_cookie(self, response: Response, value: str) -> None:
        """Set the cookie, which scripts cannot read and other sites' pages do not send."""
        response.set_cookie(self.cookie, value, httponly=True, samesite="strict", secure=self.tls, path="/")

    def csrf(self, cookie: str) -> str:
        """Return what a form of the browser with this cookie must contain."""
        return hmac.new(self._key, cookie.encode(errors="replace"), hashlib.sha256).hexdigest()

    async def form(self, request: Request) -> dict[str, list[str]]:
        """Return the fields of a form. Raises DeniedError unless this desk made the form for this browser."""
        try:
            fields = parse_qs((await request.body()).decode(), keep_blank_values=True, max_num_fields=2000)
        except ValueError:
            raise DeniedError(403, "The form cannot be read.") from None
        cookie, sent = request.cookies.get(self.cookie, ""), (fields.pop(CSRF, None) or [""])[0]
        if not cookie or not hmac.compare_digest(sent.encode(), self.csrf(cookie).encode()):
            raise DeniedError(403, "This form is not valid any longer: load the page again, and send it again.")
        return fields

    def require(self, request: Request, token: Token, allowed: bool, what: str) -> None:
        """Raise DeniedError, and note the attempt, unless `allowed`."""
        if not allowed:
            self.count_act(token)
            self.audit.note("refused", token.name, what=what, address=address(request))
            raise DeniedError(403, f"The token '{token.name}' ({token.scope}) does not allow this.")

    def count_act(self, token: Token) -> None:
        """Count an act. Raises DeniedError if the token acts too often."""
        if not self.acts.allows(token.name):
            raise DeniedError(429, "Too many requests: wait a minute.")

    def _admitted(self, request: Request, token: Token) -> Token:
        if request.client:
            self.crowd.known((request.client.host, request.client.port), token.name)
        return token

    def _known(self, request: Request, secret: str) -> Token:
        if (token := self.tokens.find(secret)) is not None:
            return self._admitted(request, token)
        caller = address(request)
        if not self.attempts.allows(caller):
            raise DeniedError(429, "Too many wrong tokens from this address: wait a minute.")
        self.audit.note("wrong token", caller)
        raise DeniedError(401, "This token is not valid: it is unknown, revoked or expired.")


def address(request: Request) -> str:
    """Return the caller's address."""
    return request.client.host if request.client else "unknown"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()
