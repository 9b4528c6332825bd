"""arithmetic, Tables 1 to 4: what a network learned, added to networks that did not learn it (Eq. 6 and 7).

theta_A learns CIFAR-10 from theta_0, on 40, 1,000 or many images. g = theta_A - theta_0 (Eq. 6) or theta_A itself (Eq. 7) is
multiplied by alpha and added to five random networks, and to five that were trained on other data.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from clients.data import Images
from clients.networks import initialise, parse_name
from clients.randomness import torch_generator
from fusion.arithmetic import GRADIENTS, WEIGHTS
from fusion.exact import State
from server.evaluate import count_right
from sims.experiments import papers
from sims.experiments.kept import kept, told
from sims.experiments.pairs import EVALUATION_BATCH, Recipe, Task, images, trained
from sims.report.tables import Table, mean, mean_and_spread

SIZE, NETWORK = 32, "lenet"
RANDOM, TRAINED = "random", "trained"
MOST = 5000  # images that each of the others is trained on
TEST = 2000  # test images that are looked at
OTHERS = ("cifar100", "fashion_mnist", "mnist", "usps", "svhn")  # in the place of the paper's: two are the same
ALPHAS = {
    GRADIENTS: (0.01, 0.1, 0.2, 0.5, 0.8, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0, 30.0, 40.0),
    WEIGHTS: (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0),
}
TABLES = {(RANDOM, GRADIENTS): "1", (TRAINED, GRADIENTS): "2", (RANDOM, WEIGHTS): "3", (TRAINED, WEIGHTS): "4"}
FORMULAS = {GRADIENTS: "θ + α g", WEIGHTS: "θ + α θ_A"}
THEIRS = {RANDOM: "small", TRAINED: "large, test"}  # the column that the paper prints


@dataclass(frozen=True)
class Few(Task):
    """`each` images of every class (0: all), the first of an order drawn by `seed`: fewer of them are among more."""

    each: int = 0

    def selected(self, whole: Images) -> Images:
        """The first of each class."""
        order = torch.randperm(len(whole), generator=torch_generator(self.seed, self.domain, "few"))
        x, y = whole.x[order], whole.y[order]
        if not self.each:
            return Images(x, y)
        places = torch.cat([(y == label).nonzero()[: self.each, 0] for label in range(int(y.max()) + 1)])
        return Images(x[places], y[places])


RECIPES = {"small": (4, Recipe(epochs=150, rate=0.01, batch=8)), "medium": (100, Recipe(epochs=40, rate=0.01, batch=32))}
LARGE = {"cpu": (1000, Recipe(epochs=15, rate=0.01, batch=32)), "paper": (0, Recipe(epochs=30, rate=0.01, batch=32))}
NOTE = (
    "Accuracy in % on CIFAR-10, mean and standard deviation over five networks and seeds: on the 40 images of the small "
    f"scale, or on {TEST:,} test images. small: 4 images of each class, medium: 100, large: {{large}}. trained: on "
    f"{', '.join(OTHERS)}; the paper's are CIFAR-100, Caltech-256, Food-101, MNIST, STL-10. (paper): mean of its networks."
)


def tables(preset: str, seeds: int, folder: Path, quiet: bool) -> list[Table]:
    """The four tables; results on disk are taken as they are."""
    scales = {**RECIPES, "large": LARGE[preset]}
    found = [_found(scales, seed, folder, quiet) for seed in range(seeds)]
    large = scales["large"][0] or "all"
    note = NOTE.format(large=f"{large:,}" if isinstance(large, int) else large)
    return [_table(target, how, found, note) for target, how in TABLES]


def _found(scales: Mapping[str, tuple[int, Recipe]], seed: int, folder: Path, quiet: bool) -> dict[str, Any]:
    def make() -> dict[str, Any]:
        found = measured(scales, seed, folder / "networks")
        if not quiet:
            print(f"arithmetic, Tables 1 to 4, seed {seed}: alone {found['alone']}", flush=True)
        return found

    key = [{name: [each, asdict(recipe)] for name, (each, recipe) in scales.items()}, OTHERS, ALPHAS, TEST, seed]
    return kept(folder / "results" / f"assigned-{seed}.json", key, make)


def measured(scales: Mapping[str, tuple[int, Recipe]], seed: int, folder: Path) -> dict[str, Any]:
    """alone: of theta_A by column; else by target and way, [alpha][network] of each column."""
    task, name = Few("cifar10", SIZE, False, seed=seed), parse_name(NETWORK, 3, SIZE, 10)
    start = _random(seed, "0")
    ends = {scale: dict(trained(folder, name, replace(task, each=each), recipe, seed).state_dict())
            for scale, (each, recipe) in scales.items()}  # fmt: skip
    bases = {RANDOM: [_random(seed, str(number)) for number in range(1, 6)], TRAINED: _others(folder, seed)}
    looks = {scale: images(replace(task, each=scales["small"][0]), "train") for scale in scales}
    whole = images(task, "test")
    looks["large, test"] = Images(whole.x[:TEST], whole.y[:TEST])
    network = name.build().eval()

    def right(state: State, column: str) -> float:
        network.load_state_dict(state)
        return count_right(network, looks[column], EVALUATION_BATCH, torch.device("cpu")) / len(looks[column])

    def moved(base: State, scale: str, alpha: float, how: str) -> State:
        end = ends[scale]
        return {key: one + alpha * (end[key] - (start[key] if how == GRADIENTS else 0.0)) for key, one in base.items()}

    found: dict[str, Any] = {"alone": {column: right(ends[column.partition(",")[0]], column) for column in looks}}
    for target, how in TABLES:
        found[f"{target} {how}"] = {
            column: [[right(moved(base, column.partition(",")[0], alpha, how), column) for base in bases[target]]
                     for alpha in ALPHAS[how]] for column in looks
        }  # fmt: skip
    return found


def _random(seed: int, number: str) -> State:
    """The start of theta_A (0), and other random networks."""
    network = parse_name(NETWORK, 3, SIZE, 10).build()
    purpose = (seed, NETWORK, "initial") if number == "0" else (seed, "random", number)
    initialise(network, torch_generator(*purpose))
    return dict(network.state_dict())


def _others(folder: Path, seed: int) -> list[State]:
    """Networks that were trained on other data, each from a start of its own."""
    classes = papers.classes_of("arithmetic", "cifar100_ten")
    found = []
    for place, domain in enumerate(OTHERS):
        task = Ten(domain, SIZE, False, seed=seed, labels=tuple(sorted(classes.values())))
        network = trained(
            folder, parse_name(NETWORK, 3, SIZE, 10), task, Recipe(epochs=10, rate=0.01), 100 * (place + 1) + seed
        )
        found.append(dict(network.state_dict()))
    return found


@dataclass(frozen=True)
class Ten(Task):
    """Ten classes of a domain: all it has, or of CIFAR-100 those of the paper, `labels`."""

    labels: tuple[int, ...] = ()

    def selected(self, whole: Images) -> Images:
        """The first of them."""
        return Images(whole.x[:MOST], whole.y[:MOST])

    def entry(self) -> str:
        """The configuration's entry of `sites`."""
        if self.domain != "cifar100":
            return super().entry()
        return f"{{domain: {self.domain}, classes: {list(self.labels)}, relabel: true}}"


def _table(target: str, how: str, found: list[dict[str, Any]], note: str) -> Table:
    number, rows = TABLES[target, how], []
    columns = list(found[0][f"{target} {how}"])
    for place, alpha in enumerate(ALPHAS[how]):
        scores = [[one for each in found for one in each[f"{target} {how}"][column][place]] for column in columns]
        rows.append([f"{alpha:g}", *map(mean_and_spread, scores), _paper(number, alpha)])
    alone = [mean_and_spread([each["alone"][column] for each in found]) for column in columns]
    rows.append(["θ_A alone", *alone, "-"])
    title = f"Table {number}: {FORMULAS[how]} on five {target} networks, {told(len(found))}"
    return Table(title, ["α", *columns, f"{THEIRS[target]} (paper)"], rows, note)


def _paper(number: str, alpha: float) -> str:
    """The paper's accuracy, in %: the mean of its networks."""
    theirs = papers.cells("arithmetic", number)
    cells = [theirs.number(alpha, column) for column in theirs.columns]
    found = mean(cells)
    return "-" if found is None else f"{found:.1f}"
