"""`fedloom bench vectorise`: time to train a site for a round, alone and as one of several stacked sites."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import RecordDict

from fedloom.clients.job import Job
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import resolve
from fedloom.clients.protocol.messages import MEAN, TaskInstructions, config_digest, to_arrays
from fedloom.clients.storage.store import SiteStore
from fedloom.clients.training.vectorised import train_cohort
from fedloom.conf import Config, load, to_json
from fedloom.sims.benchmarks.measuring import table
from fedloom.sims.report.tables import Table

COHORTS = (1, 2, 5, 10, 20)
IMAGES, REPEATS = 60, 5
PLAIN = ["network.standardise=false", "network.affine=true"]
NETWORKS = {
    "conv6, 16 pixels": [*PLAIN, "data.size=16"],
    "conv6 standardised, 16 pixels": ["network.standardise=true", "network.affine=false", "data.size=16"],
    "conv6 of width 1/4, 8 pixels": [*PLAIN, "data.size=8", "network.width=0.25"],
}
COLUMNS = {"device": "{device}", "network": "{network}", "sites as one": "{sites}",
           "ms per site, one by one": "{alone_ms:.4g}",
           "ms per site, as one": "{together_ms:.4g}", "times as fast": "{gain:.4g}"}  # fmt: skip


def bench(cohorts: tuple[int, ...] = COHORTS) -> tuple[Table, list[dict[str, Any]]]:
    """Measure each network and number of sites; rows hold seconds per site and round, the fastest of 5."""
    devices = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    rows = [measure(device, network, sites) for device in devices for network in NETWORKS for sites in cohorts]
    lines = [{**row, "alone_ms": 1e3 * row["alone_s"], "together_ms": 1e3 * row["together_s"],
              "gain": row["alone_s"] / row["together_s"]} for row in rows]  # fmt: skip
    gains = [line["gain"] for line in lines if line["sites"] > 1]
    note = (
        f"FedAvg, {IMAGES} images in batches of 32, 1 epoch, one torch thread, fastest of {REPEATS}; CPU time on a CPU, "
        "wall time on a GPU. A single site is always trained one by one: its two columns differ by noise only. Stacked "
        f"sites were slower than one by one in {sum(gain < 1 for gain in gains)} of {len(gains)} cases."
    )
    return table("Same-shape sites as one", COLUMNS, lines, note), rows


def measure(device: str, network: str, sites: int) -> dict[str, Any]:
    """Train sites of 60 images one by one and stacked, alternating, so that other load slows both.

    Return the settings, and the seconds for a site of each way (`alone_s`, `together_s`): the fastest repeat.
    """
    with tempfile.TemporaryDirectory() as folder:
        entry = f"sites=[{{domain: digits, count: {sites}, samples: {IMAGES}, partition: {{min_samples: 1}}}}]"
        config = load("digits", [entry, "objective.mode=fedavg", f"engine.device={device}", *NETWORKS[network]])
        jobs = _jobs(config, Path(folder))
        alone, together = [], []
        clock = time.process_time if device == "cpu" else time.perf_counter
        for _ in range(REPEATS + 1):  # the first warms up
            alone.append(_seconds([[job] for job in jobs], clock))
            together.append(_seconds([jobs], clock))
    best = {"alone_s": min(alone[1:]) / sites, "together_s": min(together[1:]) / sites}
    return {"device": device, "network": network, "sites": sites, **best}


def _jobs(config: Config, folder: Path) -> list[Job]:
    digest, sites = config_digest(to_json(config)), config.roster
    content = RecordDict({MEAN: to_arrays(initial_state(config))})
    orders = [TaskInstructions(digest, "vectorise", site.index, round=1, rounds=config.rounds, base=0, members=len(sites))
              for site in sites]  # fmt: skip
    return [Job(order, resolve(config), SiteStore(folder, "run", sites[order.site].name), content) for order in orders]


def _seconds(cohorts: list[list[Job]], clock: Callable[[], float]) -> float:
    begin = clock()
    for cohort in cohorts:
        for reply in train_cohort(cohort):
            if isinstance(reply, Exception):
                raise reply
    return clock() - begin  # replies are on the CPU, so a GPU is done too
