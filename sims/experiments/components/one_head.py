"""Figures 3 and 11: one head for several extractors learns new classes on one, and moves to the others (Sec. 5.2)."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.clients.data import Examples
from fedloom.sims.experiments.components.trainer import Plan, answers, both, built, fit, frozen, mean_class_accuracy, turns
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.operations.domain_task import Task, images
from fedloom.sims.report.page import Part

DOMAINS = {"mnist": 7000, "cifar10": 20000}  # and images to train on
SIZE, CLASSES, FIRST = 16, 10, 5
HEAD = {"name": "convnet", "widths": [64, 64], "strides": [1, 1]}
EXTRACTORS: dict[str, dict[str, Any]] = {  # the reference first; by the paper's row
    "Wide ResNet-56": {"of": {"name": "resnet20", "width": 1.0}, "at": "stage2"},
    "ResNet-56": {"of": {"name": "resnet20", "width": 0.5}, "at": "stage2"},
    "MobileNetV2": {"of": {"name": "torchvision.models:mobilenet_v2", "width_mult": 0.5}, "at": "features.3"},
}
OURS = {  # the networks used here instead
    "Wide ResNet-56": "ResNet-20 (reference)",
    "ResNet-56": "ResNet-20, half the width",
    "MobileNetV2": "MobileNetV2, half the width",
}
JOINT, UPDATE = Plan(800, 0.05), Plan(600, 0.05)
MATCH = 10.0  # of the squared distance between features, by their variance
WAYS = {"as the paper": 0.0, "features matched": MATCH}
COLUMNS = ("extractor frozen", "rotation head frozen", "upper bound")
NOTE = (
    "Mean class accuracy in % on all classes, mean and standard deviation over seeds. Three extractors, averaged to "
    "4x4, are trained with one head for five classes. The head then learns all ten on the reference, and is put on "
    "the others. The reference is frozen, or it moves and a frozen rotation head holds it. before: the head of five "
    "classes. upper bound: all three trained with ten classes. matched: in training, the other features are held "
    "near the reference's, for all four rotations of each image. (paper): CIFAR-10; Wide ResNet-56, ResNet-56, "
    "MobileNetV2."
)


def figure3(study: Study) -> list[Part]:
    """Return Figures 3 and 11: a head's accuracy on every extractor, before and after it learns new classes on one."""
    paper, parts = cells("components", "figure11"), list[Part]()
    for domain, samples in DOMAINS.items():
        rows, task = [], Task(domain, SIZE, False, samples=samples)
        for way, match in WAYS.items():
            key = [domain, SIZE, samples, HEAD, EXTRACTORS, JOINT, UPDATE, match]
            results = study.saved_each(f"one-head-{domain}-{way}", key, partial(_of_task, task, match))
            for name in EXTRACTORS:
                before, *ours = means(results, *((column, name) for column in ("before", *COLUMNS)))
                pairs = zip((paper.shown(name, column) for column in COLUMNS), ours, strict=True)
                rows.append([way, OURS[name], before, *(text for pair in pairs for text in pair)])
        head = ["trained", "extractor", "before", *(text for column in COLUMNS for text in (f"{column} (paper)", column))]
        parts.append(study.table(f"Figures 3 and 11: one head on several extractors, {domain}", head, rows, NOTE))
    return parts


def _of_task(task: Task, match: float, seed: int) -> dict[str, dict[str, float]]:
    return measured({part: images(task, part) for part in ("train", "test")}, seed, match)


def measured(
    data: dict[str, Examples], seed: int, match: float, joint: Plan = JOINT, update: Plan = UPDATE
) -> dict[str, dict[str, float]]:
    """Return accuracies by column (what was trained) and extractor. `match`: weight of the distance between features."""
    some = data["train"].y < FIRST
    few = Examples(data["train"].x[some], data["train"].y[some])
    extractors, head, rotating = _together(few, FIRST, seed, match, joint)
    results = {"before": _on_each(extractors, head, data["test"])}
    reference = next(iter(EXTRACTORS))
    wider = _extended(head, seed)
    still = frozen(extractors[reference]).train()
    fit([wider], answers(still, wider), data["train"], update, seed, "update")
    results["extractor frozen"] = _on_each(extractors, wider, data["test"])
    wider, moving = _extended(head, seed), copy.deepcopy(extractors[reference])
    loss = both(answers(moving, wider), turns(moving, frozen(rotating), seed, "update"))
    fit([wider, moving], loss, data["train"], update, seed, "update")
    results["rotation head frozen"] = _on_each({**extractors, reference: moving}, wider, data["test"])
    extractors, head, _ = _together(data["train"], CLASSES, seed, match, joint)
    results["upper bound"] = _on_each(extractors, head, data["test"])
    return results


def _together(
    train: Examples, classes: int, seed: int, match: float, plan: Plan
) -> tuple[dict[str, nn.Module], nn.Module, nn.Module]:
    """Return all extractors, trained with one head for the classes, and one for rotations."""
    networks = {name: built(_section(cut), SIZE, classes, seed, name) for name, cut in EXTRACTORS.items()}
    extractors = {name: network.extractor for name, network in networks.items()}
    first, *others = extractors.values()
    head = networks[next(iter(EXTRACTORS))].head
    rotating = built(_section(next(iter(EXTRACTORS.values()))), SIZE, 4, seed, "rotations").head
    losses = [both(answers(each, head), turns(each, rotating, seed, name)) for name, each in extractors.items()]

    def loss(x: Tensor, y: Tensor) -> Tensor:
        total = torch.stack([each(x, y) for each in losses]).sum()
        return total + match * _apart(first, others, x) if match else total

    fit([*extractors.values(), head, rotating], loss, train, plan, seed, "joint")
    return extractors, head, rotating


def _apart(reference: nn.Module, others: Sequence[nn.Module], images: Tensor) -> Tensor:
    """Return the mean squared distances of the others' features from the fixed reference's, in units of their variance."""
    turned = torch.cat([images.rot90(turn, (2, 3)) for turn in range(4)])
    with torch.no_grad():
        goal = reference(turned)
    return torch.stack([F.mse_loss(extractor(turned), goal) for extractor in others]).sum() / (goal.var() + 1e-6)


def _section(cut: dict[str, Any]) -> dict[str, Any]:
    return {"name": "split", **cut, "channels": 64, "side": 4, "head": HEAD}


def _extended(head: nn.Module, seed: int) -> nn.Module:
    """Return a copy of the head for all classes: the known rows are unchanged, the others are drawn."""
    wider = built(_section(next(iter(EXTRACTORS.values()))), SIZE, CLASSES, seed, "extended").head
    state, known = wider.state_dict(), head.state_dict()
    for name, tensor in known.items():
        rows = len(tensor) if tensor.ndim else None
        state[name] = tensor if rows is None else torch.cat([tensor, state[name][rows:]])
    wider.load_state_dict(state)
    return wider


def _on_each(extractors: dict[str, nn.Module], head: nn.Module, test: Examples) -> dict[str, float]:
    return {name: mean_class_accuracy(extractor, head, test) for name, extractor in extractors.items()}
