"""Figures 3 and 11: one head for several extractors, taught new classes on one of them, moved to the others (Sec. 5.2)."""

import copy
from typing import Any

import torch
from torch import nn

from clients.data import Images
from sims.experiments.components.study import Study
from sims.experiments.components.trainer import Plan, accuracy, answers, both, built, fit, frozen, turns
from sims.experiments.kept import kept, told
from sims.experiments.pairs import Task, images
from sims.experiments.papers import cells
from sims.report.page import Part
from sims.report.tables import Table, mean_and_spread

DOMAIN, SIZE, SAMPLES, CLASSES, FIRST = "cifar10", 16, 20000, 10, 5
HEAD = {"name": "convnet", "widths": [64, 64], "strides": [1, 2]}
EXTRACTORS: dict[str, dict[str, Any]] = {  # the reference first; by the paper's row
    "Wide ResNet-56": {"of": {"name": "resnet20", "width": 1.0}, "at": "stage2"},
    "ResNet-56": {"of": {"name": "resnet20", "width": 0.5}, "at": "stage2"},
    "MobileNetV2": {"of": {"name": "torchvision.models:mobilenet_v2", "width_mult": 0.5}, "at": "features.3"},
}
OURS = {
    "Wide ResNet-56": "ResNet-20 (reference)",
    "ResNet-56": "ResNet-20, half the width",
    "MobileNetV2": "MobileNetV2, half the width",
}
JOINT, UPDATE = Plan(800, 0.05), Plan(600, 0.05)
COLUMNS = ("extractor frozen", "rotation head frozen", "upper bound")
NOTE = (
    "Accuracy in % on all classes of CIFAR-10 (mean class accuracy), mean and standard deviation over seeds. Three "
    "extractors are trained with one head for five classes; the head learns ten on the reference alone, which stays "
    "as it is (or moves, held by a rotation head that is frozen), and is put on the others as it is. before: the head"
    " of five classes. upper bound: all three trained with ten classes. (paper): Wide ResNet-56, ResNet-56, "
    "MobileNetV2."
)


def figure3(study: Study, seeds: int) -> list[Part]:
    """The updated head on every extractor."""
    paper, rows = cells("components", "figure11"), []
    found = [_found(study, seed) for seed in range(seeds)]
    for name in EXTRACTORS:
        ours = {column: mean_and_spread([one[column][name] for one in found]) for column in ("before", *COLUMNS)}
        rows.append(
            [OURS[name], ours["before"], *(cell for column in COLUMNS for cell in (paper.shown(name, column), ours[column]))]
        )
    head = ["extractor", "before", *(title for column in COLUMNS for title in (f"{column} (paper)", column))]
    return [Table(f"Figures 3 and 11: one head on several extractors, {told(seeds)}", head, rows, NOTE)]


def _found(study: Study, seed: int) -> dict[str, dict[str, float]]:
    def make() -> dict[str, dict[str, float]]:
        task = Task(DOMAIN, SIZE, False, samples=SAMPLES)
        found = measured({part: images(task, part) for part in ("train", "test")}, seed)
        if not study.quiet:
            print(f"one head, seed {seed}: {found}", flush=True)
        return found

    key = [DOMAIN, SIZE, SAMPLES, HEAD, EXTRACTORS, vars(JOINT), vars(UPDATE), seed]
    return kept(study.folder / "results" / f"one-head-{seed}.json", key, make)


def measured(data: dict[str, Images], seed: int, joint: Plan = JOINT, update: Plan = UPDATE) -> dict[str, dict[str, float]]:
    """Accuracy by column and extractor."""
    some = data["train"].y < FIRST
    extractors, head, rotating = _together(Images(data["train"].x[some], data["train"].y[some]), FIRST, seed, joint)
    found = {"before": _on_each(extractors, head, data["test"])}
    reference = next(iter(EXTRACTORS))
    wider = _extended(head, seed)
    still = frozen(extractors[reference]).train()
    fit([wider], answers(still, wider), data["train"], update, seed, "update")
    found["extractor frozen"] = _on_each(extractors, wider, data["test"])
    wider, moving = _extended(head, seed), copy.deepcopy(extractors[reference])
    loss = both(answers(moving, wider), turns(moving, frozen(rotating), seed, "update"))
    fit([wider, moving], loss, data["train"], update, seed, "update")
    found["rotation head frozen"] = _on_each({**extractors, reference: moving}, wider, data["test"])
    extractors, head, _ = _together(data["train"], CLASSES, seed, joint)
    found["upper bound"] = _on_each(extractors, head, data["test"])
    return found


def _together(train: Images, classes: int, seed: int, plan: Plan) -> tuple[dict[str, nn.Module], nn.Module, nn.Module]:
    """All extractors, trained with one head for the classes and one for rotations."""
    networks = {name: built(_section(cut), SIZE, classes, seed, name) for name, cut in EXTRACTORS.items()}
    extractors = {name: network.extractor for name, network in networks.items()}
    reference = next(iter(EXTRACTORS))
    head, rotating = networks[reference].head, built(_section(EXTRACTORS[reference]), SIZE, 4, seed, "rotations").head
    losses = [both(answers(one, head), turns(one, rotating, seed, name)) for name, one in extractors.items()]
    parts = [*extractors.values(), head, rotating]
    fit(parts, lambda x, y: torch.stack([loss(x, y) for loss in losses]).sum(), train, plan, seed, "joint")
    return extractors, head, rotating


def _section(cut: dict[str, Any]) -> dict[str, Any]:
    return {"name": "split", **cut, "channels": 64, "head": HEAD}


def _extended(head: nn.Module, seed: int) -> nn.Module:
    """A copy for all classes: the rows of the first ones stay, the others are drawn."""
    wider = built(_section(next(iter(EXTRACTORS.values()))), SIZE, CLASSES, seed, "extended").head
    state, known = wider.state_dict(), head.state_dict()
    for name, tensor in known.items():
        rows = len(tensor) if tensor.ndim else None
        state[name] = tensor if rows is None else torch.cat([tensor, state[name][rows:]])
    wider.load_state_dict(state)
    return wider


def _on_each(extractors: dict[str, nn.Module], head: nn.Module, test: Images) -> dict[str, float]:
    return {name: accuracy(one, head, test) for name, one in extractors.items()}
