"""Table 1: a classifier is adapted to another domain without labels (Sec. 5.1).

The extractor learns to predict rotations of the new images, with the frozen rotation head of the source. Then its features
fit that head again. They also fit the head of the classes, because both heads were made compatible.
"""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

from fedloom.clients.data import Examples
from fedloom.sims.experiments.components.trainer import Plan, answers, both, built, fit, frozen, mean_class_accuracy, turns
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.operations.domain_task import Task, images
from fedloom.sims.report.page import Part

PAIRS = {"mnist -> mnist_m": ("mnist", "mnist_m"), "usps -> mnist": ("usps", "mnist"), "mnist -> usps": ("mnist", "usps")}
SIZE, SAMPLES = 16, 7000
NETWORK = {
    "name": "split",
    "of": {"name": "convnet", "widths": [16, 32, 64, 64], "strides": [1, 2, 1, 2]},
    "at": "block3",
    "channels": 16,
    "head": {"name": "convnet", "widths": [32], "strides": [2]},
}
TRAIN = Plan(1000, 0.05)
ADAPT = {rate: Plan(1000, rate, cosine=False) for rate in (1e-5, 1e-2)}  # the paper's, and a thousand times as much
ROWS = {
    "source model": "source model",
    "source model, test statistics": "source model with test statistics",
    **{f"adapted by rotations, rate {rate:g}": "adaptation through RP" for rate in ADAPT},
}
NOTE = (
    "Mean class accuracy in % on the target's test examples, mean and standard deviation over seeds. target: trained "
    "on its labels. (paper): CIFAR-10 and STL-10, mean of both directions, WRN-28-16."
)


def table1(study: Study) -> list[Part]:
    """Return Table 1: adaptation without labels, on domains of digits."""
    paper, key = cells("components", "table1"), [SIZE, SAMPLES, NETWORK, TRAIN, [*ADAPT.values()]]
    results = {pair: study.saved_each(f"adaptation-{pair}", [domains, *key], partial(_of_domains, domains))
               for pair, domains in PAIRS.items()}  # fmt: skip
    rows = [[row, paper.shown(theirs, "mean") if theirs else "-", *(means(results[pair], (row,))[0] for pair in PAIRS)]
            for row, theirs in {**ROWS, "target": ""}.items()]  # fmt: skip
    return [study.table("Table 1: domain adaptation", ["", "(paper)", *PAIRS], rows, NOTE)]


def _of_domains(domains: tuple[str, str], seed: int) -> dict[str, float]:
    return measured(data(domains[0]), data(domains[1]), seed)


def data(domain: str) -> dict[str, Examples]:
    """Return a domain's images by part: "train" and "test"."""
    task = Task(domain, SIZE, False, samples=0 if domain == "usps" else SAMPLES)
    return {part: images(task, part) for part in ("train", "test")}


def measured(
    source: dict[str, Examples],
    target: dict[str, Examples],
    seed: int,
    train: Plan = TRAIN,
    plans: Sequence[Plan] = tuple(ADAPT.values()),
) -> dict[str, float]:
    """Return the accuracy on the target's test examples by row."""
    network, rotating = _with_rotations(source["train"], seed, train)
    results: dict[str, Any] = {}
    for row, statistics in zip(ROWS, ("running", "batch"), strict=False):
        results[row] = mean_class_accuracy(network.extractor, network.head, target["test"], statistics)
    for row, plan in zip(list(ROWS)[2:], plans, strict=True):
        extractor = copy.deepcopy(network.extractor)
        fit([extractor], turns(extractor, frozen(rotating), seed, "adapt"), target["train"], plan, seed, "adapt")
        results[row] = mean_class_accuracy(extractor, network.head, target["test"])
    own, _ = _with_rotations(target["train"], seed, train)
    results["target"] = mean_class_accuracy(own.extractor, own.head, target["test"])
    return results


def _with_rotations(train: Examples, seed: int, plan: Plan) -> Any:
    """Return a network for the classes, and the rotation head of its training."""
    network = built(NETWORK, SIZE, 10, seed, "classes")
    rotating = built(NETWORK, SIZE, 4, seed, "rotations").head
    extractor = network.extractor
    loss = both(answers(extractor, network.head), turns(extractor, rotating, seed))
    fit([extractor, network.head, rotating], loss, train, plan, seed, "source")
    return network, rotating
