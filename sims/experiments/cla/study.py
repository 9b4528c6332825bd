"""What the tables are made of: networks that are trained once, and results that are measured once, both on disk."""

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fedloom.clients.networks import parameter_count
from fedloom.conf.errors import UserError
from fedloom.sims.experiments.cla.methods import METHODS, Inputs
from fedloom.sims.experiments.cla.sizes import SIZES, Pair, Size
from fedloom.sims.experiments.kept import slug
from fedloom.sims.experiments.pairs import Loss, Recipe, plain_loss, train, trained
from fedloom.sims.experiments.study import Study
from fedloom.sims.operations.domain_task import Task, accuracy, probe_set

FRESH = ("random A", "random B", "B deepened, random")
PARTS = ("test", "validation")
Reached = Mapping[str, Any]  # {"test": [one-shot, after fine-tuning], "validation": ..., "parameters": ..., "seconds": ...}


@dataclass(frozen=True)
class ClaStudy(Study):
    """A preset's networks and results, in a folder."""

    @property
    def size(self) -> Size:
        """Networks and budgets of the preset."""
        return SIZES[self.preset]

    def parents(self, pair: str, seed: int, count: int = 2) -> list[nn.Module]:
        """`count` networks trained from different starts, A and B by turns."""
        return [copy.deepcopy(_trained(self.folder, self.size.pairs[pair], index, seed)) for index in range(count)]

    def probe(self, pair: str) -> Tensor:
        """Training images, without their labels."""
        return probe_set(self.size.pairs[pair].task, self.size.probe)

    def inputs(self, pair: str, seed: int, count: int = 2) -> Inputs:
        """What a method gets."""
        return Inputs(self.parents(pair, seed, count), self.probe(pair), seed)

    def reached(self, pair: str, seed: int, method: str, count: int = 2, tune: bool = True) -> Reached:
        """Accuracies (fractions) of the network that a method makes of `count` parents, and after fine-tuning; `refused`:
        why there is none."""
        facts = [asdict(self.size.pairs[pair]), self.size.probe, tune]
        key = f"{pair}-{seed}-{method}" + f"-of-{count}" * (count > 2)
        return self.kept(key, facts, lambda: self._measured(pair, seed, method, count, tune))

    def kept(self, name: str, facts: Any, make: Callable[[], Any]) -> Any:
        """A result from disk, if it was measured with the same facts, or measured and put there."""
        begin = time.perf_counter()
        return self.once(
            slug(name), facts, make, lambda result: f"{name}: {_short(result)} ({time.perf_counter() - begin:.0f} s)"
        )

    def _measured(self, pair: str, seed: int, method: str, count: int, tune: bool) -> Reached:
        chosen, inputs = self.size.pairs[pair], self.inputs(pair, seed, count)
        begin = time.perf_counter()
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


def budget(pair: Pair, method: str) -> Recipe:
    """How what a method makes is trained further: random networks with the rate of training, all others with a lower one."""
    return replace(pair.fine, rate=pair.recipe.rate) if method in FRESH else pair.fine


def tuned(network: nn.Module, task: Task, recipe: Recipe, seed: int, loss: Loss = plain_loss) -> None:
    """Fine-tune in place, with the same batches for every network of a seed."""
    train(network, task, recipe, "fine-tuning", str(seed), loss=loss)


@lru_cache(maxsize=8)
def _trained(folder: Path, pair: Pair, index: int, seed: int) -> nn.Module:
    name = pair.names()[index % 2]
    return trained(folder / "networks", name, pair.task, pair.recipe, 1000 * index + seed)


def _short(result: Any) -> str:
    if isinstance(result, dict) and "test" in result:
        return ", ".join(f"{100 * share:.1f}" for share in result["test"]) + " %"
    return str(result)[:200]
