"""Commands that list experiments and keys of a configuration, check this machine, and write a report again."""

import json
from pathlib import Path
from typing import Annotated

import typer

from fedloom.sims.cli.options import RUN, Json, RunPath, kinds, show_lines, show_tables
from fedloom.sims.progress.waiting import LIBRARIES, waiting
from fedloom.sims.report.tables import Table

app = typer.Typer()


@app.command(rich_help_panel=RUN)
def options(
    section: Annotated[
        str, typer.Argument(help="A section: training, strategy, strategy.cla_ot, sites.partition. Default: all sections.")
    ] = "",
) -> None:
    """List the keys of a configuration, with their values, defaults and meanings."""
    from fedloom.sims.operations.options import table

    show_tables(table(section))


@app.command(rich_help_panel=RUN)
def experiments() -> None:
    """List the shipped experiments."""
    from fedloom.conf.loading import experiment_lines

    show_lines(experiment_lines())


@app.command(rich_help_panel=RUN)
def report(
    run: RunPath,
    pictures: Annotated[str, typer.Option(help="Also write plots/ in these formats: svg,pdf.")] = "",
    tables: Annotated[str, typer.Option(help="Also write the tables, to tables/: csv,md,tex.")] = "",
) -> None:
    """Draw a run's plots and write its report.html again."""
    with waiting(LIBRARIES):
        from fedloom.sims.report import canvas
        from fedloom.sims.report.report import write_report
        from fedloom.sims.report.tables import KINDS

    typer.echo(write_report(run, kinds(pictures, canvas.KINDS, "--pictures"), kinds(tables, KINDS, "--tables")))


@app.command(rich_help_panel=RUN)
def doctor(
    root: Annotated[str, typer.Option("--data", help="Folder with data sets (data.root).")] = "",
    federation: Annotated[
        Path | None, typer.Option(help="Check the folder of a real federation, or of one machine in it.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine: versions, cores, memory, GPUs, disk, Ray, and the source of each domain's images.

    With --federation, check a real federation instead; exit code 1 if a check fails.
    """
    from rich.console import Console

    if federation is not None:
        from fedloom.sims.federation.checks import check, sound

        with waiting("checking the federation", as_json):
            rows = [list(row) for row in check(federation)]
        good, columns = sound(rows), ["machine", "check", "result"]
        if as_json:
            checks = [dict(zip(columns, row, strict=True)) | {"ok": sound([row])} for row in rows]
            typer.echo(json.dumps({"ok": good, "checks": checks}))
        else:
            Console().print(Table(str(federation), columns, rows).rich())
        raise typer.Exit(0 if good else 1)
    from fedloom.conf.schema import DataConfig
    from fedloom.sims.operations.doctor import doctor as examine
    from fedloom.sims.operations.doctor import doctor_table

    with waiting("checking this machine", as_json):
        findings = examine(DataConfig(root=root))
    if as_json:
        typer.echo(json.dumps({"checks": [dict(zip(("check", "result", "ok"), row, strict=True)) for row in findings]}))
    else:
        Console().print(doctor_table(findings).rich())
