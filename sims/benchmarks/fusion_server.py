"""The server's part of a round of `cla_ot`: ten sites of ResNet18 and ResNet34 at full width, one thread."""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import resolve
from fedloom.conf import Config, load
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.run.experiment import open_ledger
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.strategies.architectures import group_by_site
from fedloom.sims.report.tables import Table

SITES, SAMPLES, PROBE = 10, 50, 200
STARTS = ("shared", "own")
MOST_SECONDS, MOST_MEMORY = 60.0, 1.5 * 1024


def configured(root: str, start: str) -> Config:
    """The round's configuration; the images are those that come with scikit-learn."""
    networks = "[{name: resnet18, width: 1.0, norm: batch}, {name: resnet34, width: 1.0, norm: batch}]"
    return load("different_digits", [
        f"sites=[{{domain: digits, count: {SITES}, samples: {SAMPLES}, networks: {networks}}}]",
        "network={name: resnet34, width: 1.0, norm: batch}", "data={size: 32, grey: false}", "baselines=[]",
        f"strategy={{name: cla_ot, start: {start}, probe: {{samples: {PROBE}}}}}", f"run.root={root}", "engine.threads=1",
    ])  # fmt: skip


def measure(start: str) -> dict[str, Any]:
    """Seconds and MiB (beyond what was there before) of putting all sites' networks, and of what follows from them."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        config = configured(root, start)
        folder = RunFolder(Path(root) / "run")
        folder.open(config)
        with open_ledger(config, folder) as ledger:
            method = TrainingRun(config, folder, ledger, Evaluator(config))
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            run, groups = method.state.round_context(1), group_by_site(resolve(config))
            begin = time.perf_counter()
            for site in config.roster:
                run.put(groups[site.name].name, site, initial_state(config, site.name, site), SAMPLES)
            put = time.perf_counter()
            method.state.strategy.recompute_derived(run)
            settled = time.perf_counter()
            method.state.commit(1, {})
            seconds = {"put": put - begin, "settle": settled - put, "commit": time.perf_counter() - settled}
    return {"start": start, **seconds, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Of both starts."""
    head = ["start", "put, s", "settle, s", "commit, s", "whole, s", "memory, MiB", "verdict"]
    note = (
        f"{SITES} sites, {PROBE} probe samples of 32x32, one thread, random weights; settle makes what every architecture "
        f"goes on from: a mean of networks in one basis, or (own, in round 1 alone) a fusion of all networks into each "
        f"architecture. Bars: {MOST_SECONDS:.0f} s, {MOST_MEMORY:.0f} MiB."
    )
    return Table("The server's part of a round of cla_ot", head, [_line(row) for row in rows], note)


def _line(row: dict[str, Any]) -> list[str]:
    whole = row["put"] + row["settle"] + row["commit"]
    met = whole <= MOST_SECONDS and row["mib"] <= MOST_MEMORY
    parts = [f"{row[key]:.1f}" for key in ("put", "settle", "commit")]
    return [row["start"], *parts, f"{whole:.1f}", f"{row['mib']:.0f}", "met" if met else "not met"]


if __name__ == "__main__":
    print(json.dumps(measure(sys.argv[1])))
