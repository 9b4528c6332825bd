"""`fedloom bench layer_selection`: seconds of a step and of a task with layer selection, against the base learner.

One thread. The base is the same network with one configuration all the time.
"""

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fedloom.clients.data import Examples
from fedloom.clients.objectives.layer_selection.configurations import every
from fedloom.clients.objectives.layer_selection.tree import Tree, operations
from fedloom.clients.training.learner import descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import TrainingConfig
from fedloom.sims.benchmarks.measuring import table
from fedloom.sims.experiments.lasem.lifelong import Training
from fedloom.sims.experiments.lasem.selecting import Selecting, configured
from fedloom.sims.report.tables import Table

SIZE, CLASSES, BATCH, IMAGES = 32, 10, 10, 170  # the paper's tasks of CIFAR-100
STEPS, TURNS, RATE = 5, 5, 0.03
RECIPE = recipe_of(TrainingConfig(batch=BATCH, rate=RATE, clip=1.0))
BASE = {"mode": "alternating"}
WAYS: dict[str, dict[str, Any]] = {
    "base": BASE,
    **{name: {"search": {"name": name}} for name in ("exact", "pruned", "sampled")},
}
COLUMNS = {"network": "{network}", "way": "{way}", "step, ms": "{step_ms:.1f}", "of the base's step": "{step_ratio:.2f}",
           "operations of a tree": "{shown_tree:.2f}", "task, s": "{task_s:.1f}", "of the base's task": "{task_ratio:.2f}",
           "verdict": "{met}"}  # fmt: skip
NOTE = (
    f"Random images {SIZE} x {SIZE}, batches of {BATCH}; base: the configuration '{BASE['mode']}'. Step: median of {TURNS} "
    f"turns of {STEPS} at the start of a task. Task: epochs over {IMAGES} images. Bars: a step of exact at most 1.15 times "
    "the tree's operations; a task of the others at most 1.6 (4 layers) and 2 times the base's."
)


@dataclass(frozen=True)
class Case:
    """A network and its limits.

    Attributes:
        widths: The channels of its convolutions.
        hidden: The widths of its hidden linear layers.
        epochs: The epochs of a task.
        task_bar: The limit of a task's time, in units of the base's.
        step_bar: The limit of a step in mode exact, in units of the time for the tree's operations.
    """

    widths: list[int]
    hidden: list[int]
    epochs: int
    task_bar: float
    step_bar: float = 1.15

    def learner(self, options: Mapping[str, Any]) -> Selecting:
        """Return a learner with the case's network."""
        pools = list(range(2, len(self.widths) + 1, 2))
        network = {
            "name": "convnet",
            "widths": self.widths,
            "pools": pools,
            "hidden": self.hidden,
            "norm": "none",
            "bias": True,
        }
        return Selecting(options, configured(network, SIZE, CLASSES, 1, 0))


CASES = {
    "4 layers (CIFAR-100)": Case([32, 32, 64, 64], [64], epochs=20, task_bar=1.6),
    "6 layers (STL-10)": Case([32, 32, 64, 64, 128, 128], [128, 16], epochs=10, task_bar=2.0),
}


def bench() -> tuple[Table, list[dict[str, Any]]]:
    """Measure each of WAYS to select layers, on both networks."""
    torch.set_num_threads(1)
    rows = [row for name, case in CASES.items() for row in measured(name, case)]
    lines = [{**row, "step_ms": 1e3 * row["step_s"], "shown_tree": row["tree"] if row["way"] == "exact" else None}
             for row in rows]  # fmt: skip
    return table("Layer selection", COLUMNS, lines, NOTE), rows


def measured(name: str, case: Case) -> list[dict[str, Any]]:
    """Return a row of times for each of WAYS. Steps are measured in turn, so that noise meets all ways."""
    images = torch.randn(IMAGES, 3, SIZE, SIZE, generator=torch_generator(0, "images"))
    labels = torch.randint(CLASSES, (IMAGES,), generator=torch_generator(0, "labels"))
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(TURNS + 1):  # the first warms up
        for way, options in WAYS.items():
            taken = _steps(_started(options, case), images, labels, STEPS) / STEPS
            seconds[way] += [taken] if turn else []
    step = {way: statistics.median(taken) for way, taken in seconds.items()}
    number = case.epochs * IMAGES // BATCH
    task = {way: _steps(_started(options, case), images, labels, number) for way, options in WAYS.items() if way != "exact"}
    segments = costs(case)
    tree = operations(segments, every(len(case.widths))) / sum(segments)
    rows = []
    for way in WAYS:
        step_ratio, task_ratio = step[way] / step["base"], task[way] / task["base"] if way in task else None
        met = step_ratio / tree <= case.step_bar if task_ratio is None else task_ratio <= case.task_bar
        rows.append({"network": name, "way": way, "step_s": step[way], "step_ratio": step_ratio, "tree": tree,
                     "task_s": task.get(way), "task_ratio": task_ratio, "met": None if way == "base" else met})  # fmt: skip
    return rows


def costs(case: Case) -> list[float]:
    """Return the multiplications for one image in each segment of the network."""
    learner = case.learner(BASE)
    tree = Tree(learner.task(0, None, {}).network, learner.layers.groups)
    features, totals = torch.zeros(1, 3, SIZE, SIZE), []
    for part in tree.segments:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            features = part(features)
        totals.append(counter.get_total_flops() / 2)
    return totals


def _started(options: Mapping[str, Any], case: Case) -> Training:
    return case.learner(options).start(0, Examples(torch.empty(0, 3, SIZE, SIZE), torch.empty(0)))  # no validation examples


def _steps(training: Training, images: Tensor, labels: Tensor, number: int) -> float:
    """Seconds of `number` steps."""
    batches = [torch.arange(step * BATCH, (step + 1) * BATCH) % IMAGES for step in range(number)]
    begin = time.perf_counter()
    descend(training.parameters(), training.loss, [(RATE, images[batch], labels[batch]) for batch in batches], RECIPE)
    return time.perf_counter() - begin
