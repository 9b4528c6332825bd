"""`fedloom run --seeds ... --sweep ...`: several runs of one experiment, and their comparison."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import typer

from fedloom.server.strategies.defaults import configured
from fedloom.sims.cli.options import show_tables
from fedloom.sims.sweeps.outcome import Outcome, outcome_table
from fedloom.sims.sweeps.plan import Planned, plan, read_sweep


@dataclass(frozen=True)
class SweepOrder:
    """An experiment with its overrides, seeds and sweeps as text, and the number of runs at the same time.

    `best`: the metric that chooses the best values; empty: none does.
    """

    experiment: str
    overrides: Sequence[str]
    seeds: str | None
    sweep: Sequence[str]
    parallel: str
    overwrite: bool
    best: str = ""

    def plan(self) -> list[Planned]:
        """Return the planned runs. Raises UserError for keys and values that the configuration does not have."""
        return plan(
            lambda overrides: configured(self.experiment, overrides),
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
    from fedloom.sims.sweeps.best import best_of, check_best
    from fedloom.sims.sweeps.work import carry_out, ready, runs_at_once

    if order.best:
        check_best(order.best, planned[0].config)
    parallel = runs_at_once(order.parallel, planned)
    runs = ready(planned, overwrite=order.overwrite)
    try:
        outcomes = carry_out(runs, parallel, quiet=quiet, json_output=as_json)
    except KeyboardInterrupt:
        typer.echo("fedloom: run the same command again to continue with the unfinished runs", err=True)
        raise
    best = best_of(outcomes, order.best) if order.best and not all(outcome.missing for outcome in outcomes) else None
    if not quiet:
        show_tables(outcome_table(outcomes), err=as_json)
        _show_together(outcomes, err=as_json)
    if best:
        typer.echo(best.line(), err=as_json)
    if as_json:
        chosen = {"best": best.as_json()} if best else {}
        typer.echo(json.dumps({"runs": [outcome.as_json() for outcome in outcomes], **chosen}))
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
