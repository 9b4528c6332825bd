"""Figure 4: an existing head makes transfer to another extractor faster (Sec. 5.3)."""

import copy
from functools import partial
from typing import Any

from torch import nn

from fedloom.clients.data import Examples
from fedloom.clients.networks import Network
from fedloom.sims.experiments.components.adaptation import NETWORK, SIZE, data
from fedloom.sims.experiments.components.trainer import Plan, answers, both, built, fit, frozen, mean_class_accuracy, turns
from fedloom.sims.experiments.plots import curves
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.report.page import Part, Picture

ROTATIONS, SOURCE, TARGETS = "fashion_mnist", "mnist", ("usps", "mnist_m")
STEPS = (0, 1, 10, 30, 100, 300)
TRAIN, TUNE = Plan(600, 0.05), 0.01
NOTE = (
    "Mean class accuracy in % on the target's test examples after so many steps of fine-tuning on its training "
    "images, mean and standard deviation over seeds. The extractor is from a network trained on MNIST, the head "
    "from one trained on the target. RP: both were trained with one frozen rotation head, from Fashion-MNIST. IIW: "
    "they started from the same weights. independent: with their own rotation heads. In the paper, recombined "
    "networks have 40.0 to 66.4% before fine-tuning (from ILSVRC-12 to CIFAR-10, STL-10 and CIFAR-100)."
)


def figure4(study: Study) -> list[Part]:
    """Return Figure 4: accuracy over the steps of fine-tuning an extractor with another network's head."""
    parts: list[Part] = []
    for target in TARGETS:
        key = [ROTATIONS, SOURCE, target, STEPS, NETWORK, TRAIN, TUNE]
        results = study.saved_each(f"faster-{target}", key, partial(_of_target, target))
        indices = range(len(STEPS))
        rows = [[row, *means(results, *((row, index) for index in indices))] for row in results[0]]
        head = ["head and extractor", *(f"{step} steps" for step in STEPS)]
        parts.append(study.table(f"Figure 4: from {SOURCE} to {target}", head, rows, NOTE))
        series = {row: {str(STEPS[index]): [result[row][index] for result in results] for index in indices}
                  for row in results[0]}  # fmt: skip
        labels, path = ("steps of fine-tuning", "exchanged: test accuracy"), study.folder / f"figure4-{target}.png"
        parts.append(Picture(curves(series, labels, path, limits=(0.0, 1.0)), NOTE))
    return parts


def _of_target(target: str, seed: int) -> dict[str, list[float]]:
    return measured(data(ROTATIONS), data(SOURCE), data(target), seed)


def measured(
    rotations: dict[str, Examples], source: dict[str, Examples], target: dict[str, Examples], seed: int, train: Plan = TRAIN
) -> dict[str, list[float]]:
    """Return the target's test accuracy after each of STEPS of fine-tuning, by row (how networks were trained)."""
    extractor = built(NETWORK, SIZE, 10, seed, "rotations").extractor
    rotating = _head(4, seed, "turns")
    fit([extractor, rotating], turns(extractor, rotating, seed), rotations["train"], train, seed, "rotations")

    def network(images: Examples, name: str, start: str, head: nn.Module | None) -> Network:
        made = built(NETWORK, SIZE, 10, seed, start)
        turning = frozen(head) if head is not None else _head(4, seed, name, "own")
        loss = both(answers(made.extractor, made.head), turns(made.extractor, turning.train(), seed, name))
        fit([made.extractor, made.head, *([] if head is not None else [turning])], loss, images, train, seed, name)
        return made

    def pair(*starts: str, head: nn.Module | None) -> tuple[Network, Network]:
        return network(source["train"], "source", starts[0], head), network(target["train"], "target", starts[1], head)

    networks = {
        "RP": pair("source", "target", head=rotating),
        "IIW+RP": pair("alike", "alike", head=rotating),
        "independent": pair("source", "target", head=None),
    }
    rows = {row: _tuned(giver.extractor, taker.head, target, seed) for row, (giver, taker) in networks.items()}
    extractor = networks["independent"][0].extractor
    return {**rows, "head drawn anew": _tuned(extractor, _head(10, seed, "anew"), target, seed)}


def _head(outputs: int, *purpose: Any) -> nn.Module:
    return built(NETWORK, SIZE, outputs, *purpose).head


def _tuned(extractor: nn.Module, head: nn.Module, target: dict[str, Examples], seed: int) -> list[float]:
    extractor, head, done, reached = copy.deepcopy(extractor), copy.deepcopy(head), 0, []
    for step in STEPS:
        if step > done:
            plan, loss = Plan(step - done, TUNE, cosine=False), answers(extractor, head)
            fit([extractor, head], loss, target["train"], plan, seed, step)
        done = step
        reached.append(mean_class_accuracy(extractor, head, target["test"]))
    return reached
