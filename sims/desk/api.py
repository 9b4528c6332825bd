"""The HTTP interface under /api/v1, for programs; /api/v1/openapi.json describes it."""

import dataclasses
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from fastapi.responses import FileResponse, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel, ConfigDict, Field

from fedloom.server.unlearning.signing import SUFFIX
from fedloom.sims.desk import details
from fedloom.sims.desk.desk import Desk
from fedloom.sims.desk.runs import Run
from fedloom.sims.desk.tokens import Token
from fedloom.sims.operations.requests import RequestStatus
from fedloom.sims.operations.unlearn import UnlearningRequest

ROOT = "/api/v1"
MOST_EVENTS = 1000


class Order(BaseModel):
    """A request to forget sites."""

    model_config = ConfigDict(extra="forbid")
    sites: list[str] = Field(description="Names of sites, as the run lists them.", min_length=1)
    reason: str = Field("", description="The reason, for the ledger and the certificate.")
    repair: int = Field(0, description="Rounds of training without the sites, afterwards.")
    restore: int = Field(0, description="Rounds in which the other sites train the aggregate as one network.")
    recalibrate: bool = Field(False, description="Compute a new head from the other sites' statistics.")
    rollback: bool = Field(False, description="Go back to before the sites joined, and train again.")
    retrain: bool = Field(False, description="Train a network without the sites, for comparison.")

    def order(self, id: str) -> UnlearningRequest:
        """Return the same as the order of `fedloom unlearn`."""
        return UnlearningRequest(id=id, **self.model_dump())


def desk_of(request: Request) -> Desk:
    """Return the desk that serves this request."""
    return request.app.state.desk


bearer = HTTPBearer(auto_error=False, description="A token of `fedloom serve token`.")  # for the description alone


def caller(request: Request, _: Annotated[Any, Depends(bearer)] = None) -> Token:
    """Return the token that the caller sends."""
    return desk_of(request).gate.by_bearer(request)


At = Annotated[Desk, Depends(desk_of)]
By = Annotated[Token, Depends(caller)]
router = APIRouter(prefix=ROOT, dependencies=[Depends(caller)])


@router.get("/me", tags=["you"])
def me(by: By) -> dict[str, Any]:
    """Say whose token this is, its role and sites, and when it expires."""
    return {"name": by.name, "role": by.role, "sites": by.sites, "expires": by.expires}


@router.get("/runs", tags=["runs"])
def runs(at: At) -> list[Run]:
    """List all runs."""
    return at.runs.all()


@router.get("/runs/{run}", tags=["runs"])
def one_run(at: At, run: str) -> Run:
    """Return a run's status, results and size."""
    return at.runs.get(run)


@router.get("/runs/{run}/rounds", tags=["runs"])
def rounds(at: At, run: str) -> dict[str, Any]:
    """Return the curves of a run, its dropped replies, bytes and seconds."""
    return dataclasses.asdict(at.runs.cached(run, details.training_of))


@router.get("/runs/{run}/sites", tags=["runs"])
def sites(at: At, run: str) -> list[details.Site]:
    """List the sites of a run."""
    return at.runs.cached(run, details.sites_of)


@router.get("/runs/{run}/sites/{site:path}", tags=["runs"])
def one_site(at: At, run: str, site: str) -> details.SiteRecord:
    """Return a site: its rounds, its node and key, and what this machine stores of it."""
    return details.site_of(at.runs.path(run), site)


@router.get("/runs/{run}/events", tags=["ledger"])
def events(
    at: At, run: str, before: Annotated[int, Query(ge=0)] = 0, most: Annotated[int, Query(ge=1, le=MOST_EVENTS)] = 100
) -> list[details.Event]:
    """List events of the ledger, the newest first. `before`: only those with smaller ids (0: all)."""
    return details.events_of(at.runs.path(run), before, most)


@router.get("/runs/{run}/chain", tags=["ledger"])
def chain(at: At, run: str) -> details.Chain:
    """Check that the ledger's events follow each other."""
    return at.runs.cached(run, details.chain_of)


@router.get("/runs/{run}/requests", tags=["requests"])
def requests(at: At, run: str) -> list[RequestStatus]:
    """List the requests of a run, oldest first."""
    return at.requests(run)


@router.post("/runs/{run}/requests", tags=["requests"], status_code=202)
def submit(
    request: Request, at: At, by: By, run: str, order: Order,
    idempotency_key: Annotated[str, Header(description="The request's id. Repeating it changes nothing.")] = "",
) -> RequestStatus:  # fmt: skip
    """Queue a request to forget sites. The run's server processes it after the current round.

    The same Idempotency-Key with the same body returns the same request; with another body, the answer is 409.
    """
    return at.submit(request, by, run, order.order(idempotency_key))


@router.get("/runs/{run}/requests/{id}", tags=["requests"])
def one_request(at: At, run: str, id: str) -> RequestStatus:
    """Return a request."""
    return at.request(run, id)


@router.delete("/runs/{run}/requests/{id}", tags=["requests"])
def cancel(request: Request, at: At, by: By, run: str, id: str) -> RequestStatus:
    """Withdraw a request that waits."""
    return at.cancel(request, by, run, id)


@router.get("/runs/{run}/certificates", tags=["certificates"])
def certificates(at: At, run: str) -> list[details.Certificate]:
    """List the certificates of a run."""
    return details.certificates_of(at.runs.path(run))


@router.get("/runs/{run}/certificates/{id}", tags=["certificates"], response_class=FileResponse)
def certificate(request: Request, at: At, by: By, run: str, id: str) -> FileResponse:
    """Download a certificate."""
    return download(at, request, by, run, id, ".json")


@router.get("/runs/{run}/certificates/{id}/signature", tags=["certificates"], response_class=FileResponse)
def signature(request: Request, at: At, by: By, run: str, id: str) -> FileResponse:
    """Download the operator's signature of a certificate."""
    return download(at, request, by, run, id, SUFFIX)


@router.get("/runs/{run}/certificates/{id}/proof", tags=["certificates"], response_class=Response)
def proof(request: Request, at: At, by: By, run: str, id: str) -> Response:
    """Download the proof: a zip file that others check in a browser or with one Python file."""
    return proof_download(at, request, by, run, id)


def proof_download(at: Desk, request: Request, by: Token, run: str, id: str) -> Response:
    """Return a request's proof as a download."""
    about = {"Content-Disposition": f'attachment; filename="proof-{id}.zip"'}
    return Response(at.proof(request, by, run, id), media_type="application/zip", headers=about)


def download(at: Desk, request: Request, by: Token, run: str, id: str, suffix: str) -> FileResponse:
    """Return a file of a certificate as a download, which browsers do not show."""
    file = at.certificate(request, by, run, id, suffix)
    kind = "application/json" if suffix == ".json" else "application/octet-stream"
    return FileResponse(file, media_type=kind, filename=file.name)
