"""What layer selection costs: seconds of a step, and of a whole task, beside the same network without it. One thread."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedloom.clients.data import Images
from fedloom.clients.objectives.layer_selection.configurations import every
from fedloom.clients.objectives.layer_selection.tree import Tree, operations
from fedloom.clients.training.learner import descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import TrainingConfig
from fedloom.sims.experiments.lasem.lifelong import Training
from fedloom.sims.experiments.lasem.selecting import Selecting, configured
from fedloom.sims.report.tables import Table

SIZE, CLASSES, BATCH, IMAGES = 32, 10, 10, 170  # the paper's tasks of CIFAR-100
STEPS, TURNS, RATE = 5, 5, 0.03
SETTINGS = TrainingConfig(batch=BATCH, rate=RATE, clip=1.0)
BASE = {"mode": "alternating"}
WAYS: dict[str, dict[str, Any]] = {name: {"search": {"name": name}} for name in ("exact", "pruned", "sampled")}


@dataclass(frozen=True)
class Case:
    """A network, epochs of a whole task, and the bars: exact beside the operations of its tree, the others beside BASE."""

    network: Mapping[str, Any]
    groups: int
    epochs: int
    task_bar: float
    step_bar: float = 1.15


CASES = {
    "4 layers (CIFAR-100)": Case(
        {"name": "convnet", "widths": [32, 32, 64, 64], "pools": [2, 4], "hidden": [64], "norm": "none", "bias": True},
        4, epochs=20, task_bar=1.6,
    ),
    "6 layers (STL-10)": Case(
        {"name": "convnet", "widths": [32, 32, 64, 64, 128, 128], "pools": [2, 4, 6], "hidden": [128, 16], "norm": "none",
         "bias": True}, 6, epochs=10, task_bar=2.0,
    ),
}  # fmt: skip


def bench() -> tuple[Table, list[dict[str, Any]]]:
    """Every way on both networks."""
    torch.set_num_threads(1)
    rows = [row for name, case in CASES.items() for row in measured(name, case)]
    head = ["network", "way", "step, ms", "beside the base", "operations of a tree", "task, s", "beside the base", "verdict"]
    note = (
        f"Random images {SIZE} x {SIZE}, batches of {BATCH}; base: the configuration '{BASE['mode']}' all the time. Step: "
        f"the median of {TURNS} turns of {STEPS} at the start of a task; task: epochs over {IMAGES} images. Bars: a step of "
        "exact at most 1.15 times the tree's operations, a task of the others at most 1.6 (4 layers) and 2 times the base."
    )
    return Table("Layer selection", head, [_line(row) for row in rows], note), rows


def measured(name: str, case: Case) -> list[dict[str, Any]]:
    """A row for the base, then one for each way; turns of steps are taken in turn, so that noise meets all alike."""
    ways = {"base": BASE, **WAYS}
    images = torch.randn(IMAGES, 3, SIZE, SIZE, generator=torch_generator(0, "images"))
    labels = torch.randint(CLASSES, (IMAGES,), generator=torch_generator(0, "labels"))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS + 1):  # the first warms up
        for way, options in ways.items():
            taken = _steps(_begun(options, case), images, labels, STEPS) / STEPS
            seconds[way] += [taken] if turn else []
    step = {way: statistics.median(found) for way, found in seconds.items()}
    number = case.epochs * IMAGES // BATCH
    task = {way: _steps(_begun(options, case), images, labels, number) for way, options in ways.items() if way != "exact"}
    tree = operations(costs(case), every(case.groups)) / sum(costs(case))
    return [
        {"network": name, "way": way, "step_s": step[way], "step_ratio": step[way] / step["base"], "tree": tree,
         "task_s": task.get(way), "task_ratio": task[way] / task["base"] if way in task else None,
         "met": _met(case, way, step[way] / step["base"] / tree, task.get(way, 0.0) / task["base"])}
        for way in ways
    ]  # fmt: skip


def costs(case: Case) -> list[float]:
    """Multiplications of one image in each segment of the network."""
    learner = Selecting(BASE, configured(case.network, SIZE, CLASSES, 1, 0))
    tree = Tree(learner.task(0, None, {}).network, learner.layers.groups)
    found: list[float] = []

    def count(layer: nn.Module, given: Any, out: Tensor) -> None:
        weight = layer.get_parameter("weight")
        found[-1] += weight.numel() * out[0].numel() / len(weight)

    layers = [one for part in tree.segments for one in part.modules() if isinstance(one, nn.Conv2d | nn.Linear)]
    hooks = [one.register_forward_hook(count) for one in layers]
    features = torch.zeros(1, 3, SIZE, SIZE)
    for part in tree.segments:
        found.append(0.0)
        with torch.no_grad():
            features = part(features)
    for hook in hooks:
        hook.remove()
    return found


def _begun(options: Mapping[str, Any], case: Case) -> Training:
    learner = Selecting(options, configured(case.network, SIZE, CLASSES, 1, 0))
    return learner.start(0, Images(torch.empty(0, 3, SIZE, SIZE), torch.empty(0)))  # looks at no validation images


def _steps(training: Training, images: Tensor, labels: Tensor, number: int) -> float:
    """Seconds of so many steps."""
    places = [torch.arange(step * BATCH, (step + 1) * BATCH) % IMAGES for step in range(number)]
    begin = time.perf_counter()
    descend(training.parameters(), training.loss, [(RATE, images[one], labels[one]) for one in places], recipe_of(SETTINGS))
    return time.perf_counter() - begin


def _met(case: Case, way: str, beside_tree: float, beside_base: float) -> bool | None:
    if way == "base":
        return None
    return beside_tree <= case.step_bar if way == "exact" else beside_base <= case.task_bar


def _line(row: Mapping[str, Any]) -> Sequence[str]:
    task = ["-", "-"] if row["task_s"] is None else [f"{row['task_s']:.1f}", f"{row['task_ratio']:.2f}"]
    verdict = {None: "", True: "met", False: "not met"}[row["met"]]
    return [row["network"], row["way"], f"{1e3 * row['step_s']:.1f}", f"{row['step_ratio']:.2f}",
            f"{row['tree']:.2f}" if row["way"] == "exact" else "-", *task, verdict]  # fmt: skip
