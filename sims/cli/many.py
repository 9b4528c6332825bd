"""`fedloom run --seeds ... --sweep ...`: several runs of one experiment, and their comparison."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from fedloom.conf import load
from fedloom.server.strategies.defaults import with_default_objective
from fedloom.sims.cli.options import show_tables
from fedloom.sims.sweeps.outcome import Outcome, outcome_table
from fedloom.sims.sweeps.plan import Planned, plan, read_sweep


@dataclass(frozen=True)
class SweepOrder:
    """An experiment with its overrides, seeds and sweeps as text, and the number of runs at the same time."""

    experiment: str
    overrides: Sequence[str]
    seeds: str | None
    sweep: Sequence[str]
    parallel: int
    overwrite: bool

    def plan(self) -> list[Planned]:
        """Return the planned runs. Raises UserError for keys and values that the configuration does not have."""
        return plan(
            lambda overrides: with_default_objective(load(self.experiment, overrides), overrides),
            self.overrides,
            read_sweep(self.seeds, self.sweep),
        )


def show(order: SweepOrder) -> int:
    """Print the folder and the changed keys of each planned run; return the exit code 0."""
    for run in order.plan():
        typer.echo(f"{run.folder}  {' '.join(f'{key}={json.dumps(value)}' for key, value in run.values.items())}")
    return 0


def run(order: SweepOrder, *, quiet: bool, as_json: bool) -> int:
    """Carry out the runs, print their results, and return the exit code: 1 if a run failed."""
    planned = order.plan()
    from fedloom.sims.sweeps.work import carry_out, ready

    runs = ready(planned, overwrite=order.overwrite)
    try:
        outcomes = carry_out(runs, min(order.parallel, len(runs)), quiet=quiet, json_output=as_json)
    except KeyboardInterrupt:
        typer.echo("fedloom: run the same command again to continue with the unfinished runs", err=True)
        raise
    if not quiet:
        show_tables(outcome_table(outcomes), err=as_json)
        _show_together(outcomes, err=as_json)
    if as_json:
        typer.echo(json.dumps({"runs": [outcome.as_json() for outcome in outcomes]}))
    lost = [outcome for outcome in outcomes if outcome.missing]
    for outcome in lost:
        typer.echo(f"fedloom: {outcome.folder}: {outcome.status}: {outcome.error}", err=True)
    return 1 if lost else 0


def _show_together(outcomes: Sequence[Outcome], err: bool) -> None:
    """Print the tables of a comparison, and the command for a page."""
    from fedloom.sims.comparison import compare

    folders = [outcome.folder for outcome in outcomes if outcome.summary.get("status") == "finished"]
    if len(folders) < 2:
        return
    comparison = compare(folders)
    show_tables(*comparison.tables(), notes=comparison.notes, err=err)
    prefix = os.path.commonprefix([str(folder) for folder in folders])  # noqa: RUF071
    typer.echo(f"As a page: fedloom compare {shlex.quote(prefix)}* --html compare.html", err=err)
