"""Ten sites at once: layer selection beside methods that share a fixed part of networks, and beside none."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedloom.conf import load
from fedloom.conf.formatting import count
from fedloom.sims.experiments.lasem.study import LasemStudy
from fedloom.sims.operations.scratch_run import erased_run
from fedloom.sims.report.heads import exchanges
from fedloom.sims.report.page import Part
from fedloom.sims.report.selection import selections
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

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


def federated(study: LasemStudy, seeds: int) -> list[Part]:
    """The experiment `layer_selection`, and rivals on its sites."""
    results = [_found(study, seed) for seed in range(seeds)]
    rows = [
        [NAMES[mode], mean_and_spread([result[mode]["own"] for result in results]), f"{first['bytes'] / 1e3:,.0f}"]
        for mode, first in results[0].items()
    ]
    return [Table(f"Ten sites at once, {count(seeds, 'seed')}", ["", "own task", "kB"], rows, NOTE)]


def _found(study: LasemStudy, seed: int) -> dict[str, dict[str, float]]:
    def make() -> dict[str, dict[str, float]]:
        return {mode: row for name in RUNS for mode, row in _made(study.folder / "runs", name, seed).items()}

    def line(rows: Mapping[str, Mapping[str, float]]) -> str:
        return f"ten sites, seed {seed}: {json.dumps({mode: round(row['own'], 4) for mode, row in rows.items()})}"

    config = load(EXPERIMENT, [])
    key = [RUNS, FIXED, [str(site) for site in config.sites], config.network, config.objective, config.rounds, seed]
    return study.once(f"federated-{seed}", key, make, line)


def _made(folder: Path, name: str, seed: int) -> dict[str, dict[str, float]]:
    """Mean accuracy on sites' own tasks, and bytes, by mode; the run's folder is erased."""
    config = load(EXPERIMENT, [*RUNS[name], *FIXED, f"seed={seed}", f"run.root={folder}", f"run.name={name}-{seed}"])
    with erased_run(config) as (summary, _):
        exchanged = {matrix.method: {"own": matrix.own or 0.0, "bytes": matrix.bytes} for matrix in exchanges(summary)}
        return {**_selected(summary), **exchanged}


def _selected(summary: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    return {method.method: {"own": statistics.fmean(site.last or 0.0 for site in method.sites), "bytes": method.bytes}
            for method in selections(summary)}  # fmt: skip
