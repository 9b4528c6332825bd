"""Figure 2 as the paper trains it: all networks in one process, with one auxiliary head for all (App. E).

The federated form is ours: each site trains copies of the auxiliary heads, and the server averages them.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.clients.data import Examples, to_float
from fedloom.clients.networks import Network
from fedloom.clients.objectives.components.auxiliary import Batch, Rotations
from fedloom.conf.randomness import torch_generator
from fedloom.sims.experiments.components.trainer import built, mean_class_accuracy
from fedloom.sims.experiments.pairs import Share
from fedloom.sims.experiments.papers import cells
from fedloom.sims.experiments.study import Study, means
from fedloom.sims.operations.domain_task import Task, images
from fedloom.sims.report.page import Part

DCC, RP = "dcc", "rp"
DRAWN, SAME, APART = "drawn", "pre-trained, one network", "pre-trained, two networks"
CLASSES = 10
CONV = {
    "name": "split",
    "of": {"name": "convnet", "widths": [16, 32, 64, 64, 64], "strides": [1, 2, 1, 1, 1]},
    "at": "block5",
    "channels": 16,
    "head": {"name": "convnet", "widths": [24], "strides": [2]},
}
RESIDUAL = {"name": "split", "of": {"name": "resnet20", "width": 0.5}, "at": "stage2"}


@dataclass(frozen=True)
class Pair:
    """Two sites and their architecture.

    Attributes:
        title: The pair's name in tables.
        tasks: The two sites' data.
        before: The data for pre-training by rotations.
        network: The section `network` of a configuration.
        turns: Rotations of each image in a batch: "one" at random, or "all" four.
    """

    title: str
    tasks: tuple[Task, Task]
    before: Task
    network: Mapping[str, Any]
    turns: str = "one"


@dataclass(frozen=True)
class Setting:
    """How two networks are trained: by Adam, with a rate that falls to a tenth after each quarter of the steps.

    Attributes:
        auxiliary: Auxiliary heads: "dcc" (common classes) and "rp" (rotations).
        same: Whether both networks have equal initial weights (IIW).
        steps: The steps of each network.
        rate: The initial learning rate.
        decay: The weight decay.
        batch: Images in a batch.
        permuted: Whether the second network's outputs are in another order.
        start: Where extractors start: DRAWN, or pre-trained by rotations.
    """

    auxiliary: tuple[str, ...] = ()
    same: bool = False
    steps: int = 300
    rate: float = 0.01
    decay: float = 1e-7
    batch: int = 64
    permuted: bool = False
    start: str = DRAWN


@dataclass
class Trained:
    """Both networks and the auxiliary heads. `order` [classes]: the output of each class in the second network."""

    networks: list[Network]
    heads: dict[str, nn.Module]
    order: Tensor = field(default_factory=lambda: torch.arange(CLASSES))


def train(pair: Pair, setting: Setting, seed: int) -> Trained:
    """Train both networks in turn on batches of their own images; return them with the auxiliary heads.

    Without auxiliary heads, this is the same as training each by itself.
    """
    made, draws = _made(pair, setting, seed), torch_generator(seed, "turns")
    batches = [_batches(images(task, "train"), setting, seed, index) for index, task in enumerate(pair.tasks)]

    def loss(index: int) -> Tensor:
        return _loss(made, index, *next(batches[index]), Rotations(turns=pair.turns), draws)

    _descend([*made.networks, *made.heads.values()], setting, [lambda: loss(0), lambda: loss(1)])
    return made


def _descend(modules: Sequence[nn.Module], setting: Setting, losses: Sequence[Callable[[], Tensor]]) -> None:
    """Make steps on each of the losses in turn. The rate falls to a tenth after each quarter."""
    weights = [parameter for module in modules for parameter in module.train().parameters()]
    optimizer = torch.optim.Adam(weights, setting.rate, weight_decay=setting.decay)
    decline = torch.optim.lr_scheduler.StepLR(optimizer, max(1, setting.steps // 4), 0.1)
    for _ in range(setting.steps):
        for loss in losses:
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        decline.step()


def _made(pair: Pair, setting: Setting, seed: int) -> Trained:
    names = ["one", "one" if setting.same else "other"]
    networks = [built(pair.network, pair.tasks[0].size, CLASSES, seed, name) for name in names]
    if setting.start != DRAWN:
        before = [_pretrained(pair, setting, seed, name if setting.start == APART else "one") for name in ("one", "other")]
        for network, state in zip(networks, before, strict=True):
            network.extractor.load_state_dict(state)
    outputs = {DCC: CLASSES, RP: 4}
    heads = {name: built(pair.network, pair.tasks[0].size, outputs[name], seed, name).head for name in setting.auxiliary}
    order = torch.randperm(CLASSES, generator=torch_generator(seed, "order")) if setting.permuted else torch.arange(CLASSES)
    return Trained(networks, heads, order)


def _pretrained(pair: Pair, setting: Setting, seed: int, name: str) -> Mapping[str, Tensor]:
    """Return an extractor that has learned to predict rotations of other images, without labels."""
    network = built(pair.network, pair.tasks[0].size, 4, seed, "before", name)
    generator, rotations = torch_generator(seed, "before", name), Rotations(turns=pair.turns)
    batches = _batches(images(pair.before, "train"), setting, seed, name)

    def loss() -> Tensor:
        x, labels = next(batches)
        batch = Batch(x, x, labels)
        return rotations.loss(network.extractor, network.head, batch, rotations.draw(generator, len(x)))

    _descend([network], setting, [loss])
    return copy.deepcopy(network.extractor.state_dict())


def _loss(made: Trained, site: int, x: Tensor, labels: Tensor, rotations: Rotations, draws: torch.Generator) -> Tensor:
    """Return Eq. 1 and 2 for one site's batch."""
    network = made.networks[site]
    features = network.extractor(x)
    loss = F.cross_entropy(network.head(features), made.order[labels] if site else labels)
    if DCC in made.heads:
        loss = loss + F.cross_entropy(made.heads[DCC](features), labels)
    if RP in made.heads:
        batch = Batch(x, features, labels)
        loss = loss + rotations.loss(network.extractor, made.heads[RP], batch, rotations.draw(draws, len(x)))
    return loss


