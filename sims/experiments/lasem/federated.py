"""Ten sites at once: layer selection, and methods that share a fixed part of networks, or nothing."""

import statistics
from pathlib import Path

from fedloom.conf import load
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.operations.scratch_run import erased_run
from fedloom.sims.report.heads import exchanges
from fedloom.sims.report.page import Part
from fedloom.sims.report.selection import selections

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
    "Test accuracy in % on the sites' own tasks, mean over sites; mean and standard deviation over seeds. The first "
    "three are measured with the server's last mean, the others with the networks that sites trained last. kB: what "
    "a site sends in a round."
)


def federated(study: Study) -> list[Part]:
    """Return the experiment `layer_selection`, with other methods on its sites."""
    config = load(EXPERIMENT, [])
    key = [RUNS, FIXED, [str(site) for site in config.sites], config.network, config.objective, config.rounds]
    results = study.saved_each("federated", key, lambda seed: _measured(study.folder / "runs", seed))
    rows = [
        [NAMES[mode], *means(results, (mode, "own")), f"{first['bytes'] / 1e3:,.0f}"] for mode, first in results[0].items()
    ]
    return [study.table("Ten sites at once", ["", "own task", "kB"], rows, NOTE)]


def _measured(folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """Return by mode the mean accuracy on the sites' own tasks, and the bytes. The folders of the runs are erased."""
    results: dict[str, dict[str, float]] = {}
    for name, options in RUNS.items():
        config = load(EXPERIMENT, [*options, *FIXED, f"seed={seed}", f"run.root={folder}", f"run.name={name}-{seed}"])
        with erased_run(config) as (summary, _):
            for method in selections(summary):
                own = statistics.fmean(site.last or 0.0 for site in method.sites)
                results[method.method] = {"own": own, "bytes": method.bytes}
            for matrix in exchanges(summary):
                results[matrix.method] = {"own": matrix.own or 0.0, "bytes": matrix.bytes}
    return results
