"""Commands on several existing runs, and on the published figures: `fedloom runs`, `compare`, `rm` and `results`."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedloom.conf.errors import UserError
from fedloom.conf.machine import size_of
from fedloom.sims.cli.options import Json, Quiet, confirmed, show_tables
from fedloom.sims.progress.waiting import waiting

if TYPE_CHECKING:
    from fedloom.sims.experiments.figures import Measurement

app = typer.Typer()


@app.command()
def runs(
    folder: Annotated[Path, typer.Argument(help="Folder with runs, also in folders below it.")] = Path("runs"),
    as_json: Json = False,
) -> None:
    """List runs with their status, method, seed, rounds, accuracy and size on disk."""
    from fedloom.sims.operations import run_list

    rows = run_list.rows_of(folder)
    if as_json:
        typer.echo(json.dumps({"runs": rows}))
    elif not rows:
        typer.echo(f"{folder}: no runs yet")
    else:
        show_tables(run_list.table(rows, folder), notes=[line for row in rows for line in row.get("odd", [])])


@app.command()
def compare(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, or folders that contain runs.")],
    by: Annotated[list[str] | None, typer.Option(help="Key with a row for each value: strategy.name. Repeatable.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write a CSV file with a line for each run and baseline.")] = None,
    html: Annotated[Path | None, typer.Option(help="Also write a page with tables and curves.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Also write the tables to a Markdown file.")] = None,
    latex: Annotated[Path | None, typer.Option(help="Also write the tables to a LaTeX file (booktabs).")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Also write the curves to this folder: PNG, SVG, PDF.")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs and their baselines: means over seeds, paired differences with intervals, curves, costs."""
    with waiting("reading the runs"):
        from fedloom.sims.comparison import compare as compare_runs

        comparison = compare_runs(paths, by or [])
    show_tables(*comparison.tables(), notes=comparison.notes, err=as_json)
    writers = {comparison.write_csv: csv, comparison.write: html, comparison.write_markdown: markdown,
               comparison.write_latex: latex}  # fmt: skip
    written = [write(path) for write, path in writers.items() if path]
    for path in [*written, *(comparison.write_pictures(pictures) if pictures else [])]:
        typer.echo(f"written: {path}", err=as_json)
    if as_json:
        typer.echo(json.dumps(comparison.as_json()))


@app.command()
def rm(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/digits.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete runs with all their files. Refuses folders that are not runs, and runs with a running server."""
    from fedloom.sims.operations import removal, run_list

    folders = removal.removable(paths)
    size = sum(size_of(folder) for folder in folders)
    which = f"{', '.join(map(str, folders))}: {run_list.megabytes(size)} MB"
    agreed = confirmed(f"Remove {which}?", yes, "rm", "use --yes to skip the question")
    for folder in folders if agreed else []:
        removal.remove(folder)
    typer.echo(f"removed: {which}" if agreed else "Nothing is removed.")


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
    from fedloom.sims.experiments import figures  # imported only where it is used

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


def checked(chosen: "Sequence[Measurement]", minutes: float, quiet: bool) -> None:
    """Measure figures again, print old, new and verdict, and exit with 1 if one is outside its band."""
    from fedloom.sims.experiments.check import check

    table, good = check(chosen, minutes, quiet=quiet)
    show_tables(table)
    if not good:
        raise typer.Exit(1)


def of_reproduction(name: str) -> "list[Measurement]":
    """Return the measurements of `fedloom reproduce NAME`. Raises UserError if it has no published figures."""
    from fedloom.sims.experiments import figures

    if own := [each for each in figures.measurements() if each.words[:2] == ["reproduce", name]]:
        return own
    raise UserError(f"--check: {figures.FILE} has no figures of the reproduction '{name}'")
