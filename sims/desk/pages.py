"""The desk's pages to read. All work without JavaScript; with it, a page follows its run while it changes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import FileResponse, HTMLResponse, Response, StreamingResponse

from fedloom.conf.errors import UserError
from fedloom.conf.metrics import Facts
from fedloom.server.unlearning.certificate import read as read_certificate
from fedloom.server.unlearning.signing import SUFFIX
from fedloom.sims.desk import details
from fedloom.sims.desk.api import At, desk_of, download, proof_download
from fedloom.sims.desk.curves import chart
from fedloom.sims.desk.rendering import PER_PAGE, By, page
from fedloom.sims.desk.tokens import OPERATOR, Token
from fedloom.sims.report.certificates import sections

MOST_STREAMS, MOST_OF_TOKEN = 200, 20
LOOK_SECONDS, ALIVE_SECONDS = 1.0, 15.0
router = APIRouter(include_in_schema=False)
streams: dict[object, str] = {}  # the pages that follow a run now, and the names of their tokens


@router.get("/")
def runs(request: Request, at: At, by: By) -> HTMLResponse:
    """List all runs."""
    return page(request, "runs.html", runs=at.runs.all(), damaged=at.runs.damaged())


@router.get("/runs/{run}")
def one_run(request: Request, at: At, by: By, run: str, start: Annotated[int, Query(ge=0)] = 0) -> HTMLResponse:
    """Show a run: curves, sites, dropped replies."""
    found, training = at.runs.get(run), at.runs.cached(run, details.training_of)
    left = max(0, found.rounds - found.round) * training.pace if found.running else 0.0
    try:
        sites = at.runs.cached(run, details.sites_of)
    except UserError:  # no ledger yet
        sites = []
    loss = chart("Training loss", {"training loss": training.loss}, Facts("loss", "training loss"))
    scores = chart(f"Validation {training.metric.title}", _without_double(training.scores), training.metric)
    return page(
        request, "run.html", run=found, training=training, charts=[one for one in (scores, loss) if one], left=left,
        sites=sites[start : start + PER_PAGE], start=start, many=len(sites), per_page=PER_PAGE,
        dropped=training.dropped[:PER_PAGE],
    )  # fmt: skip


def _without_double(scores: dict[str, details.Curve]) -> dict[str, details.Curve]:
    """Return the curves without the union's, if there is only one domain."""
    same = len(scores) == 2 and len({tuple(curve) for curve in scores.values()}) == 1
    return {name: curve for name, curve in scores.items() if not same or name != "union"}


@router.get("/runs/{run}/live")
async def live(request: Request, at: At, by: By, run: str, since: str = "") -> Response:
    """Send an event whenever the run changes, for the script of a page that shows its version `since`."""
    now = await asyncio.to_thread(at.runs.version, run)
    if len(streams) >= MOST_STREAMS or list(streams.values()).count(by.name) >= MOST_OF_TOKEN:
        return Response("Too many pages follow runs now.", 503)
    return StreamingResponse(_changes(request, by, run, since or now), media_type="text/event-stream")


async def _changes(request: Request, by: Token, run: str, before: str) -> AsyncIterator[str]:
    at, me, silent = desk_of(request), object(), 0.0
    streams[me] = by.name
    try:
        yield "retry: 5000\n\n"
        while at.gate.by_session(request) and not request.app.state.stopping():
            if (now := await asyncio.to_thread(at.runs.version, run)) != before:
                before, silent = now, 0.0
                yield "event: change\ndata: \n\n"
            elif silent >= ALIVE_SECONDS:
                silent = 0.0
                yield ": alive\n\n"
            await asyncio.sleep(LOOK_SECONDS)
            silent += LOOK_SECONDS
    except UserError:  # the run was removed
        return
    finally:
        del streams[me]


@router.get("/runs/{run}/sites/{site:path}")
def one_site(request: Request, at: At, by: By, run: str, site: str) -> HTMLResponse:
    """Show a site."""
    return page(request, "site.html", run=at.runs.get(run), record=details.site_of(at.runs.path(run), site))


@router.get("/runs/{run}/events")
def events(request: Request, at: At, by: By, run: str, before: Annotated[int, Query(ge=0)] = 0) -> HTMLResponse:
    """Show the ledger's events and the state of their chain."""
    listed = details.events_of(at.runs.path(run), before, PER_PAGE)
    return page(request, "events.html", run=at.runs.get(run), events=listed, chain=at.runs.cached(run, details.chain_of))


@router.get("/compare")
def compare(request: Request, at: At, by: By, one: str = "", other: str = "") -> HTMLResponse:
    """Show two runs next to each other."""
    tables, notes, drawn = [], [], None
    if one and other:
        from fedloom.sims.comparison import compare as compare_runs  # imported only here: slow
        from fedloom.sims.comparison.tables import what_differs

        found = compare_runs([at.runs.path(one), at.runs.path(other)], ["run.name"])
        tables = [*found.tables(), *([what_differs(found.groups, found.differing)] if found.differing else [])]
        notes = [at.runs.without_root(note) for note in found.notes]
        training = {id: at.runs.cached(id, details.training_of) for id in (one, other)}
        curves = {id: each.scores.get("union") or next(iter(each.scores.values()), []) for id, each in training.items()}
        drawn = chart(f"Validation {training[one].metric.title}", curves, training[one].metric)
    return page(request, "compare.html", runs=at.runs.all(), one=one, other=other, tables=tables, notes=notes, chart=drawn)


@router.get("/audit")
def audit(request: Request, at: At, by: By) -> HTMLResponse:
    """Show the desk's own record, to operators."""
    at.gate.require(request, by, by.may(OPERATOR), "read the audit record")
    record = at.gate.audit
    return page(request, "audit.html", events=record.newest(PER_PAGE), problem=record.problem())


@router.get("/runs/{run}/certificates")
def certificates(request: Request, at: At, by: By, run: str) -> HTMLResponse:
    """List the certificates of a run."""
    found = details.certificates_of(at.runs.path(run))
    return page(request, "certificates.html", run=at.runs.get(run), certificates=found)


@router.get("/runs/{run}/certificates/{id}")
def certificate(request: Request, at: At, by: By, run: str, id: str) -> HTMLResponse:
    """Show a certificate."""
    content = read_certificate(details.certificate_file(at.runs.path(run), at.request(run, id).id))
    listed = next((one for one in details.certificates_of(at.runs.path(run)) if one.request == id), None)
    return page(request, "certificate.html", run=at.runs.get(run), id=id, sections=sections(content), about=listed)


@router.get("/runs/{run}/certificates/{id}/file")
def certificate_download(request: Request, at: At, by: By, run: str, id: str) -> FileResponse:
    """Download a certificate."""
    return download(at, request, by, run, id, ".json")


@router.get("/runs/{run}/certificates/{id}/signature")
def signature_download(request: Request, at: At, by: By, run: str, id: str) -> FileResponse:
    """Download the signature of a certificate."""
    return download(at, request, by, run, id, SUFFIX)


@router.get("/runs/{run}/certificates/{id}/proof")
def proof(request: Request, at: At, by: By, run: str, id: str) -> Response:
    """Download the proof of a request."""
    return proof_download(at, request, by, run, id)
