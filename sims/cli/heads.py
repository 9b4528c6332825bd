"""The commands on components that sites published: `fedloom heads` and `fedloom transfer-head`."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.sims.progress.waiting import LIBRARIES, waiting

app = typer.Typer()

RunPath = Annotated[Path, typer.Argument(help="A run's folder, such as runs/components.")]


@app.command()
def heads(
    run: RunPath,
    png: Annotated[Path | None, typer.Option(help="Draw the heat maps, too, into this file.")] = None,
) -> None:
    """How good every site's head is on every site's extractor, for the run's method and its baselines."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations import transfer_head as transfer

    tables = transfer.measured(run, png)
    typer.echo("\n".join(table.plain() for table in tables))
    if png:
        typer.echo(f"written: {png}")


@app.command("transfer-head")
def transfer_head(
    run: RunPath,
    giver: Annotated[str, typer.Option("--from", help="The site whose head it is.")],
    taker: Annotated[str, typer.Option("--to", help="The site whose extractor it is put on.")],
    out: Annotated[Path, typer.Option(help="Where the network goes.")] = Path("net.safetensors"),
) -> None:
    """One site's head on another site's extractor, as a network, and how good it was measured to be."""
    with waiting(LIBRARIES):
        from fedloom.sims.operations import transfer_head as transfer

    typer.echo(transfer.transfer(run, giver, taker, out).plain())
    typer.echo(f"written: {out}")
