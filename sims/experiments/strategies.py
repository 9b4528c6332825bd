"""The standard methods on one split: twenty sites that share MNIST by Dirichlet(0.3); FedAvg as a plain loop beside them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from fedloom.clients.data import site_sizes
from fedloom.conf import load, to_json
from fedloom.conf.errors import unknown
from fedloom.conf.formatting import count
from fedloom.conf.schema import Config
from fedloom.conf.sites import PERSONAL
from fedloom.server.strategies.defaults import with_default_objective
from fedloom.sims.experiments.kept import kept
from fedloom.sims.experiments.plain_fedavg import check_plain, plain_fedavg
from fedloom.sims.experiments.table_files import chosen, write
from fedloom.sims.operations.simulate import simulate_once
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table, aggregate

EXPERIMENT = "mnist_dirichlet"
METHODS = {
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "scaffold": "SCAFFOLD",
    "fedavgm": "FedAvgM",
    "fedadagrad": "FedAdagrad",
    "fedadam": "FedAdam",
    "fedyogi": "FedYogi",
    "ditto": "Ditto, shared network",
}
PLAIN = "plain"
OWN = "Ditto, each site's own network on its own test images"
SIZES = {"cpu": (), "embedded": ("embedded",)}  # presets of the experiment beside that of the method
NOTE = (
    "Accuracy in %, mean and standard deviation over seeds: after half of the rounds on validation images, after all of "
    "them on test images. Each method has the options of its preset, chosen on validation images of seeds 0 and 1, for all."
)


def reproduce(preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
    """Every method with every seed; finished runs are taken as they are. Returns the folder with tables.md and report.html.

    `overrides`: for every run; tables=fedavg,scaffold: these methods alone. UserError for an unknown preset or method.
    """
    if preset not in SIZES:
        raise unknown("--preset", preset, SIZES)
    torch.set_num_threads(1)
    asked, rest = chosen("tables", overrides, [*METHODS, PLAIN])
    names = [name for name in [*METHODS, PLAIN] if not asked or name in asked]
    root, rows = Path(_config(preset, "fedavg", 0, rest).run.root), dict[str, list[tuple[float, float]]]()
    titles = {PLAIN: "FedAvg, plain loop", **METHODS}
    if PLAIN in names:
        check_plain(_config(preset, "fedavg", 0, rest))
    for seed in range(seeds):
        for name in names:
            config = _config(preset, "fedavg" if name == PLAIN else name, seed, rest)
            results = {titles[name]: _plain(root, config)} if name == PLAIN else _run(config, titles[name], quiet=quiet)
            for title, both in results.items():
                rows.setdefault(title, []).append(both)
    head = ["method", "half of the rounds, validation", "all rounds, test"]
    cells = [[title, *_cells(results)] for title, results in rows.items()]
    title = f"The standard methods on {EXPERIMENT}, {count(seeds, 'seed')}"
    write(root, title, "no table of a paper's; rules in server/strategies", [NOTE, Table(title, head, cells)])
    return root


def _cells(results: Sequence[tuple[float, float]]) -> list[str]:
    halves = [half for half, _ in results if half == half]  # a plain loop watches nothing: NaN
    return [mean_and_spread(halves) if halves else "", mean_and_spread([last for _, last in results])]


def _config(preset: str, method: str, seed: int, overrides: Sequence[str]) -> Config:
    run = [f"run.root=runs/strategies-{preset}", f"run.name={method}-{seed}", f"seed={seed}"]
    presets = ",".join([*SIZES[preset], method])
    return with_default_objective(load(EXPERIMENT, [f"preset=[{presets}]", *run, *overrides]))


def _run(config: Config, title: str, *, quiet: bool) -> dict[str, tuple[float, float]]:
    """By row of the table: validation accuracy after half of the rounds, test accuracy after all."""
    summary = simulate_once(config, listener=listener_for(quiet))
    lines = (Path(config.run.root) / config.run.name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    watched: dict[int, Any] = {line["round"]: line.get("accuracy", {}) for line in map(json.loads, lines)}
    half = watched.get(config.rounds // 2, {}).get("union", float("nan"))
    shares = {title: (half, summary["accuracy"][aggregate(summary)]["union"])}
    personal = summary["accuracy"].get(PERSONAL)
    return shares | ({OWN: (float("nan"), personal["union"])} if personal else {})


def _plain(root: Path, config: Config) -> tuple[float, float]:
    """Test accuracy of the plain loop on the same splits, with batches of its own."""
    key = [site_sizes(config), to_json(config)]
    last = kept(root / f"{PLAIN}-{config.seed}.json", key, lambda: plain_fedavg(config, config.seed)[1])
    return float("nan"), last
