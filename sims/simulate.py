"""A whole simulation: engine, experiment, plots and report."""

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from conf.schema import Config
from server.experiment import check, run_experiment
from server.runfolder import CONFIG, RunFolder, refuse_existing, stored
from sims.certificates import write_pages
from sims.engines import open_engine
from sims.progress import listener_for
from sims.report import write_report


def simulate(config: Config, *, quiet: bool = False, json_output: bool = False) -> dict[str, Any]:
    """Run the experiment on its engine and write its report; returns what summary.json holds.

    Raises UserError before anything is started if something about the configuration, the data or the folder cannot work.
    """
    config = _absolute(config)
    check(config)
    refuse_existing(config)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(listener_for(quiet, json_output=json_output))
        grid = stack.enter_context(open_engine(config))
        listener.note(grid.describe())
        summary = run_experiment(grid, config, listener)
        write_pages(Path(config.run.root) / config.run.name)
        listener.note(f"report: {write_report(Path(config.run.root) / config.run.name)}")
    return summary


def simulate_once(config: Config, *, quiet: bool = False) -> dict[str, Any]:
    """The summary of a finished run of this very configuration if there is one; otherwise run it, from the start.

    Raises UserError, as simulate does, if a run of that name but of another configuration exists.
    """
    folder = Path(config.run.root) / config.run.name
    if (folder / CONFIG).is_file() and (folder / CONFIG).read_text(encoding="utf-8") == stored(_absolute(config)):
        summary = RunFolder(folder).summary()
        if summary.get("status") == "finished":
            return summary
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, overwrite=True))
    return simulate(config, quiet=quiet)


def _absolute(config: Config) -> Config:
    """The configuration with a data.root that means the same in every worker, wherever that was started."""
    if not config.data.root:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, root=str(Path(config.data.root).resolve())))
