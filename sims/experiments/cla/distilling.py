"""Tables 5 and 21: the teacher distilled into students of several starts, and the cost of an epoch."""

import copy
import itertools
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.networks import parameter_count
from fedloom.fusion.distillation import distillation_loss
from fedloom.sims.experiments.cla.methods import METHODS
from fedloom.sims.experiments.cla.runs import PARTS, budget, inputs_of, size_of, tuned
from fedloom.sims.experiments.pairs import Loss, plain_loss
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.study import Study
from fedloom.sims.operations.domain_task import accuracy, placed
from fedloom.sims.report.results import mean
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

STUDENTS = {  # the method by its row: the paper's column, or ours
    "random B": "random B",
    "B": "B",
    "fused": "CLAFusion, add",
    "fused, ours": "fuse",
    "B deepened": "B deepened (Net2Net)",
    "random fused": "B deepened, random",
}
SETTINGS = "temperature {:g}, weight {:g}"
NOTE = (
    "Test accuracy in %, mean and standard deviation over seeds. Epochs and rates are those of fine-tuning. Loss: "
    "weight times the teacher's term (times T squared), plus (1 - weight) times cross-entropy. best: temperature "
    "and weight chosen on validation examples. average: over temperatures, each with its best weight. fused: "
    "CLAFusion; ours: refitted."
)


def taught(teacher: nn.Module, temperature: float, weight: float) -> Loss:
    """Return a student's loss: `weight` x the fixed teacher's term at `temperature`, plus (1 - weight) x cross-entropy."""

    def loss(student: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            answers = teacher(images)
        return distillation_loss(student(images), answers, temperature, labels, weight)

    return loss


def distilled(study: Study, pair: str, seed: int) -> Mapping[str, Mapping[str, Any]]:
    """Distil A into every student; return {student: {settings: {"test": [accuracy], "validation": [accuracy]}}}."""
    size, chosen = size_of(study), size_of(study).pairs[pair]

    def make(method: str, temperature: float, weight: float) -> dict[str, list[float]]:
        inputs = inputs_of(study, pair, seed)
        student, teacher = METHODS[method](inputs), inputs.deep.eval()
        with placed(teacher):
            tuned(student, chosen.task, budget(chosen, method), seed, taught(teacher, temperature, weight))
        return {part: [accuracy(student, chosen.task, part)] for part in PARTS}

    def once(method: str, *pick: float) -> Any:
        name = f"{pair}-{seed}-distilled-{method}-{SETTINGS.format(*pick)}"
        return study.once(name, [chosen, size.probe], lambda: make(method, *pick))

    picks = list(itertools.product(size.temperatures, size.weights))
    return {name: {SETTINGS.format(*pick): once(method, *pick) for pick in picks} for name, method in STUDENTS.items()}


def table(study: Study) -> list[Table]:
    """Return Table 5: the students' accuracy, best and average over settings."""
    results, size = study.each_seed(lambda seed: distilled(study, "vgg", seed)), size_of(study)
    groups = [[SETTINGS.format(heat, weight) for weight in size.weights] for heat in size.temperatures]
    paper, rows = cells("cla_ot", "5"), []
    for name in STUDENTS:
        best = [_best(result[name], list(result[name])) for result in results]
        average = [mean([_best(result[name], group) for group in groups]) or 0.0 for result in results]
        theirs = [paper.shown(row, name) for row in ("best", "average")]
        rows.append([name, mean_and_spread(best), mean_and_spread(average), *theirs])
    head = ["student", "best", "average", "best (paper)", "average (paper)"]
    return [study.table("Table 5 (vgg): distilled from A", head, rows, NOTE)]


def _best(results: Mapping[str, Mapping[str, list[float]]], names: list[str]) -> float:
    return results[max(names, key=lambda name: results[name]["validation"])]["test"][0]


def epochs_table(study: Study) -> list[Table]:
    """Return Table 21: parameters, and seconds of an epoch of tuning and of distilling."""
    paper, rows = cells("cla_ot", "21"), []
    for pair in ("vgg", "resnet-half"):
        chosen = size_of(study).pairs[pair]
        results = study.once(f"{pair}-epochs", [chosen], lambda pair=pair: _seconds(study, pair))
        for name, (parameters, plain, soft) in results.items():
            theirs = [paper.shown(chosen.paper, f"{name}, {what}") for what in ("parameters", "tuning", "distilling")]
            ours = [f"{parameters / 1e6:.3f}", f"{plain:.2f}", "-" if soft is None else f"{soft:.2f}"]
            rows.append([pair, name, *ours, *theirs])
    head = ["pair", "network", *(f"{what}{of}" for of in ("", " (paper)")
            for what in ("million parameters", "s/epoch tuned", "s/epoch distilled"))]  # fmt: skip
    note = "This machine, one thread. (paper): 50,000 images on an A100; its ResNets are on CIFAR-100."
    return [Table("Table 21: seconds of an epoch, fine-tuning and distillation", head, rows, note)]


def _seconds(study: Study, pair: str) -> dict[str, list[float | None]]:
    """Return by network the parameters, and the seconds of an epoch of fine-tuning and of distillation from A."""
    inputs, teacher = inputs_of(study, pair, 0), inputs_of(study, pair, 0).deep.eval()
    networks, results = {"A": inputs.deep, "B": inputs.shallow, "fused": METHODS["fuse"](inputs)}, {}

    def epoch(network: nn.Module, loss: Loss) -> float:
        chosen = size_of(study).pairs[pair]
        student, begin = copy.deepcopy(network), time.perf_counter()
        tuned(student, chosen.task, replace(chosen.fine, epochs=1), 0, loss)
        return time.perf_counter() - begin

    with placed(teacher):
        for name, network in networks.items():
            soft = None if name == "A" else epoch(network, taught(teacher, 4.0, 0.5))
            results[name] = [parameter_count(network), epoch(network, plain_loss), soft]
    return results
