"""Ten sites at once: layer selection beside methods that share a fixed part of networks, and beside none."""

import json
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.conf import load
from fedloom.conf.formatting import count
from fedloom.server.run.experiment import run_experiment
from fedloom.sims.engines import open_engine
from fedloom.sims.experiments.kept import kept
from fedloom.sims.experiments.lasem.study import Study
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.heads import exchanges
from fedloom.sims.report.page import Part
from fedloom.sims.report.selection import selections
from fedloom.sims.report.tables import Table, mean_and_spread

EXPERIMENT = "layer_selection"
RUNS: dict[str, list[str]] = {
    "selected": [],
    "parts": ["objective={name: components, mode: fedavg}", "strategy={name: head_transfer}",
              "baselines=[fedper, fedbabu, lg_fedavg, alone]"],
}  # fmt: skip
FIXED = ["evaluation.every=100", "engine.name=inline", "run.overwrite=true"]
NAMES = {"learned": "LASEM", "all": "all convolutions shared", "none": "none shared", "fedavg": "FedAvg", "fedper": "FedPer",
         "fedbabu": "FedBABU", "lg_fedavg": "LG-FedAvg", "alone": "local training"}  # fmt: skip
NOTE = (
    "Test accuracy in % on the sites' own tasks, mean over sites; mean and standard deviation over seeds. The first three "
    "are measured with the server's last mean, the others as sites trained last. kB: what a site sends in a round."
)


def federated(study: Study, seeds: int) -> list[Part]:
    """The experiment `layer_selection`, and rivals on its sites."""
    found = [_found(study, seed) for seed in range(seeds)]
    rows = [[NAMES[mode], mean_and_spread([one[mode]["own"] for one in found]), f"{found[0][mode]['bytes'] / 1e3:,.0f}"]
            for mode in found[0]]  # fmt: skip
    return [Table(f"Ten sites at once, {count(seeds, 'seed')}", ["", "own task", "kB"], rows, NOTE)]


def _found(study: Study, seed: int) -> dict[str, dict[str, float]]:
    def make() -> dict[str, dict[str, float]]:
        found = {mode: one for name in RUNS for mode, one in _made(study.folder / "runs", name, seed).items()}
        if not study.quiet:
            print(
                f"ten sites, seed {seed}: {json.dumps({mode: round(one['own'], 4) for mode, one in found.items()})}",
                flush=True,
            )
        return found

    config = load(EXPERIMENT, [])
    key = [RUNS, FIXED, [str(site) for site in config.sites], config.network, config.objective, config.rounds, seed]
    return kept(study.folder / "results" / f"federated-{seed}.json", key, make)


def _made(folder: Path, name: str, seed: int) -> dict[str, dict[str, float]]:
    """Mean accuracy on sites' own tasks, and bytes, by mode; the run's folder is erased."""
    config = load(EXPERIMENT, [*RUNS[name], *FIXED, f"seed={seed}", f"run.root={folder}", f"run.name={name}-{seed}"])
    with open_engine(config) as grid:
        summary = run_experiment(grid, config, listener_for(quiet=True))
    shutil.rmtree(folder / config.run.name)
    return {**_selected(summary), **{one.method: {"own": one.own or 0.0, "bytes": one.bytes} for one in exchanges(summary)}}


def _selected(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {one.method: {"own": statistics.fmean(site.last or 0.0 for site in one.sites), "bytes": one.bytes}
            for one in selections(summary)}  # fmt: skip
