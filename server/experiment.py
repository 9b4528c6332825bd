"""One experiment from start to summary: the main method, its baselines on the same data, and the measurements at the end."""

import dataclasses
import time
from collections import deque
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from clients.data import num_classes, site_sizes
from clients.networks import build_network
from clients.networks.reading import BATCH, FEWEST
from clients.objectives import objective_of
from conf.errors import UserError
from conf.schema import Config
from server.evaluate import RECOMPUTED, Evaluator, site_rows
from server.federation import Federation
from server.ledger import Ledger
from server.listener import Listener
from server.method import Method, open_ledger
from server.rounds import asked_per_round
from server.runfolder import SUMMARY, RunFolder
from server.strategies import STRATEGIES


def check(config: Config) -> None:
    """Refuse what cannot work before anything is started: data, sites, method. Raises UserError."""
    asked = asked_per_round(config, len(site_sizes(config)))
    for one in [config, *(with_mode(config, mode) for mode in config.baselines)]:
        objective_of(one)
    build_network(config, num_classes(config))
    STRATEGIES.build(config.strategy, "strategy").check(config)
    if config.evaluation.statistics == RECOMPUTED and not config.data.validation:
        raise UserError(f"evaluation.statistics={RECOMPUTED}: needs validation images; set data.validation above 0")
    if config.evaluation.statistics == BATCH and config.evaluation.batch < FEWEST:
        raise UserError(f"evaluation.batch: got {config.evaluation.batch}, statistics={BATCH} takes at least {FEWEST}")
    if config.federation.min_replies > asked:
        raise UserError(f"federation.min_replies: got {config.federation.min_replies}, only {asked} sites are asked a round")


def with_mode(config: Config, mode: str) -> Config:
    """The configuration of a baseline: the same experiment with another mode of the objective."""
    own = {"initialisation": "own"} if mode == "independent" else {}
    return dataclasses.replace(config, objective={**config.objective, "mode": mode, **own}, baselines=[])


def run_experiment(grid: Grid, config: Config, listener: Listener) -> dict[str, Any]:
    """Run an experiment over the grid, into the folder run.root/run.name; returns what summary.json holds.

    An interruption (KeyboardInterrupt, SystemExit) or an error leaves a summary of status "interrupted" or "failed"
    beside all that was committed; with run.resume it goes on from there.
    """
    check(config)
    folder = RunFolder(Path(config.run.root) / config.run.name)
    folder.open(config)
    return work(grid, config, folder, listener)


def work(grid: Grid, config: Config, folder: RunFolder, listener: Listener) -> dict[str, Any]:
    """All that is not committed yet of an experiment whose folder is there."""
    begin = time.monotonic() - folder.seconds()
    summary = {**head(config), "status": "interrupted"}
    with open_ledger(config, folder) as ledger:
        if _untouched(ledger, folder):
            return folder.summary()
        folder.check(ledger.run().config)  # before anything is written
        try:
            method = Method(config, folder, ledger, Evaluator(config))
            federation = method.joined(grid)
            while "accuracy" not in summary or method.unlearning().under_way():  # requests may come while it is measured
                method.train(federation, listener)
                listener.note("measuring on the test images")
                summary |= method.measure()
                for mode in config.baselines:
                    summary["accuracy"][mode] = _run_baseline(with_mode(config, mode), method, federation, listener)
            summary["status"] = "finished"
        except Exception:
            summary["status"] = "failed"
            raise
        finally:
            summary |= {**head(config, ledger), "seconds": time.monotonic() - begin}
            folder.write_summary(summary)
            ledger.note(summary["status"], {"files": folder.results()})
    listener.finished(summary)
    return summary


def _untouched(ledger: Ledger, folder: RunFolder) -> bool:
    """Whether the run is finished, nothing waits, and neither ledger nor files have changed since."""
    last = deque(ledger.events(), maxlen=1)[0]
    if ledger.waiting(applied=True):
        return False
    return last.kind == "finished" and SUMMARY in last.body["files"] and last.body["files"] == folder.results()


def _run_baseline(config: Config, main: Method, federation: Federation, listener: Listener) -> dict[str, float]:
    """Run a baseline into a folder of its own; the accuracy of its aggregate."""
    with main.beside(config, f"baselines/{config.objective['mode']}") as method:
        method.train(federation, listener)
        found = method.measure()
        method.folder.write_summary({**head(config, method.ledger), **found})
        method.ledger.note("finished", {"files": method.folder.results()})
    return next(iter(found["accuracy"].values()))


def head(config: Config, ledger: Ledger | None = None) -> dict[str, Any]:
    """What a summary says before anything is measured; without the sites that the ledger has as forgotten."""
    gone = {name for name, forgotten in ledger.sites().items() if forgotten} if ledger else set()
    last = ledger.last_round() if ledger else None
    return {
        "experiment": config.experiment,
        "method": f"{config.strategy['name']}/{objective_of(config).mode}",
        "seed": config.seed,
        "rounds": max(config.rounds, last.round) if last else config.rounds,
        "engine": config.engine.name,
        "sites": [row for row in site_rows(config) if row["name"] not in gone],
        **({"unlearned": sorted(gone)} if gone else {}),
    }
