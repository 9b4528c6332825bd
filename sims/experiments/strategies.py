"""The standard methods on one split (twenty sites, MNIST, Dirichlet(0.3)), with FedAvg as a plain loop to compare."""

import json
from collections.abc import Mapping, Sequence
from math import isnan, nan
from pathlib import Path
from typing import Any

from fedloom.clients.data import site_sizes
from fedloom.conf import load, to_json
from fedloom.conf.schema import Config
from fedloom.conf.sites import PERSONAL
from fedloom.server.strategies.defaults import with_default_objective
from fedloom.sims.experiments.plain_fedavg import check_plain, plain_fedavg
from fedloom.sims.experiments.study import Reproduction, Study, any_override
from fedloom.sims.report.page import Part
from fedloom.sims.report.results import aggregate
from fedloom.sims.report.spread import mean_and_spread

EXPERIMENT = "mnist_dirichlet"
PLAIN = "plain"
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
    PLAIN: "FedAvg, plain loop",
}
OWN = "Ditto, each site's own network on its own test examples"
SIZES = {"cpu": (), "embedded": ("embedded",)}  # presets of the experiment, in addition to the preset of the method
NOTE = (
    "Accuracy in %, mean and standard deviation over seeds: after half of the rounds on validation examples, and "
    "after all of them on test examples. Each method has the options of its preset, which were chosen on validation "
    "images of seeds 0 and 1."
)
Pair = tuple[float, float]  # validation accuracy after half of the rounds, test accuracy after all


def parts(study: Study) -> list[Part]:
    """Measure every method with every seed, and return the table."""
    names, rows = [name for name in METHODS if not study.only or name in study.only], dict[str, list[Pair]]()
    if PLAIN in names:
        check_plain(_config(study, PLAIN, 0))
    for seed in range(study.seeds):
        configs = {name: _config(study, name, seed) for name in names}
        summaries = iter(study.runs([config for name, config in configs.items() if name != PLAIN]))
        for name, config in configs.items():
            results = {METHODS[name]: _plain(study, config)} if name == PLAIN else _result(config, name, next(summaries))
            for title, pair in results.items():
                rows.setdefault(title, []).append(pair)
    head = ["method", "half of the rounds, validation", "all rounds, test"]
    cells = [[title, *_cells(results)] for title, results in rows.items()]
    return [study.table(f"The standard methods on {EXPERIMENT}", head, cells, NOTE)]


reproduce = Reproduction(
    "The standard methods", "runs/strategies-{preset}", SIZES, {"": parts},
    option=("tables", lambda preset, tables: METHODS), check=any_override,
)  # fmt: skip


def _cells(results: Sequence[Pair]) -> list[str]:
    halves = [half for half, _ in results if not isnan(half)]  # the plain loop measures nothing before its end
    return [mean_and_spread(halves) if halves else "", mean_and_spread([last for _, last in results])]


def _config(study: Study, method: str, seed: int) -> Config:
    run = [f"run.root={study.folder}", f"run.name={method}-{seed}", f"seed={seed}"]
    presets = ",".join([*SIZES[study.preset], "fedavg" if method == PLAIN else method])
    return with_default_objective(load(EXPERIMENT, [f"preset=[{presets}]", *run, *study.overrides]))


def _result(config: Config, name: str, summary: Mapping[str, Any]) -> dict[str, Pair]:
    """Return the row or rows of a run: its title, and both accuracies."""
    lines = (Path(config.run.root) / config.run.name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    watched: dict[int, Any] = {line["round"]: line.get("accuracy", {}) for line in map(json.loads, lines)}
    half = watched.get(config.rounds // 2, {}).get("union", nan)
    shares = {METHODS[name]: (half, summary["accuracy"][aggregate(summary)]["union"])}
    personal = summary["accuracy"].get(PERSONAL)
    return shares | ({OWN: (nan, personal["union"])} if personal else {})


def _plain(study: Study, config: Config) -> Pair:
    """Return the test accuracy of the plain loop, on the same splits with its own batches."""
    key = [site_sizes(config), to_json(config)]
    return nan, study.once(f"{PLAIN}-{config.seed}", key, lambda: plain_fedavg(config, config.seed)[1])
