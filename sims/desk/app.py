"""The desk as an ASGI application: routes, errors, limits."""

import logging
from collections.abc import Callable
from http import HTTPStatus
from importlib import metadata
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException

from fedloom.conf.errors import UserError, plain
from fedloom.server.ledger import LedgerError
from fedloom.sims.desk import api, forms, measures, pages, rendering
from fedloom.sims.desk.audit import Audit, RecordError
from fedloom.sims.desk.desk import AuthorityError, ConflictError, Desk
from fedloom.sims.desk.limits import Shield
from fedloom.sims.desk.runs import MissingError, Runs
from fedloom.sims.desk.sessions import DeniedError, Gate
from fedloom.sims.desk.tokens import Token, Tokens

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
HINTS = {  # what to do in the browser
    403: "Ask an operator for a token that may do this.",
    404: "Start again from the list of all runs.",
    409: "Reload the run's page: its requests and certificates show what has changed.",
    422: "Go back, and correct what you wrote.",
    429: "Wait a minute, and try again.",
    502: "Try again later.",
    503: "Ask an operator to look at the desk's disk, and try again.",
}
STATUS = (  # the first that fits
    (MissingError, 404),
    (ConflictError, 409),
    (LedgerError, 409),
    (AuthorityError, 502),
    (RecordError, 503),
    (UserError, 422),
)


def make_app(
    root: Path,
    hosts: frozenset[str] = LOOPBACK,
    tls: bool = False,
    stopping: Callable[[], bool] = lambda: False,
    authority: str = "",
) -> FastAPI:
    """Return the desk of a folder of runs.

    Args:
        root: The folder of runs.
        hosts: The names under which the desk may be called.
        tls: Whether browsers reach the desk by https.
        stopping: Whether the server is about to stop, so that pages no longer follow runs.
        authority: The URL of a time-stamping authority that stamps proofs; empty without one.
    """
    app = FastAPI(
        title="Fedloom desk", version=metadata.version("fedloom"), docs_url=None, redoc_url=None,
        openapi_url=f"{api.ROOT}/openapi.json", description=api.__doc__ or "",
    )  # fmt: skip
    app.state.desk = Desk(Runs(root), Gate(Tokens(root), Audit(root), tls), authority)
    app.state.stopping = stopping
    app.include_router(api.router)
    app.include_router(forms.router)
    app.include_router(pages.router)
    app.mount("/static", StaticFiles(directory=rendering.HERE / "static"))
    app.add_api_route("/health", _health, include_in_schema=False)
    app.add_api_route("/metrics", _metrics, include_in_schema=False)
    app.add_exception_handler(UserError, _failed)
    app.add_exception_handler(HTTPException, _failed)
    app.add_exception_handler(RequestValidationError, _failed)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(Shield, hosts=hosts, tls=tls)
    return app


def _health() -> dict[str, str]:
    return {"status": "ok"}


def _metrics(request: Request, by: Annotated[Token, Depends(api.caller)]) -> PlainTextResponse:
    return PlainTextResponse(measures.text(api.desk_of(request)), media_type="text/plain; version=0.0.4")


def _failed(request: Request, error: Exception) -> Response:
    """Return an error as JSON for programs, as a page for people. Unexpected errors are logged, and not described."""
    status, text = _described(request, error)
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "60"}}.get(status, {})
    if request.url.path.startswith((f"{api.ROOT}/", "/metrics", "/health")):
        return JSONResponse({"error": text}, status, headers)
    if isinstance(error, rendering.LogInError):
        query = request.scope["query_string"].decode("latin-1")
        asked = quote(request.scope["path"]) + (f"?{query}" if query else "")  # url.path ends at a ? in a run's name
        here = asked if request.method == "GET" else "/"
        return rendering.to(f"/login?next={quote(here)}" if here != "/" else "/login")
    hint = HINTS.get(status, "Ask an operator for help, and say at what time this happened.")
    return rendering.page(request, "error.html", status, code=status, text=text, title=HTTPStatus(status).phrase, hint=hint)


def _gone(request: Request) -> bool:
    """Return whether the run that a request names does not exist, such as one that was removed while it was read."""
    try:
        return "run" in request.path_params and not api.desk_of(request).runs.path(request.path_params["run"])
    except MissingError:
        return True


def _described(request: Request, error: Exception) -> tuple[int, str]:
    if isinstance(error, LedgerError | OSError) and _gone(request):
        error = MissingError("This run does not exist.")
    if isinstance(error, DeniedError):
        return error.status, str(error)
    if isinstance(error, RequestValidationError):
        return 422, "; ".join(f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors())
    if isinstance(error, RecordError):
        logging.getLogger("uvicorn.error").error("%s", error)
    if isinstance(error, UserError):
        status = next(code for kind, code in STATUS if isinstance(error, kind))
        return status, plain(api.desk_of(request).runs.without_root(str(error)))
    if isinstance(error, HTTPException):
        return error.status_code, "This page does not exist." if error.status_code == 404 else str(error.detail)
    path = plain(request.url.path)
    run = {"run": path.partition("/runs/")[2].partition("/")[0]}
    logging.getLogger("uvicorn.error").error("%s %s failed", request.method, path, exc_info=error, extra=run)
    return 500, "The desk failed to answer. Its log says why; the run is not affected."