def _batches(every: Examples, setting: Setting, seed: int, who: int | str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch_generator(seed, "batches", str(who))
    for _ in itertools.count():
        for indices in torch.randperm(len(every), generator=generator).split(setting.batch):
            if len(indices) == setting.batch:
                yield to_float(every.x[indices]), every.y[indices]


def measured(pair: Pair, setting: Setting, seed: int) -> dict[str, float]:
    """Train both networks; return test accuracies with `own` and `exchanged` heads (batch statistics), mean over sites."""
    made, shares = train(pair, setting, seed), dict[str, float]()
    with torch.no_grad():
        for key, swap in (("own", 0), ("exchanged", 1)):
            both = [_right(made, index, (index + swap) % 2, pair.tasks[index]) for index in (0, 1)]
            shares[key] = sum(both) / 2
    return shares


def _right(made: Trained, site: int, head: int, task: Task) -> float:
    test = images(task, "test")
    labels = made.order[test.y] if head else test.y
    return mean_class_accuracy(made.networks[site].extractor, made.networks[head].head, Examples(test.x, labels))


ROWS = {
    "independent": Setting(),
    "IIW": Setting(same=True),
    "IIW, labels of one in another order": Setting(same=True, permuted=True),
    "RP": Setting((RP,)),
    "DCC": Setting((DCC,)),
    "DCC, labels of one in another order": Setting((DCC,), permuted=True),
    "IIW+RP": Setting((RP,), same=True),
    "IIW+DCC": Setting((DCC,), same=True),
    "RP+DCC": Setting((DCC, RP)),
    "IIW+RP+DCC": Setting((DCC, RP), same=True),
    "IIW, pre-trained": Setting(same=True, start=SAME),
    "IIW+DCC, pre-trained": Setting((DCC,), same=True, start=SAME),
    "RP, two pre-trained": Setting((RP,), start=APART),
    "DCC, two pre-trained": Setting((DCC,), start=APART),
}
THEIRS = {  # cells that only the paper's text has (Sec. 4)
    "IIW, pre-trained": "74.3", "IIW+DCC, pre-trained": "82.7", "RP, two pre-trained": "19.7", "DCC, two pre-trained": "52.3"
}  # fmt: skip
STEPS = 600
CIFAR = Share("cifar10", 16, False, 20000, parts=2)
BEFORE = Task("fashion_mnist", 16, False, samples=8000)
USPS, MNIST_M, MNIST = (Task(name, 16, False, samples=number) for name, number in
                        (("usps", 0), ("mnist_m", 6500), ("mnist", 6500)))  # fmt: skip
PAIRS = {
    "usps_mnistm": Pair("USPS / MNIST-M", (USPS, MNIST_M), BEFORE, CONV),
    "mnist_usps": Pair("MNIST / USPS", (MNIST, USPS), BEFORE, CONV),
    "cifar": Pair("CIFAR-10, two halves", (CIFAR, replace(CIFAR, part=1)), Task("cifar100", 16, False, samples=20000),
                  RESIDUAL, turns="all"),
    "same": Pair("MNIST / MNIST, the same images (Figure 7)", (MNIST, MNIST), BEFORE, CONV),
}  # fmt: skip
NOTE = (
    "Test accuracy in %, batch statistics, mean and standard deviation over seeds. One process, one auxiliary head "
    "for both networks, Adam with weight decay 1e-7. The rate 0.01 falls to a tenth after each quarter of the "
    "{steps} steps of each network. pre-trained: the extractors have learned to predict rotations of {before}. "
    "(paper): CIFAR-10 / STL-10, ResNet-56."
)


def joint(study: Study) -> list[Part]:
    """Return Figure 2 with the paper's optimiser and one auxiliary head for both networks, on each selected pair."""
    if study.preset != "cpu":
        return ["Figure 2, trained jointly, is only available with --preset cpu."]
    paper, parts = cells("components", "figure2"), list[Part]()
    for name, pair in PAIRS.items():
        if study.only and name not in study.only:
            continue
        rows = []
        for row, short in ROWS.items():
            setting = replace(short, steps=STEPS)
            results = study.saved_each(f"joint-{name}-{row}", [pair, setting], partial(measured, pair, setting))
            theirs = THEIRS.get(row) or (paper.shown(row, "exchanged") if row in paper.rows else "-")
            rows.append([row, theirs, *means(results, ("exchanged",), ("own",))])
        note = NOTE.format(steps=STEPS, before=pair.before.domain)
        head = ["heads", "exchanged (paper)", "exchanged", "own"]
        parts.append(study.table(f"Figure 2, trained jointly: {pair.title}", head, rows, note))
    return parts
