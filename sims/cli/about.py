"""The commands that tell what there is: experiments, keys of a configuration, this machine; and a run's report again."""

from pathlib import Path
from typing import Annotated

import typer

from fedloom.sims.progress.waiting import LIBRARIES, waiting
from fedloom.sims.report.tables import Table

app = typer.Typer()


@app.command()
def options(
    section: Annotated[str, typer.Argument(help="training, strategy, strategy.cla_ot, sites.partition; none: all.")] = "",
) -> None:
    """List the keys of a configuration, with what they take, their defaults and their meaning."""
    from rich.console import Console

    from fedloom.sims.operations.options import table

    keys, console = table(section), Console()
    console.print(keys.rich()) if console.is_terminal else typer.echo(keys.plain(), nl=False)


@app.command()
def experiments() -> None:
    """List the experiments that ship."""
    from fedloom.conf.load import experiment_lines

    lines = experiment_lines()
    width = max(map(len, lines))
    for name, line in lines.items():
        typer.echo(f"{name:{width}} {line}")


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run's folder, such as runs/digits.")]) -> None:
    """Draw a run's plots and write its report.html again."""
    with waiting(LIBRARIES):
        from fedloom.sims.report.report import write_report

    typer.echo(write_report(run))


@app.command()
def doctor(
    root: Annotated[str, typer.Option("--data", help="The folder with the data (data.root).")] = "",
    federation: Annotated[Path | None, typer.Option(help="Look at a real federation's folder, or at one machine's.")] = None,
) -> None:
    """Say what this machine has: versions, cores, GPUs, Ray, and where each domain would come from.

    With --federation it exits with 1 if anything there is wrong.
    """
    from rich.console import Console

    if federation is not None:
        from fedloom.sims.federation.checks import check, sound

        with waiting("looking at the federation"):
            rows = [list(row) for row in check(federation)]
        Console().print(Table(str(federation), ["machine", "what", "found"], rows).rich())
        raise typer.Exit(0 if sound(rows) else 1)
    from fedloom.conf.schema import DataConfig
    from fedloom.sims.operations.doctor import doctor as examine
    from fedloom.sims.operations.doctor import doctor_table

    with waiting("looking at this machine"):
        findings = examine(DataConfig(root=root))
    Console().print(doctor_table(findings).rich())
