"""Run temporary trainings for the measurements of experiments and benchmarks."""

import contextlib
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedloom.clients.objectives import resolve
from fedloom.conf.schema import Config
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.listener import Listener, LogListener
from fedloom.server.rounds.loop import RoundLoop
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.view import Setup
from fedloom.server.run.checks import check
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run.training_run import TrainingRun, open_ledger
from fedloom.server.run_folder.folder import RunFolder
from fedloom.sims.engines import open_engine
from fedloom.sims.progress.listeners import listener_for


@contextlib.contextmanager
def erased_run(config: Config) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield the summary and the folder of a complete run without a report, and erase the folder afterwards."""
    folder = Path(config.run.root) / config.run.name
    with open_engine(config) as grid:
        summary = run_experiment(grid, config, listener_for(quiet=True))
    yield summary, folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def training_run(config: Config, name: str = "", gone: Collection[str] = ()) -> Iterator[TrainingRun]:
    """Yield a run before its first round, without the sites in `gone`. The caller trains it.

    `name`: the run's name in its ledger; empty: a random one. The ledger is closed at the end.
    """
    check(config)
    folder = RunFolder(Path(config.run.root) / config.run.name)
    folder.open(config)
    sites = [site.name for site in config.roster if site.name not in gone]
    with open_ledger(config, folder, name, sites) as ledger:
        yield TrainingRun(config, folder, ledger, Evaluator(config))


def round_loop(
    config: Config, name: str, channel: ClientChannel, folder: Path, listener: Listener | None = None
) -> RoundLoop:
    """Return a RoundLoop with a new ledger in `folder`, without baselines, results and reports of a run."""
    state = ServerState(Setup(resolve(config), channel.sites, folder))
    return RoundLoop(config, name, channel, state, state.setup.measuring(), listener or LogListener())


def joined_channel(grid: Grid, config: Config, seconds: float) -> ClientChannel:
    """Return the channel to all sites of the configuration. Waits at most `seconds` until they have joined."""
    channel = ClientChannel(grid, config.roster, config.federation.window)
    channel.join(seconds)
    return channel
