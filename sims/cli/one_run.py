"""The commands on one run that is there: resuming it, taking sites out, its certificates and its ledger."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.conf.formatting import count
from fedloom.sims.cli.options import Json, Quiet, numbers
from fedloom.sims.progress.waiting import LIBRARIES, waiting

app = typer.Typer()

RunPath = Annotated[Path, typer.Argument(help="A run's folder, such as runs/digits.")]
Sites = Annotated[list[str], typer.Argument(help="Names of sites, such as site-0001.")]


@app.command()
def resume(run: RunPath, quiet: Quiet = False, as_json: Json = False) -> None:
    """Go on with a run that was stopped or killed, after its last committed round."""
    began = time.monotonic()
    with waiting(LIBRARIES, quiet):
        from fedloom.sims.operations.simulate import resume as go_on
        from fedloom.sims.progress.listeners import listener_for

    summary = go_on(run, listener=listener_for(quiet, json_output=as_json), began=began)
    if as_json:
        typer.echo(json.dumps(summary))


@app.command()
def unlearn(
    run: RunPath,
    sites: Sites,
    request_id: Annotated[str, typer.Option(help="Its name; the same one again changes nothing.")] = "",
    reason: Annotated[str, typer.Option(help="Why, for the ledger and the certificate.")] = "",
    repair: Annotated[int, typer.Option(help="Rounds to train further without the sites.", min=0)] = 0,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Fit the aggregate's head anew to sums that the other sites tell.")
    ] = False,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train a network without them, to compare with.")] = False,
    rollback: Annotated[bool, typer.Option("--rollback", help="Go back to before they took part, train again.")] = False,
    without_data: Annotated[
        bool, typer.Option("--without-data", help="Even where the images to measure with are not there.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Remove sites: subtract and delete what they gave, and write a certificate. A running server does it between rounds."""
    with waiting(LIBRARIES, quiet or as_json):
        from fedloom.sims.operations.unlearn import UnlearningRequest
        from fedloom.sims.operations.unlearn import unlearn as fulfil
        from fedloom.sims.progress.listeners import listener_for

    asked = UnlearningRequest(sites, request_id, reason, repair, retrain, rollback, recalibrate, without_data)
    text, certificate = fulfil(run, asked, listener=listener_for(quiet or as_json))
    typer.echo(text)
    if as_json:
        typer.echo(json.dumps(certificate))


@app.command()
def readmit(
    run: RunPath,
    sites: Sites,
    node: Annotated[int | None, typer.Option(help="It is at this node of Flower's now, and may have what it gave.")] = None,
) -> None:
    """Let forgotten sites take part again; with --node: vouch for a site that came back as another node."""
    from fedloom.sims.operations.readmit import readmit as take_back

    typer.echo(take_back(run, sites, node))


@app.command()
def compose(
    run: RunPath,
    sites: Annotated[str, typer.Option(help="Their names: site-0001,site-0004")],
    coefficients: Annotated[str, typer.Option(help="One for each: 0.5,0.7; default: as the run does.")] = "",
    how: Annotated[str, typer.Option(help="gradients or weights; default: as the run does.")] = "",
    start: Annotated[
        Path | None,
        typer.Option(help="Another network instead of theta_0: start + sum alpha g, or of weights start + sum alpha theta."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Even if it is not the one that the sites started from.")] = False,
    measure: Annotated[bool, typer.Option(help="Say what the network knows (needs the data).")] = True,
    out: Annotated[Path, typer.Option(help="Where the network goes.")] = Path("net.safetensors"),
) -> None:
    """Make a network of some of a run's sites alone, from what they contributed: nothing is trained."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.compose import CompositionOrder
        from fedloom.sims.operations.compose import compose as make

    shares = numbers(coefficients, "--coefficients") or ()
    order = CompositionOrder(sites.split(","), shares, how, start, force, measure)
    typer.echo("\n".join(table.plain() for table in make(run, order, out)))
    typer.echo(f"written: {out}")


@app.command()
def verify(
    certificate: Annotated[Path, typer.Argument(help="certificates/<request>.json")],
    run: Annotated[Path | None, typer.Argument(help="The run's folder; not needed with --key.")] = None,
    key: Annotated[str, typer.Option(help="The operator's public key, a file or its line: check the signature.")] = "",
    request: Annotated[str, typer.Option(help="The request that it should be about; else the one in the file's name.")] = "",
    site: Annotated[list[str] | None, typer.Option(help="A site that it should be about; may be repeated.")] = None,
) -> None:
    """Say what a certificate is about; compare it with a run's ledger, and recompute what can be recomputed.

    Exit code 1: a mismatch.
    """
    with waiting(LIBRARIES):
        from fedloom.sims.operations.verify import verify_certificate

    table, good = verify_certificate(certificate, run, key, request, site or ())
    typer.echo(table.plain())
    raise typer.Exit(0 if good else 1)


@app.command()
def key() -> None:
    """Print the public key by which others can check this operator's certificates."""
    from fedloom.server.unlearning.signing import operator_key, public_line

    typer.echo(public_line(operator_key()))


@app.command()
def ledger(
    run: RunPath,
    check: Annotated[bool, typer.Option("--check", help="Verify chain, blobs and sum (exit code 1: problems).")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove blobs that nothing refers to.")] = False,
    as_json: Json = False,
) -> None:
    """List a run's events, or check all that is kept of it."""
    with waiting(LIBRARIES, as_json):
        from fedloom.sims.operations import ledger as ledgers
        from fedloom.sims.progress.listeners import listener_for

    result: dict[str, Any] = {}
    if prune:
        result["removed"] = ledgers.prune(run)
        typer.echo(f"{count(len(result['removed']), 'file')} removed")
    if check:
        result |= ledgers.audit(run, listener_for(quiet=as_json))
        for line in result["problems"] or ["no problems"]:
            typer.echo(line)
        for line in result["notes"]:
            typer.echo(f"note: {line}")
    if not (check or prune):
        result["events"] = ledgers.events(run)
        typer.echo(ledgers.events_table(run, result["events"]).plain())
    if as_json:
        typer.echo(json.dumps(result))
    raise typer.Exit(0 if result.get("ok", True) else 1)
