"""The commands on runs that are there, several at once: `fedloom runs`, `fedloom compare` and `fedloom rm`."""

import json
import sys
from pathlib import Path
from typing import Annotated

import click
import typer

from fedloom.conf.errors import UserError
from fedloom.sims.cli.options import Json
from fedloom.sims.progress.waiting import waiting

app = typer.Typer()


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Where to look for runs, also in folders within it.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs: how they stand, method, seed, rounds, test accuracy, size on disk."""
    from fedloom.sims.operations import run_list

    rows = run_list.rows_of(folder)
    if as_json:
        typer.echo(json.dumps({"runs": rows}))
    else:
        typer.echo(run_list.table(rows, folder).plain() if rows else f"{folder}: no runs yet")
        for line in (line for row in rows for line in row.get("odd", [])):
            typer.echo(f"note: {line}")


@app.command()
def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that hold some.")],
    by: Annotated[
        list[str] | None, typer.Option(help="A row for each value of this key: strategy.name (repeatable).")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Write a line for each run and baseline, too.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page with tables and curves, too.")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs: means over seeds, paired differences with intervals, curves, cost. Baselines are rows, too."""
    with waiting("reading the runs"):
        from fedloom.sims.comparison import compare as beside

        comparison = beside(paths, by or [])
    typer.echo(comparison.text(), err=as_json)
    for written in [comparison.write_csv(csv) if csv else None, comparison.write(html) if html else None]:
        if written:
            typer.echo(f"written: {written}", err=as_json)
    if as_json:
        typer.echo(json.dumps(comparison.as_json()))


@app.command()
def rm(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/digits.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Remove runs with all that is kept of them. Refuses what is no run, and a run that a server works on."""
    from fedloom.sims.operations import removal, run_list

    folders = removal.removable(paths)
    if not (yes or sys.stdin.isatty()):
        raise UserError("rm: stdin is no terminal, so that nobody can be asked; nothing is removed (--yes: do not ask)")
    size = sum(run_list.size_of(folder) for folder in folders)
    which = f"{', '.join(map(str, folders))}: {run_list.megabytes(size)} MB"
    try:
        agreed = yes or typer.confirm(f"Remove {which}?")
    except click.Abort:
        raise UserError("rm: nobody answered; nothing is removed (--yes does not ask)") from None
    for folder in folders if agreed else []:
        removal.remove(folder)
    typer.echo(f"removed: {which}" if agreed else "nothing is removed")
