"""Run many configurations from Python with `sweep`, and read their `Results`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from fedloom.clients.training.torch_setup import as_usual
from fedloom.conf.errors import UserError, for_python
from fedloom.conf.formatting import count
from fedloom.conf.metrics import ACCURACY
from fedloom.conf.plain_values import ElsewhereError, plain_here, plain_value
from fedloom.conf.schema import Config
from fedloom.server.run_folder.scores import metric_of
from fedloom.sims.api import config_of
from fedloom.sims.comparison import Comparison, compare
from fedloom.sims.result import Result
from fedloom.sims.sweeps.best import Best, best_of
from fedloom.sims.sweeps.outcome import Outcome
from fedloom.sims.sweeps.plan import SEED, plan
from fedloom.sims.sweeps.work import carry_out, ready, runs_at_once


@for_python
def sweep(
    experiment: str | os.PathLike[str] | Mapping[str, Any] | Config,
    *overrides: str,
    seeds: Sequence[int] = (),
    over: Mapping[str, Sequence[Any]] | None = None,
    parallel: int | str = 1,
    overwrite: bool = False,
    progress: bool = False,
) -> "Results":
    """Run an experiment with every seed and combination of values: sweep("digits", seeds=[0, 1], over={"rounds": [2, 4]}).

    The sweep skips finished runs, resumes interrupted ones and starts the others. A failed run does not stop the others.
    Return the finished runs. To continue after a KeyboardInterrupt, make the same call again.

    Args:
        parallel: Runs at a time, or "auto": as many as fit. Above 1, each runs in its own process: put your networks, data
            and methods in modules.
        overwrite: Start all runs again and replace their folders.

    Raises:
        UserError: A run cannot work. Raised before any run starts.
    """
    grid, elsewhere = _grid(seeds, over or {})
    planned = plan(lambda words: config_of(experiment, words), overrides, grid)
    number = runs_at_once(parallel, planned)
    if isinstance(experiment, Mapping) and number > 1:
        plain_value(experiment, "")  # other processes import its classes and functions
    if elsewhere is not None and (number > 1 or any(each.config.engine.name != "inline" for each in planned)):
        raise elsewhere
    planned = ready(planned, overwrite=overwrite)
    with as_usual():
        outcomes = carry_out(planned, number if number > 1 else 0, quiet=not progress)
    failed = {outcome.folder: outcome.error for outcome in outcomes if outcome.missing}
    return Results(tuple(Result(outcome.folder) for outcome in outcomes if not outcome.missing), failed, outcomes)


def _grid(seeds: Sequence[int], over: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Sequence[Any]], ElsewhereError | None]:
    """Return the values of each swept key, and the error if only this process can import one (`plain_here`)."""
    grid = {**over, **({SEED: seeds} if len(seeds) else {})}
    if not grid:
        raise UserError("sweep: takes seeds=[0, 1, 2], over={'training.rate': [0.01, 0.03]} or both")
    if len(seeds) and SEED in over:
        raise UserError("seeds: `over` has seeds, too; leave one of the two out")
    for key, values in grid.items():
        if isinstance(values, str | Mapping) or not (isinstance(values, Sequence) or hasattr(values, "tolist")):
            raise UserError(f"{key}: got {values!r}, takes a list of values")
    found = {key: plain_here(values, key) for key, values in grid.items()}
    for key, (plain, _) in found.items():
        if not isinstance(plain, list):
            raise UserError(f"{key}: got {grid[key]!r}, takes a list of values")
    return {key: plain for key, (plain, _) in found.items()}, next((error for _, error in found.values() if error), None)


@dataclass(frozen=True)
class Results(Sequence[Result]):
    """The finished runs of a sweep, in the sweep's order.

    `failed`: the reason of each unfinished run, by its folder. `outcomes`: of all runs.
    """

    runs: tuple[Result, ...]
    failed: Mapping[Path, str]
    outcomes: Sequence[Outcome] = field(default=(), compare=False, repr=False)

    def __repr__(self) -> str:
        return f"Results({count(len(self.runs), 'run')}, {len(self.failed)} failed)"

    @overload
    def __getitem__(self, place: int) -> Result: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Result]: ...
    def __getitem__(self, place: int | slice) -> Result | Sequence[Result]:
        return self.runs[place]

    def __len__(self) -> int:
        return len(self.runs)

    def best(self, metric: str = "") -> Best:
        """Return the best values by a metric on validation examples (empty: the first), as means over seeds.

        Raises UserError if no run has validation values of the metric.
        """
        name = metric or next((metric_of(run.summary).name for run in self.runs), ACCURACY)
        return best_of(self.outcomes, name)

    def compare(self, by: str | Sequence[str] = ()) -> Comparison:
        """Compare the runs, as `fedloom.compare` does. Raise UserError if no run is finished."""
        if not self.runs:
            raise UserError("compare: no run of the sweep is finished")
        return compare([result.folder for result in self.runs], by)

    def _repr_html_(self) -> str:
        """Return the comparison and the number of failed runs, for a notebook."""
        failed = f"<p>failed: {len(self.failed)}</p>" if self.failed else ""
        return (self.compare()._repr_html_() if self.runs else "") + failed
