"""The published figures: `fedloom results`, and the check that `fedloom reproduce --check` shares."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fedloom.conf.errors import UserError
from fedloom.sims.cli.options import Quiet, show_tables
from fedloom.sims.experiments import figures

app = typer.Typer()


@app.command()
def results(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME]...", help="Tables. Default: all.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Measure again; exit code 1 if a figure is outside its band.")
    ] = False,
    minutes: Annotated[float, typer.Option(help="With --check: skip commands that take longer.")] = 5,
    write: Annotated[
        bool, typer.Option("--write", help="Write the marked tables of this checkout's Markdown files.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """List the published figures with their commands, seeds and bands; measure them again; write their tables."""
    chosen = figures.selected(names or [], figures.measurements())
    if write:
        if check or names:
            raise UserError("--write: writes all tables from the file; leave out names and --check")
        changed = figures.write(Path(figures.__file__).resolve().parents[2])
        typer.echo("\n".join(f"written: {path}" for path in changed) or "nothing to change")
    elif check:
        checked(chosen, minutes, quiet)
    else:
        show_tables(figures.shown(chosen))


def checked(chosen: Sequence[figures.Measurement], minutes: float, quiet: bool) -> None:
    """Measure figures again, print old, new and verdict, and exit with 1 if one is outside its band."""
    from fedloom.sims.experiments.check import check

    table, good = check(chosen, minutes, quiet=quiet)
    show_tables(table)
    if not good:
        raise typer.Exit(1)


def of_reproduction(name: str) -> list[figures.Measurement]:
    """Return the measurements of `fedloom reproduce NAME`. Raises UserError if it has no published figures."""
    if own := [each for each in figures.measurements() if each.words[:2] == ["reproduce", name]]:
        return own
    raise UserError(f"--check: {figures.FILE} has no figures of the reproduction '{name}'")
