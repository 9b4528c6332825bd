"""One experiment from start to summary: the main method, its baselines on the same data, and the measurements at the end."""

import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from torch import int64

from clients.data import num_classes, site_sizes
from clients.networks import build_network
from clients.objectives import objective_of
from conf import to_json
from conf.errors import UserError
from conf.schema import Config
from conf.sites import roster
from server.evaluate import Evaluator, site_rows
from server.federation import Federation
from server.listener import Listener
from server.rounds import RoundLoop, asked_per_round
from server.runfolder import RunFolder
from server.strategies import STRATEGIES, Aggregation, Setup


def check(config: Config) -> None:
    """Refuse what cannot work before anything is started: data, sites, method. Raises UserError."""
    asked = asked_per_round(config, len(site_sizes(config)))
    for one in [config, *(with_mode(config, mode) for mode in config.baselines)]:
        objective_of(one)
    STRATEGIES.build(config.strategy, "strategy")
    counters = [
        name for name, tensor in build_network(config, num_classes(config)).state_dict().items() if tensor.dtype == int64
    ]
    if counters:
        raise UserError(f"network.norm: the counter '{counters[0]}' cannot be averaged; take norm=group or norm=none")
    if config.federation.min_replies > asked:
        raise UserError(f"federation.min_replies: got {config.federation.min_replies}, only {asked} sites are asked a round")


def with_mode(config: Config, mode: str) -> Config:
    """The configuration of a baseline: the same experiment with another mode of the objective."""
    own = {"initialisation": "own"} if mode == "independent" else {}
    return dataclasses.replace(config, objective={**config.objective, "mode": mode, **own}, baselines=[])


def run_experiment(grid: Grid, config: Config, listener: Listener) -> dict[str, Any]:
    """Run an experiment over the grid, into the folder run.root/run.name; returns what summary.json holds.

    An interruption (KeyboardInterrupt, SystemExit) or an error leaves a summary of status "interrupted" or "failed"
    beside all that was committed.
    """
    check(config)
    folder = RunFolder(Path(config.run.root) / config.run.name)
    folder.open(config)
    begin = time.monotonic()
    summary = {**_head(config), "status": "interrupted"}
    try:
        federation = Federation(grid, roster(config), config.federation.window)
        federation.join(config.federation.join_timeout)
        evaluator = Evaluator(config)
        run = hashlib.sha256(f"{to_json(config)}{time.time_ns()}".encode()).hexdigest()[:16]
        summary |= _run_method(config, run, folder, federation, evaluator, listener)
        for mode in config.baselines:
            beside = RunFolder(folder.path / "baselines" / mode)
            beside.open(with_mode(config, mode))
            other = _run_method(with_mode(config, mode), f"{run}-{mode}", beside, federation, evaluator, listener)
            beside.write_summary({**_head(with_mode(config, mode)), **other})
            row = next(iter(other["accuracy"].values()))
            summary["accuracy"] = {**summary["accuracy"], mode: row}
        summary["status"] = "finished"
    except Exception:
        summary["status"] = "failed"
        raise
    finally:
        summary["seconds"] = time.monotonic() - begin
        folder.write_summary(summary)
    listener.finished(summary)
    return summary


def _head(config: Config) -> dict[str, Any]:
    return {
        "experiment": config.experiment,
        "method": f"{config.strategy['name']}/{config.objective.get('mode', 'exact')}",
        "seed": config.seed,
        "rounds": config.rounds,
        "engine": config.engine.name,
        "sites": site_rows(config),
    }


def _run_method(
    config: Config, run: str, folder: RunFolder, federation: Federation, evaluator: Evaluator, listener: Listener
) -> dict[str, Any]:
    """Train one method over the federation and measure it; states and metrics go into the folder."""
    mode = config.objective.get("mode", "")
    listener.started(f"{config.run.name} ({mode})", len(federation.sites), config.rounds, str(folder.path))
    strategy = STRATEGIES.build(config.strategy, "strategy")
    aggregation = strategy.start(Setup(config, federation.sites, folder.path))
    for record in RoundLoop(config, run, federation, aggregation, evaluator, listener).rounds():
        folder.append(record)
    listener.note("measuring on the test images")
    return measure(config, folder, aggregation, evaluator)


def measure(config: Config, folder: RunFolder, aggregation: Aggregation, evaluator: Evaluator) -> dict[str, Any]:
    """Test accuracy of the aggregate, of each N_i and of the aggregate without each site; all networks are written."""
    accuracy, forgotten = {}, {}

    def write(name: str, state: dict, row: str) -> dict[str, float]:
        folder.write_network(name, state, network=json.dumps(config.network), row=row)
        return evaluator.accuracy(state, "test")

    accuracy[aggregation.row()] = write("aggregate", aggregation.aggregate(), aggregation.row())
    for name, state in aggregation.extra().items():
        accuracy[name] = write(name, state, name)
    for site in roster(config)[: config.evaluation.sites]:
        if (state := aggregation.site(site.name)) is not None:
            accuracy[site.name] = write(site.name, state, site.name)
        if (state := aggregation.without([site.name])) is not None:
            forgotten[site.name] = evaluator.accuracy(state, "test")
    backwards = aggregation.reversed()
    return {
        "accuracy": accuracy,
        "reversed": evaluator.accuracy(backwards, "test") if backwards is not None else {},
        "forgotten": forgotten,
        "digest": aggregation.digest(),
        "checks": aggregation.checks(),
    }
