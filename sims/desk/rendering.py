"""How pages are made: templates, in which all text is escaped, and the caller's session."""

import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Depends, Request
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup, escape

from fedloom.conf.errors import UserError, plain
from fedloom.sims.desk.api import desk_of
from fedloom.sims.desk.sessions import CSRF
from fedloom.sims.desk.tokens import OPERATOR, REQUESTER, Token
from fedloom.sims.progress.listeners import clock_text
from fedloom.sims.report.tables import show, when

HERE = Path(__file__).parent
_COMMAND = re.compile(r"[`'](?:fedloom|chmod|ssh-keygen) |FEDLOOM_|(?:^|\s)--[a-z]|restore it from")
PER_PAGE = 100  # rows of a long table


class LogInError(UserError):
    """The browser is not logged in."""


def caller(request: Request) -> Token:
    """Return the token with which the browser is logged in. Raises LogInError without one."""
    if (token := desk_of(request).gate.by_session(request)) is None:
        raise LogInError("log in")
    return token


By = Annotated[Token, Depends(caller)]


def _environment() -> Environment:
    made = Environment(
        loader=FileSystemLoader(HERE / "templates"), autoescape=select_autoescape(default=True, default_for_string=True),
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    made.filters |= {"time": _time, "bytes": _bytes, "clean": lambda text: plain(str(text)), "show": show,
                     "path": lambda text: quote(str(text), safe=""), "clock": clock_text, "code": _code,
                     "people": for_people}  # fmt: skip
    made.globals |= {"OPERATOR": OPERATOR, "REQUESTER": REQUESTER}
    return made


def _time(text: str) -> str:
    """Return a time stamp of the ledger for people."""
    return f"{when(text)} UTC" if text else "-"


def for_people(text: str) -> str:
    """Return an error's text without the parts that name commands, which a browser does not have."""
    sentences = []
    for sentence in re.split(r"(?<=\.) ", plain(text)):
        parts = [part for part in sentence.split("; ") if not _COMMAND.search(part)]
        if parts:
            end = "." if sentence.endswith(".") and not parts[-1].endswith(".") else ""
            sentences.append(f"{'; '.join(parts)}{end}")
    return " ".join(sentences) or "This is not possible now."


def _code(text: str) -> Markup:
    """Return a sentence with what is between back quotes as code. Everything in it is escaped first."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", str(escape(plain(text)))))


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


TEMPLATES = _environment()


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page. It knows who is logged in, and the token for its forms."""
    gate = desk_of(request).gate
    me, cookie = None, request.cookies.get(gate.cookie) or secrets.token_urlsafe(32)
    with suppress(UserError):  # the file of tokens is damaged; the page says so
        me = gate.by_session(request)
    known = {"me": me, "csrf": gate.csrf(cookie), "csrf_field": CSRF, "url": request.url.path}
    text = TEMPLATES.get_template(template).render({**known, **values})
    answer = HTMLResponse(text.encode(errors="replace"), status)  # files may hold what UTF-8 cannot
    if gate.cookie not in request.cookies:
        gate.set_cookie(answer, cookie)  # a form needs one, also before the log-in
    return answer


def to(path: str) -> RedirectResponse:
    """Return a redirect after a form."""
    return RedirectResponse(path, 303)


def inside(path: str) -> str:
    """Return the path of a page of this desk, or the first page for anything else."""
    return path if path.startswith("/") and not path.startswith(("//", "/\\")) and path.isprintable() else "/"
