"""Tables 1 to 4 of the arithmetic paper: what one network learned, added to other networks (Eq. 6 and 7).

theta_A learns CIFAR-10 from theta_0, on 40, 1,000 or many images. The gradient g = theta_A - theta_0 (Eq. 6) or theta_A
itself (Eq. 7) is multiplied by alpha. It is added to five random networks, and to five trained on other data.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fedloom.clients.data import Examples
from fedloom.clients.data.form import Form
from fedloom.clients.networks import NetworkName, initialise, parse_name
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.arithmetic import GRADIENTS, WEIGHTS
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import count_right
from fedloom.sims.experiments import papers
from fedloom.sims.experiments.pairs import Recipe, trained
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.operations.domain_task import EVALUATION_BATCH, Task, images
from fedloom.sims.report.results import mean
from fedloom.sims.report.spread import mean_and_spread
from fedloom.sims.report.tables import Table

RANDOM, TRAINED = "random", "trained"
TEST = "large, test"  # a column: test examples; the others are of the images of the small scale
MAX_IMAGES = 5000  # images that each of the others is trained on
ALPHAS = {
    GRADIENTS: (0.01, 0.1, 0.2, 0.5, 0.8, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 30.0, 40.0),
    WEIGHTS: (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0),
}
TABLES = {(RANDOM, GRADIENTS): "1", (TRAINED, GRADIENTS): "2", (RANDOM, WEIGHTS): "3", (TRAINED, WEIGHTS): "4"}
FORMULAS = {GRADIENTS: "θ + α g", WEIGHTS: "θ + α θ_A"}
THEIRS = {RANDOM: "small", TRAINED: TEST}  # the column that the paper prints


@dataclass(frozen=True)
class Few(Task):
    """A task with the same number of images of every class, drawn by `seed`. A smaller number selects a subset.

    Attributes:
        each: Images of each class; 0: all.
    """

    each: int = 0

    def selected(self, images: Examples) -> Examples:
        order = torch.randperm(len(images), generator=torch_generator(self.seed, self.domain, "few"))
        x, y = images.x[order], images.y[order]
        if not self.each:
            return Examples(x, y)
        indices = torch.cat([(y == label).nonzero()[: self.each, 0] for label in range(int(y.max()) + 1)])
        return Examples(x[indices], y[indices])


SMALL = (4, Recipe(epochs=150, rate=0.01, batch=8))
MEDIUM = (100, Recipe(epochs=40, rate=0.01, batch=32))


@dataclass(frozen=True)
class Plan:
    """The data and training of one preset of Tables 1 to 4.

    Attributes:
        scales: By name ("small", ...), an amount of data for theta_A: images of each class (0: all), and the recipe.
        domain: The data set of theta_A.
        others: The data sets of the trained networks to which the result is added.
        size: Pixels of an image's side.
        test: The number of test examples.
        other: The recipe for networks on `others`.
    """

    scales: Mapping[str, tuple[int, Recipe]]
    domain: str = "cifar10"
    others: tuple[str, ...] = ("cifar100", "fashion_mnist", "mnist", "usps", "svhn")  # the paper's: see NOTE
    size: int = 32
    test: int = 2000  # test examples that are looked at
    other: Recipe = field(default_factory=lambda: Recipe(epochs=10, rate=0.01))

    def few(self, scale: str, seed: int) -> "Few":
        """Return the task that theta_A learns at a scale: a data set with the scale's number of images of each class."""
        return Few(self.domain, self.size, False, seed=seed, each=self.scales[scale][0])

    @property
    def network(self) -> NetworkName:
        """The architecture of all networks."""
        return parse_name("lenet", Form.images(3, self.size, 10))


PLANS = {
    "cpu": Plan({"small": SMALL, "medium": MEDIUM, "large": (1000, Recipe(epochs=15, rate=0.01, batch=32))}),
    "paper": Plan({"small": SMALL, "medium": MEDIUM, "large": (0, Recipe(epochs=30, rate=0.01, batch=32))}),
}
NOTE = (
    "Accuracy in % on {domain}, mean and standard deviation over five networks and all seeds: on the {few} images "
    "of the small scale, or on test examples. Images of a class: {scales}. trained: on {others}; in the paper on "
    "CIFAR-100, Caltech-256, Food-101, MNIST, STL-10. (paper): the mean of its networks."
)


