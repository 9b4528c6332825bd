"""`fedloom serve`: the operator's desk, and the tokens for it."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
from typer.core import TyperGroup

from fedloom.sims.cli.options import Json, show_tables
from fedloom.sims.progress.output import line_of, wants_json
from fedloom.sims.progress.waiting import LIBRARIES, waiting

if TYPE_CHECKING:
    from fedloom.sims.desk.audit import Audit
    from fedloom.sims.desk.tokens import Tokens

RUNS = Path("runs")


class _Serve(TyperGroup):
    """A group whose first word may be a folder: `fedloom serve`, `fedloom serve RUNS`, `fedloom serve RUNS token`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] in self.commands:
            args = [str(RUNS), *args]
        elif not (len(args) > 1 and args[1] in self.commands):
            ctx.allow_interspersed_args = True
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_Serve, invoke_without_command=True)


@app.callback()
def serve(
    context: typer.Context,
    runs: Annotated[Path, typer.Argument(help="Folder with runs, also in folders below it.")] = RUNS,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Others than loopback need --cert and --key.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8642,
    cert: Annotated[Path | None, typer.Option(help="TLS certificate (PEM), with the names of this machine.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of the certificate (PEM).")] = None,
    host_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Further host name, at which a proxy serves the desk by https; repeatable. Cookies then need https."
        ),
    ] = None,
    webhook: Annotated[str, typer.Option(help="URL that receives each change of a request's state.")] = "",
    webhook_secret_file: Annotated[Path | None, typer.Option(help="File with the secret that signs these messages.")] = None,
    timestamp: Annotated[
        str, typer.Option(envvar="FEDLOOM_TIMESTAMP", help="URL of an authority (RFC 3161) that stamps downloaded proofs.")
    ] = "",
) -> None:
    """Serve the operator's desk: pages and an HTTP interface to follow runs and to request that sites are forgotten."""
    context.obj = runs
    if context.invoked_subcommand:
        return
    with waiting(LIBRARIES):
        from fedloom.sims.desk.serve import Address
        from fedloom.sims.desk.serve import serve as start

    def say(line: str) -> None:
        typer.echo(line_of(line) if wants_json() else line, err=True)

    start(runs, Address(host, port, cert, key, host_name or []), say, webhook, webhook_secret_file, timestamp)


@app.command()
def token(
    context: typer.Context,
    role: Annotated[str, typer.Option(help="viewer (read), requester (and request for --sites), operator (everything).")],
    name: Annotated[str, typer.Option(help="Whose token it is, for the ledger.")],
    sites: Annotated[str, typer.Option(help="Sites that a requester may name: site-0001,site-0004.")] = "",
    days: Annotated[int, typer.Option(help="Days until it expires.", min=1, max=3650)] = 90,
) -> None:
    """Make a token, and print it once: only its sha256 is stored."""
    tokens, audit = _stores(context.obj)
    named = [site for site in sites.split(",") if site]
    facts = {"token": name, "role": role, "sites": ", ".join(named), "days": days}
    typer.echo(tokens.make(name, role, named, days, lambda: audit.note("token made", "command line", **facts)))


@app.command()
def tokens(context: typer.Context, as_json: Json = False) -> None:
    """List the tokens: name, role, sites, expiry."""
    import json

    from fedloom.sims.report.tables import Table

    found = _stores(context.obj)[0].all().values()
    rows = [[one.name, one.role, ", ".join(one.sites) or "-", one.created[:10], one.expires[:10], one.state]
            for one in found]  # fmt: skip
    columns = ["name", "role", "sites", "made", "expires", "state"]
    if as_json:
        typer.echo(json.dumps({"tokens": [dict(zip(columns, row, strict=True)) for row in rows]}))
    elif rows:
        show_tables(Table(f"Tokens of {context.obj}", columns, rows))
    else:
        typer.echo(f"{context.obj}: no tokens yet")


@app.command()
def revoke(context: typer.Context, name: Annotated[str, typer.Argument(help="Name of the token.")]) -> None:
    """Revoke a token. Sessions with it end at once."""
    tokens, audit = _stores(context.obj)
    tokens.revoke(name, lambda: audit.note("token revoked", "command line", token=name))
    typer.echo(f"revoked: {name}")


def _stores(runs: Path) -> "tuple[Tokens, Audit]":
    from fedloom.sims.desk.audit import Audit
    from fedloom.sims.desk.runs import checked
    from fedloom.sims.desk.tokens import Tokens

    return Tokens(checked(runs)), Audit(runs)
