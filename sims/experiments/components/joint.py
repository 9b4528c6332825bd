"""Figure 2 as the paper trains it: all networks in one process, each auxiliary head in turns by all of them (App. E).

The federation's form of it is ours: there each site trains copies of the auxiliary heads, and the server averages these.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clients.data import Images, to_float
from clients.networks import Network
from clients.objectives.components.auxiliary import Batch, Rotations
from clients.randomness import torch_generator
from sims.experiments.components.trainer import accuracy, built
from sims.experiments.pairs import Task, images

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
DEEPER = {**CONV, "head": {"name": "convnet", "widths": [24, 48, 48], "strides": [1, 2, 1]}}
RESIDUAL = {"name": "split", "of": {"name": "resnet20", "width": 0.5}, "at": "stage2"}


@dataclass(frozen=True)
class Pair:
    """Two sites' images, what networks for them are pre-trained on by rotations, and the networks."""

    title: str
    tasks: tuple[Task, Task]
    before: Task
    network: Mapping[str, Any]
    turns: str = "one"


@dataclass(frozen=True)
class Setting:
    """How two networks are trained. `auxiliary`: of DCC and RP; `same`: from identical weights (IIW).

    Adam with a rate that falls to a tenth after each quarter of the steps, of which each network makes so many. `permuted`:
    the second network's outputs are in another order. `start`: of the extractors, drawn or pre-trained by rotations.
    """

    auxiliary: tuple[str, ...] = ()
    same: bool = False
    steps: int = 300
    rate: float = 0.01
    decay: float = 1e-7
    batch: int = 64
    permuted: bool = False
    start: str = DRAWN
    optimizer: str = "adam"


@dataclass
class Trained:
    """Both networks and the auxiliary heads; `order` [classes]: of each class the place in the second network's outputs."""

    networks: list[Network]
    heads: dict[str, nn.Module]
    order: Tensor = field(default_factory=lambda: torch.arange(CLASSES))

    def parts(self, place: int) -> list[nn.Module]:
        """What a batch of one site moves."""
        return [self.networks[place], *self.heads.values()]


def train(pair: Pair, setting: Setting, seed: int) -> Trained:
    """Both networks, a batch of each in turn, or (without auxiliary heads) each by itself, which is the same then."""
    made = _made(pair, setting, seed)
    weights = [one for module in [*made.networks, *made.heads.values()] for one in module.train().parameters()]
    optimizer = _optimizer(weights, setting)
    decline = torch.optim.lr_scheduler.StepLR(optimizer, max(1, setting.steps // 4), 0.1)
    draws = torch_generator(seed, "turns")
    batches = [_batches(images(task, "train"), setting, seed, place) for place, task in enumerate(pair.tasks)]
    for _ in range(setting.steps):
        for place in (0, 1):
            optimizer.zero_grad()
            _loss(made, place, *next(batches[place]), Rotations(turns=pair.turns), draws).backward()
            optimizer.step()
        decline.step()
    return made


def _optimizer(weights: Sequence[nn.Parameter], setting: Setting) -> torch.optim.Optimizer:
    if setting.optimizer == "adam":
        return torch.optim.Adam(weights, setting.rate, weight_decay=setting.decay)
    return torch.optim.SGD(weights, setting.rate, momentum=0.9, weight_decay=setting.decay)


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
    """An extractor that has learned to tell rotations of other images, without labels."""
    network = built(pair.network, pair.tasks[0].size, 4, seed, "before", name)
    optimizer = _optimizer([*network.train().parameters()], setting)
    decline = torch.optim.lr_scheduler.StepLR(optimizer, max(1, setting.steps // 4), 0.1)
    generator, rotations = torch_generator(seed, "before", name), Rotations(turns=pair.turns)
    batches = _batches(images(pair.before, "train"), setting, seed, name)
    for _ in range(setting.steps):
        x, labels = next(batches)
        optimizer.zero_grad()
        batch = Batch(x, x, labels)
        rotations.loss(network.extractor, network.head, batch, rotations.draw(generator, len(x))).backward()
        optimizer.step()
        decline.step()
    return copy.deepcopy(network.extractor.state_dict())


def _loss(made: Trained, place: int, x: Tensor, labels: Tensor, rotations: Rotations, draws: torch.Generator) -> Tensor:
    """Eq. 1 and 2 of one site's batch."""
    network = made.networks[place]
    features = network.extractor(x)
    loss = F.cross_entropy(network.head(features), made.order[labels] if place else labels)
    if DCC in made.heads:
        loss = loss + F.cross_entropy(made.heads[DCC](features), labels)
    if RP in made.heads:
        batch = Batch(x, features, labels)
        loss = loss + rotations.loss(network.extractor, made.heads[RP], batch, rotations.draw(draws, len(x)))
    return loss


def _batches(whole: Images, setting: Setting, seed: int, who: int | str) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch_generator(seed, "batches", str(who))
    for _ in itertools.count():
        for places in torch.randperm(len(whole), generator=generator).split(setting.batch):
            if len(places) == setting.batch:
                yield to_float(whole.x[places]), whole.y[places]


def measured(pair: Pair, setting: Setting, seed: int) -> dict[str, float]:
    """Test accuracy (batch statistics), own and exchanged, each the mean of both, of classes in their own order."""
    made, found = train(pair, setting, seed), dict[str, float]()
    with torch.no_grad():
        for key, swap in (("own", 0), ("exchanged", 1)):
            both = [_right(made, place, (place + swap) % 2, pair.tasks[place]) for place in (0, 1)]
            found[key] = sum(both) / 2
    return found


def _right(made: Trained, place: int, head: int, task: Task) -> float:
    """Of the extractor at `place` with the head of that number, on its site's test images."""
    whole = images(task, "test")
    labels = made.order[whole.y] if head else whole.y
    return accuracy(made.networks[place].extractor, made.networks[head].head, Images(whole.x, labels))
