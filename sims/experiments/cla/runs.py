"""The trained networks of the tables, and the results of methods on them. Each is made once."""

import copy
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import nn

from fedloom.clients.networks import parameter_count
from fedloom.conf.errors import UserError
from fedloom.sims.experiments.cla.methods import METHODS, Inputs
from fedloom.sims.experiments.cla.sizes import SIZES, Pair, Size
from fedloom.sims.experiments.pairs import Loss, Recipe, plain_loss, train, trained
from fedloom.sims.experiments.study import Study
from fedloom.sims.operations.domain_task import Task, accuracy, probe_set

FRESH = ("random A", "random B", "B deepened, random")
PARTS = ("test", "validation")
Reached = Mapping[str, Any]  # {"test": [one-shot, after fine-tuning], "validation": ..., "parameters": ..., "seconds": ...}


def size_of(study: Study) -> Size:
    """Return the study's preset: its networks and training budgets."""
    return SIZES[study.preset]


def inputs_of(study: Study, pair: str, seed: int, count: int = 2) -> Inputs:
    """Return what a method receives: `count` networks from different starts, A and B in turn, and unlabelled images."""
    size = size_of(study)
    networks = [copy.deepcopy(_trained(study.folder, size.pairs[pair], index, seed)) for index in range(count)]
    return Inputs(networks, probe_set(size.pairs[pair].task, size.probe), seed)


def reached(study: Study, pair: str, seed: int, method: str, count: int = 2, tune: bool = True) -> Reached:
    """Make a network from its parents by a method, fine-tune it, and measure it.

    Args:
        study: The study.
        pair: The name of the pair of parents.
        seed: The seed.
        method: A key of METHODS.
        count: The number of parents.
        tune: Whether to fine-tune.

    Returns:
        Accuracies (fractions) before and after fine-tuning, "parameters" and "seconds"; {"refused": reason} if the method
        cannot make the network.
    """
    chosen, name = size_of(study).pairs[pair], f"{pair}-{seed}-{method}" + f"-of-{count}" * (count > 2)

    def make() -> Reached:
        inputs, begin = inputs_of(study, pair, seed, count), time.perf_counter()
        try:
            network = METHODS[method](inputs)
        except UserError as error:
            return {"refused": str(error)}
        seconds = time.perf_counter() - begin
        shares = {part: [accuracy(network, chosen.task, part)] for part in PARTS}
        if tune:
            tuned(network, chosen.task, budget(chosen, method), seed)
            shares = {part: [*shares[part], accuracy(network, chosen.task, part)] for part in PARTS}
        return {**shares, "parameters": parameter_count(network), "seconds": seconds}

    return study.once(name, [chosen, size_of(study).probe, tune], make)


def budget(pair: Pair, method: str) -> Recipe:
    """Return the recipe to fine-tune a method's network: random networks with the full rate, all others with a lower one."""
    return replace(pair.fine, rate=pair.recipe.rate) if method in FRESH else pair.fine


def tuned(network: nn.Module, task: Task, recipe: Recipe, seed: int, loss: Loss = plain_loss) -> None:
    """Fine-tune a network in place, with the same batches for every network of a seed."""
    train(network, task, recipe, "fine-tuning", str(seed), loss=loss)


@lru_cache(maxsize=8)
def _trained(folder: Path, pair: Pair, index: int, seed: int) -> nn.Module:
    name = pair.names()[index % 2]
    return trained(folder / "networks", name, pair.task, pair.recipe, 1000 * index + seed)
