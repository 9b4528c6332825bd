"""The Flower ServerApp, for a real federation: `flwr run . --run-config 'experiment="digits" overrides="rounds=3"'`."""

import shlex

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from conf import load
from server.experiment import run_experiment
from server.listener import LogListener

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run-config names, with its `overrides` (key=value words, as in `fedloom run`)."""
    experiment = str(context.run_config.get("experiment", "digits"))
    overrides = shlex.split(str(context.run_config.get("overrides", "")))
    config = load(experiment, ["engine.name=flower", *overrides])
    run_experiment(grid, config, LogListener())