def tables(study: Study) -> list[Table]:
    """Return Tables 1 to 4 of the paper, measured again."""
    plan = PLANS[study.preset]
    folder, key = study.folder / "networks", [plan, [*ALPHAS.items()]]
    results = study.saved_each("assigned", key, lambda seed: measured(plan, seed, folder))
    scales = ", ".join(f"{name} {each or 'all'}" for name, (each, _) in plan.scales.items())
    few = len(images(plan.few("small", 0), "train"))
    note = NOTE.format(domain=plan.domain, few=few, scales=scales, others=", ".join(plan.others))
    return [_table(study, target, how, results, note) for target, how in TABLES]


def measured(plan: Plan, seed: int, folder: Path) -> dict[str, Any]:
    """Return all accuracies of one seed.

    Returns:
        "alone": the accuracy of theta_A, by column (a scale, or TEST). "TARGET HOW", for each of TABLES: by column, a row
        for each alpha, with the accuracy of each network to which theta_A (or its gradient) was added.
    """
    network = plan.network.build().eval()
    few, large = images(plan.few("small", seed), "train"), images(plan.few("large", seed), "test")
    images_by_column = {**dict.fromkeys(plan.scales, few), TEST: Examples(large.x[: plan.test], large.y[: plan.test])}
    start = _random(plan, seed, "0")
    ends = {scale: dict(trained(folder, plan.network, plan.few(scale, seed), recipe, seed).state_dict())
            for scale, (_, recipe) in plan.scales.items()}  # fmt: skip
    ends[TEST] = ends["large"]
    bases = {RANDOM: [_random(plan, seed, str(number)) for number in range(1, 6)], TRAINED: _others(plan, folder, seed)}

    def right(state: State, column: str) -> float:
        network.load_state_dict(state)
        return count_right(network, images_by_column[column], EVALUATION_BATCH, torch.device("cpu")) / len(
            images_by_column[column]
        )

    def moved(base: State, column: str, alpha: float, how: str) -> State:
        end = ends[column]
        return {key: tensor + alpha * (end[key] - (start[key] if how == GRADIENTS else 0.0)) for key, tensor in base.items()}

    results: dict[str, Any] = {"alone": {column: right(ends[column], column) for column in images_by_column}}
    for target, how in TABLES:
        results[f"{target} {how}"] = {column: [[right(moved(base, column, alpha, how), column) for base in bases[target]]
                                             for alpha in ALPHAS[how]] for column in images_by_column}  # fmt: skip
    return results


def _random(plan: Plan, seed: int, number: str) -> State:
    """Return theta_0 (number "0"), or another random network."""
    network = plan.network.build()
    purpose = (seed, plan.network.name, "initial") if number == "0" else (seed, "random", number)
    initialise(network, torch_generator(*purpose))
    return dict(network.state_dict())


def _others(plan: Plan, folder: Path, seed: int) -> list[State]:
    """Return networks trained on other data, each from its own start."""
    labels = tuple(sorted(papers.classes_of("arithmetic", "cifar100_ten").values()))
    tasks = [Ten(domain, plan.size, False, seed=seed, labels=labels) for domain in plan.others]
    return [dict(trained(folder, plan.network, task, plan.other, 100 * (index + 1) + seed).state_dict())
            for index, task in enumerate(tasks)]  # fmt: skip


@dataclass(frozen=True)
class Ten(Task):
    """A task of ten classes: of CIFAR-100, the classes `labels`; of any other domain, all classes."""

    labels: tuple[int, ...] = ()

    def selected(self, images: Examples) -> Examples:
        return Examples(images.x[:MAX_IMAGES], images.y[:MAX_IMAGES])

    def entry(self) -> str:
        if self.domain != "cifar100":
            return super().entry()
        return f"{{domain: {self.domain}, classes: {list(self.labels)}, relabel: true}}"


def _table(study: Study, target: str, how: str, results: list[dict[str, Any]], note: str) -> Table:
    number, way, rows = TABLES[target, how], f"{target} {how}", []
    columns = list(results[0][way])
    for index, alpha in enumerate(ALPHAS[how]):
        scores = [[share for result in results for share in result[way][column][index]] for column in columns]
        rows.append([f"{alpha:g}", *map(mean_and_spread, scores), _paper(number, alpha)])
    rows.append(["θ_A alone", *means(results, *(("alone", column) for column in columns)), "-"])
    title = f"Table {number}: {FORMULAS[how]} on five {target} networks"
    return study.table(title, ["α", *columns, f"{THEIRS[target]} (paper)"], rows, note)


def _paper(number: str, alpha: float) -> str:
    theirs = papers.cells("arithmetic", number)
    average = mean([theirs.number(alpha, column) for column in theirs.columns])
    return "-" if average is None else f"{average:.1f}"
