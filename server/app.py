"""The Flower ServerApp of a real federation: `flwr run . --run-config 'experiment="digits" overrides="rounds=3"'`."""

import shlex

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid.http_grid import HttpGrid

from fedloom.conf.errors import FailedError, UserError
from fedloom.server.flower.grid import CarefulGrid
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.server.strategies.defaults import configured

app = ServerApp()


class RunFailed(RuntimeError):
    """Ends a run as failed. Flower logs an app's exception with its traceback; this exception has none, only its text."""

    @property
    def __traceback__(self) -> None:
        return None

    @__traceback__.setter  # contextlib sets it
    def __traceback__(self, value: object) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Ignore it: this exception has no traceback."""


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run-config names, with its `overrides` (key=value pairs, as in `fedloom run`).

    Raises RunFailed with one line for bad input, and for a run that cannot continue.
    """
    try:
        experiment = str(context.run_config.get("experiment", "digits"))
        overrides = shlex.split(str(context.run_config.get("overrides", "")))
        grid = CarefulGrid.like(grid) if isinstance(grid, HttpGrid) else grid
        words = ["engine.name=flower", *overrides]
        config, listener = configured(experiment, words), LogListener()
        if config.tracking:
            listener.message("tracking is off: `flwr run` opens no trackers; use `fedloom run` with engine.address instead")
        run_experiment(grid, config, listener)
    except (UserError, FailedError) as error:
        raise RunFailed(str(error)) from None
