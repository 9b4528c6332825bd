"""Commands on several existing runs, on published figures, and benchmarks: `fedloom compare`, `reproduce`, `bench`, ..."""

import importlib
import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedloom.conf.errors import UserError, unknown
from fedloom.sims.cli.options import MEASURE, RUN, Json, Quiet, confirmed, show_modules, show_tables
from fedloom.sims.progress.waiting import waiting
from fedloom.sims.report.tables import Table

if TYPE_CHECKING:
    from fedloom.sims.experiments.figures import Measurement

app = typer.Typer()


@app.command(rich_help_panel=RUN)
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


@app.command(rich_help_panel=RUN)
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
        from fedloom.sims.comparison import compared

        comparison = compared([path.expanduser() for path in paths], by or [])
    show_tables(*comparison.tables(), notes=comparison.notes, err=as_json)
    writers = {comparison.write_csv: csv, comparison.write: html, comparison.write_markdown: markdown,
               comparison.write_latex: latex}  # fmt: skip
    written = [write(path) for write, path in writers.items() if path]
    for path in [*written, *(comparison.write_pictures(pictures) if pictures else [])]:
        typer.echo(f"written: {path}", err=as_json)
    if as_json:
        typer.echo(json.dumps(comparison.as_json()))


@app.command(rich_help_panel=RUN)
def rm(
    paths: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/digits.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete runs with all their files. Refuses folders that are not runs, and runs with a running server."""
    from fedloom.conf.machine import size_of
    from fedloom.sims.operations import removal, run_list

    folders = removal.removable(paths)
    size = sum(size_of(folder) for folder in folders)
    which = f"{', '.join(map(str, folders))}: {run_list.megabytes(size)} MB"
    agreed = confirmed(f"Remove {which}?", yes, "rm", "use --yes to skip the question")
    for folder in folders if agreed else []:
        removal.remove(folder)
    typer.echo(f"removed: {which}" if agreed else "Nothing is removed.")


@app.command(rich_help_panel=MEASURE)
def reproduce(
    what: Annotated[str, typer.Argument(help="What to measure. Without it, all reproductions are listed.")] = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="Changed keys of every run: engine.workers=2.")] = None,
    preset: Annotated[str, typer.Option(help="cpu: minutes on two cores. paper: the size of the paper, for a GPU.")] = "cpu",
    seeds: Annotated[int, typer.Option(help="Number of seeds for each method.", min=1)] = 5,
    table: Annotated[str, typer.Option(help="Only these tables: figure2,steps. Default: all.")] = "",
    check: Annotated[
        bool, typer.Option("--check", help="Measure its published figures again instead, with their own options.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Measure the tables of a paper, and compare them with the paper. Finished runs are not repeated."""
    from fedloom.sims.experiments import MODULES

    if not what:
        show_modules(MODULES)
        return
    if check:
        if overrides or table:
            raise UserError("--check: the published figures have their own options; leave out overrides and --table")
        _named("reproduction", what, MODULES, "reproduce")
        checked(of_reproduction(what), math.inf, quiet)
        return
    words = [*(overrides or []), *([f"tables={table}"] if table else [])]
    folder = _named("reproduction", what, MODULES, "reproduce")(preset, seeds, words, quiet=quiet)
    typer.echo((folder / "tables.md").read_text(encoding="utf-8"))
    typer.echo(f"written: {folder}/tables.md and {folder}/report.html")


@app.command(rich_help_panel=MEASURE)
def bench(
    what: Annotated[str, typer.Argument(help="A benchmark. Without it, all benchmarks are listed.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Fewer rounds (engines, faults, federation, peers).")] = False,
    large: Annotated[bool, typer.Option("--large", help="A network of 2.8 MB instead of 0.3 (peers only).")] = False,
    out: Annotated[Path, typer.Option(help="Folder for results (engines only).")] = Path("runs/bench"),
    as_json: Json = False,
) -> None:
    """Measure time or memory on this machine."""
    from fedloom.sims.benchmarks import MODULES

    if not what:
        show_modules(MODULES)
        return
    measure = _named("benchmark", what, MODULES, "bench")
    options = {"quick": quick, "large": large, "out": out}
    tables, rows = measure(**{name: options[name] for name in inspect.signature(measure).parameters if name in options})
    show_tables(*([tables] if isinstance(tables, Table) else tables), err=as_json)
    if as_json:
        typer.echo(json.dumps({"rows": rows}))


@app.command(rich_help_panel=MEASURE)
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


def _named(kind: str, name: str, modules: Mapping[str, str], function: str) -> Callable[..., Any]:
    """Return a function of the module that `modules` has under `name`. Raises UserError with the nearest name."""
    if name not in modules:
        raise unknown(kind, name, modules)
    return getattr(importlib.import_module(modules[name]), function)
