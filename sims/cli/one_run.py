"""Commands on one existing run: resume it, forget sites, check its certificates and its ledger."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fedloom.conf.errors import FailedError
from fedloom.sims.cli.options import FORGET, RUN, Json, Quiet, RunPath, named, numbers, show_tables
from fedloom.sims.progress.waiting import LIBRARIES, waiting

app = typer.Typer()

Sites = Annotated[list[str], typer.Argument(help="Names of sites, such as site-0001.")]


@app.command(rich_help_panel=RUN)
def resume(
    run: RunPath,
    overrides: Annotated[list[str] | None, typer.Argument(help="rounds=20: more rounds, also for a finished run.")] = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Continue a run that was stopped or killed, after its last committed round, or give a run more rounds."""
    began = time.monotonic()
    with waiting(LIBRARIES, quiet):
        from fedloom.sims.operations.simulate import resume as go_on
        from fedloom.sims.progress.listeners import listener_for

    summary = go_on(run, overrides or (), listener=listener_for(quiet, json_output=as_json), began=began)
    if as_json:
        typer.echo(json.dumps(summary))


@app.command(rich_help_panel=FORGET)
def unlearn(
    run: RunPath,
    sites: Sites,
    request_id: Annotated[str, typer.Option(help="Name of the request. The same name again returns the first result.")] = "",
    reason: Annotated[str, typer.Option(help="Reason, for the ledger and the certificate.")] = "",
    by: Annotated[str, typer.Option(help="Who asks, for the ledger and the certificate.")] = "",
    repair: Annotated[int, typer.Option(help="Rounds of training without the sites, afterwards.", min=0)] = 0,
    restore: Annotated[
        int,
        typer.Option(
            help="Rounds in which the other sites train the aggregate as one network. Try a fifth of the run's rounds.",
            min=0,
        ),
    ] = 0,
    back: Annotated[
        float | None,
        typer.Option(
            help="With --restore: share of the way back to the initial network, before training. Default: 0.5.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    recalibrate: Annotated[
        bool, typer.Option("--recalibrate", help="Compute a new head from statistics of the other sites, without training.")
    ] = False,
    retrain: Annotated[bool, typer.Option("--retrain", help="Train a network without the sites, for comparison.")] = False,
    rollback: Annotated[
        bool, typer.Option("--rollback", help="Go back to the round before the sites joined, and train again.")
    ] = False,
    without_data: Annotated[
        bool, typer.Option("--without-data", help="Forget even if the images for measuring are missing.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Forget sites: subtract and delete their contributions, and write a certificate.

    If a server is running on the run, it does this between two rounds.
    """
    with waiting(LIBRARIES, quiet or as_json):
        from fedloom.sims.operations.unlearn import CertificateError, UnlearningRequest
        from fedloom.sims.operations.unlearn import unlearn as fulfil
        from fedloom.sims.progress.listeners import listener_for

    request = UnlearningRequest(
        sites, request_id, reason, repair=repair, retrain=retrain, rollback=rollback, recalibrate=recalibrate,
        without_data=without_data, by=by, restore=restore, back=back,
    )  # fmt: skip
    fault: FailedError | None = None
    try:
        text, certificate = fulfil(run, request, listener=listener_for(quiet or as_json))
    except CertificateError as error:
        (text, certificate), fault = error.result, error
    typer.echo(text)
    if as_json:
        typer.echo(json.dumps(certificate))
    if fault:
        raise fault


@app.command(rich_help_panel=FORGET)
def requests(run: RunPath, as_json: Json = False) -> None:
    """List the requests of a run: state, sites, who asked, when and why, and what is outstanding."""
    with waiting(LIBRARIES, as_json):
        from fedloom.sims.operations import requests as listed

    found = listed.requests_of(run)
    if found and not as_json:
        show_tables(listed.table(run, found))
    else:
        listing = json.dumps({"requests": [listed.plain_values(one) for one in found]})
        typer.echo(listing if as_json else f"{run}: no requests yet")


@app.command(rich_help_panel=FORGET)
def readmit(
    run: RunPath,
    sites: Sites,
    node: Annotated[
        int | None,
        typer.Option(help="Id of the Flower node of a site that came back; the node receives the site's contributions."),
    ] = None,
) -> None:
    """Let forgotten sites participate again. With --node: confirm that a site came back as another node."""
    from fedloom.sims.operations.readmit import readmit as take_back

    typer.echo(take_back(run, sites, node))


@app.command(rich_help_panel=FORGET)
def compose(
    run: RunPath,
    sites: Annotated[str, typer.Option(help="Names of the sites: site-0001,site-0004.")],
    coefficients: Annotated[str, typer.Option(help="A coefficient for each site: 0.5,0.7. Default: those of the run.")] = "",
    how: Annotated[str, typer.Option(help="What to sum: gradients or weights. Default: as in the run.")] = "",
    start: Annotated[
        Path | None,
        typer.Option(
            help="Network to start from instead of theta_0: start + sum alpha g, or start + sum alpha theta for weights."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Allow another --start than the initial network of the sites.")
    ] = False,
    measure: Annotated[bool, typer.Option(help="Measure the network's accuracy, which needs the data.")] = True,
    out: Annotated[Path, typer.Option(help="File for the network.")] = Path("net.safetensors"),
) -> None:
    """Make a network of some sites of a run from their contributions, without training."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.compose import CompositionOrder
        from fedloom.sims.operations.compose import compose as make

    shares = numbers(coefficients, "--coefficients") or ()
    order = CompositionOrder(sites.split(","), shares, how, start, force, measure)
    show_tables(*make(run, order, out))
    typer.echo(f"written: {out}")


@app.command(rich_help_panel=FORGET)
def verify(
    certificate: Annotated[
        Path,
        typer.Argument(help="A certificate: runs/digits/certificates/<request>.json; or a run's folder.", callback=named),
    ],
    run: Annotated[
        Path | None,
        typer.Argument(
            help="The run's folder. Default: the one that has the certificate. After a run's folder: the request.",
            callback=named,
        ),
    ] = None,
    key: Annotated[str, typer.Option(help="The operator's public key, as a file or a line, to check the signature.")] = "",
    request: Annotated[
        str, typer.Option(help="The request that the certificate must be about. Default: the one in the file's name.")
    ] = "",
    site: Annotated[list[str] | None, typer.Option(help="A site that the certificate must be about. Repeatable.")] = None,
) -> None:
    """Show the content of a certificate, compare it with the run's ledger, and recompute its results where possible.

    Exit code 1 for a mismatch.
    """
    with waiting(LIBRARIES):
        from fedloom.sims.operations.verify import verify_certificate

    table, good = verify_certificate(certificate, run, key, request, site or ())
    show_tables(table)
    raise typer.Exit(0 if good else 1)


@app.command(rich_help_panel=RUN)
def backup(
    run: RunPath, out: Annotated[Path, typer.Argument(help="A new folder for the copy, on another disk if possible.")]
) -> None:
    """Copy a run, also while it trains, and check the copy. To restore it, copy the folder back and resume it."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations.backup import backup as copy

    typer.echo(f"written: {out}, after round {copy(run, out)}; the copy has no faults")


@app.command(rich_help_panel=FORGET)
def proof(
    run: RunPath,
    request: Annotated[str, typer.Argument(help="The id of a request with a certificate.")],
    out: Annotated[Path | None, typer.Option(help="The zip file. Default: proof-<request>.zip.")] = None,
    timestamp: Annotated[
        str, typer.Option(help="URL of an authority that adds a time stamp (RFC 3161).", envvar="FEDLOOM_TIMESTAMP")
    ] = "",
) -> None:
    """Write a request's proof as a zip file, which others check in a browser or with one Python file, without Fedloom."""
    with waiting(LIBRARIES):
        from fedloom.sims.report.proofs import write_proof

    typer.echo(f"written: {write_proof(run, request, out or Path(f'proof-{request}.zip'), timestamp)}")


@app.command(rich_help_panel=FORGET)
def key(
    pem: Annotated[bool, typer.Option("--pem", help="As PEM, for verify.py and openssl.")] = False,
    sha256: Annotated[bool, typer.Option("--sha256", help="Its sha256, as proofs show it.")] = False,
    former: Annotated[bool, typer.Option("--former", help="Also the keys before it, one after the other.")] = False,
    rotate: Annotated[
        bool,
        typer.Option("--rotate", help="First replace it by a new key. The old key stays for proofs of its certificates."),
    ] = False,
) -> None:
    """Print the public key with which others can check this operator's certificates and proofs."""
    from fedloom.server.unlearning import signing

    if rotate:
        old = signing.rotate()
        typer.echo(f"The old key is in {old}. Publish the new key, and leave the old public key published: it checks the "
                   "certificates that it signed.", err=True)  # fmt: skip
    for mine in [signing.operator_key(), *(signing.former_keys() if former else ())]:
        digest = signing.fingerprint(mine.public_key())
        typer.echo(digest if sha256 else signing.public_pem(mine).strip() if pem else signing.public_line(mine))


@app.command(rich_help_panel=RUN)
def prune(
    run: RunPath,
    older_than: Annotated[
        str,
        typer.Option(
            help="Also delete retrained networks, and what is needed only to return to rounds older than this: 90d, 12h."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Delete files that nothing refers to. Contributions, sums and certificates stay."""
    with waiting(LIBRARIES, as_json):
        from fedloom.sims.operations.ledger import prune as remove

    removed = remove(run, older_than)
    typer.echo(json.dumps({"removed": removed}) if as_json
               else "\n".join([f"removed: {line}" for line in removed] or ["nothing to remove"]))  # fmt: skip


@app.command(rich_help_panel=FORGET)
def ledger(
    run: RunPath,
    check: Annotated[
        bool, typer.Option("--check", help="Verify the event chain, the files and the sums. Exit code 1 for problems.")
    ] = False,
    as_json: Json = False,
) -> None:
    """List the events of a run's ledger, or check the ledger and its files."""
    with waiting(LIBRARIES, as_json):
        from fedloom.sims.operations import ledger as ledgers
        from fedloom.sims.progress.listeners import listener_for

    say: Callable[[str], None] = (lambda text: None) if as_json else typer.echo
    result: dict[str, Any] = {}
    if check:
        result |= ledgers.audit(run, listener_for(quiet=as_json))
        for line in result["problems"] or ["no problems"]:
            say(line)
        for line in result["notes"]:
            say(f"note: {line}")
    else:
        result["events"] = ledgers.events(run)
        if not as_json:
            show_tables(ledgers.events_table(run, result["events"]))
    if as_json:
        typer.echo(json.dumps(result))
    raise typer.Exit(0 if result.get("ok", True) else 1)
