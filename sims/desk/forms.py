"""The desk's forms: log in and out, ask to forget sites, review, send, cancel; and the pages of requests."""

import asyncio
import uuid
from dataclasses import replace
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from fedloom.conf.errors import UserError
from fedloom.sims.desk import details
from fedloom.sims.desk.api import At, desk_of
from fedloom.sims.desk.desk import ROUNDS, may_cancel, preview
from fedloom.sims.desk.rendering import By, inside, page, to
from fedloom.sims.desk.sessions import DeniedError
from fedloom.sims.desk.tokens import REQUESTER, Token
from fedloom.sims.operations.unlearn import UnlearningRequest

OPTIONS = ("recalibrate", "rollback", "retrain")
router = APIRouter(include_in_schema=False)


@router.get("/login")
def log_in_form(request: Request, next: str = "/") -> HTMLResponse:
    """Show the form for a token."""
    return page(request, "login.html", next=inside(next), error="")


@router.post("/login")
async def log_in(request: Request) -> Response:
    """Begin a session."""
    gate = desk_of(request).gate
    fields = await gate.form(request)
    where = inside(_one(fields, "next", "/"))
    answer = to(where)
    try:
        gate.log_in(request, _one(fields, "token"), answer)
    except DeniedError as error:
        return page(request, "login.html", error.status, next=where, error=str(error))
    return answer


@router.post("/logout")
async def log_out(request: Request, by: By) -> Response:
    """End the session."""
    gate = desk_of(request).gate
    await gate.form(request)
    gate.audit.note("logged out", by.name)
    gate.log_out(request)
    answer = to("/login")
    answer.delete_cookie(gate.cookie, path="/", secure=gate.tls, httponly=True, samesite="strict")
    return answer


@router.get("/requests")
def all_requests(request: Request, at: At, by: By) -> HTMLResponse:
    """List the requests of all runs, the open ones first."""
    found = []
    for run in at.runs.all():
        try:
            found += [(run, one) for one in at.requests(run.id)]
        except Exception:  # no ledger yet, or its files are damaged in any way
            continue
    found.sort(key=lambda both: both[1].times.get("received", ""), reverse=True)
    found.sort(key=lambda both: not both[1].is_open)
    return page(request, "requests.html", run=None, requests=found)


@router.get("/runs/{run}/requests")
def requests(request: Request, at: At, by: By, run: str) -> HTMLResponse:
    """List the requests of a run."""
    found = at.runs.get(run)
    return page(request, "requests.html", run=found, requests=[(found, one) for one in at.requests(run)][::-1])


@router.get("/runs/{run}/requests/{id}")
def one_request(request: Request, at: At, by: By, run: str, id: str) -> HTMLResponse:
    """Show a request, and a button to withdraw it while it waits."""
    known = at.request(run, id)
    has_certificate = details.certificate_file(at.runs.path(run), id).is_file()
    can = known.state == "received" and may_cancel(by, known)
    return page(request, "request.html", run=at.runs.get(run), one=known, may_cancel=can, has_certificate=has_certificate)


@router.post("/runs/{run}/requests/{id}/cancel")
async def cancel(request: Request, at: At, by: By, run: str, id: str) -> Response:
    """Withdraw a request."""
    await at.gate.form(request)
    await asyncio.to_thread(at.cancel, request, by, run, id)
    return to(f"/runs/{quote(run)}/requests/{quote(id)}")


@router.get("/runs/{run}/ask")
def ask(request: Request, at: At, by: By, run: str, site: str = "") -> HTMLResponse:
    """Show the form of a request."""
    at.gate.require(request, by, by.may(REQUESTER), f"open the form of a request in {run}")
    return _form(request, by, run, UnlearningRequest([site] if site else []))


@router.post("/runs/{run}/ask")
async def review(request: Request, at: At, by: By, run: str) -> HTMLResponse:
    """Show what a request will do, before it is sent."""
    order = _order(await at.gate.form(request), uuid.uuid4().hex[:12])
    at.gate.require(request, by, by.may_name(order.sites), f"ask to forget {', '.join(order.sites)} in {run}")
    found = at.runs.get(run)
    try:
        seen = await asyncio.to_thread(preview, at.runs.path(run), order, found.running)
    except UserError as error:
        return await asyncio.to_thread(_form, request, by, run, order, str(error))
    return page(request, "confirm.html", run=found, order=order, preview=seen, options=OPTIONS)


@router.post("/runs/{run}/requests")
async def submit(request: Request, at: At, by: By, run: str) -> Response:
    """Queue a request that was reviewed."""
    fields = await at.gate.form(request)
    sent = await asyncio.to_thread(at.submit, request, by, run, _order(fields, _one(fields, "id")))
    return to(f"/runs/{quote(run)}/requests/{quote(sent.id)}")


def _form(request: Request, by: Token, run: str, order: UnlearningRequest, error: str = "") -> HTMLResponse:
    at = desk_of(request)
    mine = [one for one in at.runs.cached(run, details.sites_of) if by.may_name([one.name])]
    sites, gone = [one for one in mine if not one.forgotten], [one.title for one in mine if one.forgotten]
    found = at.runs.get(run)
    return page(request, "ask.html", 422 if error else 200, run=found, sites=sites, forgotten=gone, order=order, error=error)


def _order(fields: dict[str, list[str]], id: str) -> UnlearningRequest:
    rounds = {name: _one(fields, name, "0") or "0" for name in ROUNDS}
    for name, text in rounds.items():
        if not (text.isascii() and text.isdigit() and len(text) < 9):
            raise UserError(f"Rounds to {name}: write a whole number.")
    ways = {name: name in fields for name in OPTIONS}
    order = UnlearningRequest(fields.get("site", []), id, _one(fields, "reason").strip())
    return replace(order, **{name: int(text) for name, text in rounds.items()}, **ways)


def _one(fields: dict[str, list[str]], name: str, default: str = "") -> str:
    return fields.get(name, [default])[0]
