"""Sum aggregation as the paper trains it: N_1 ... N_n and N* in one process, on Eq. 5.

The mode `regularised` of a federation differs: there, no site sees the steps of the others.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.clients.data import Examples, to_float
from fedloom.clients.networks import NetworkName, initialise
from fedloom.clients.networks.base import Network
from fedloom.clients.training.learner import descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import TrainingConfig
from fedloom.sims.experiments.pairs import cosine
from fedloom.sims.experiments.study import Study, fingerprint
from fedloom.sims.operations.domain_task import Task, images

TEST_BATCH = 500
OWN, COMMON = "own", "common"  # starts: each network's own, or one for all
Accuracies = dict[str, dict[str, float]]  # of a network on each domain's test examples


@dataclass(frozen=True)
class Setting:
    """How networks are trained on Eq. 5: by SGD with momentum 0.9, at a rate that falls to 0 along a cosine.

    Attributes:
        tasks: The data set of each N_i.
        network: The architecture of all networks.
        start: OWN (each network has its own initial weights) or COMMON.
        strength: The weight of the term L_agg, 1 in the paper. With 0, each network is trained apart, with its own head and
            without an N*: the paper's baseline.
        steps: The number of steps.
        batch: Images of each data set in a step.
        rate: The initial learning rate.
        seed: The seed of initial weights and batches.
    """

    tasks: tuple[Task, ...]
    network: NetworkName
    start: str = OWN
    strength: float = 1.0
    steps: int = 2000
    batch: int = 16
    rate: float = 0.03
    seed: int = 0


class Joint(nn.Module):
    """The networks N_1 ... N_n, one for each data set, and N* for all data, with one classifier."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        names = [str(index) for index in range(len(setting.tasks))]
        networks = [_drawn(setting, name) for name in [*names, "star"]]
        *own, self.star = (network.extractor for network in networks)
        self.own, self.head = nn.ModuleList(own), networks[-1].head
        self.strength = setting.strength

    def loss(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """Return the loss of Eq. 5: the sum of each N_i's cross-entropy on its images, N*'s on all images, and L_agg."""
        entropies = [
            F.cross_entropy(self.head(network(x)), y) for network, x, y in zip(self.own, inputs, labels, strict=True)
        ]
        union = F.cross_entropy(self.head(self.star(torch.cat([*inputs]))), torch.cat([*labels]))
        return torch.stack(entropies).sum() + union + self.strength * self.penalty()

    def penalty(self) -> Tensor:
        """Return Eq. 3 with squared Frobenius norms: the sum over convolutions of ||W* - (W_1 + ... + W_n)||^2."""
        parts = [dict(network.named_parameters()) for network in self.own]
        squares = [(star - torch.stack([part[name] for part in parts]).sum(0)).square().sum()
                   for name, star in convolutions(self.star).items()]  # fmt: skip
        return torch.stack(squares).sum()

    def summed(self, numbers: Sequence[int], norms: nn.Module | None = None) -> Network:
        """Return the sum network of some of the N_i, such as all except one (to forget that one).

        Args:
            numbers: The indices i of the networks whose convolution weights are added up.
            norms: The network that provides everything except convolutions, such as norm layers. Default: N*.
        """
        parts = [convolutions(self.own[number]) for number in numbers]
        weights = {name: torch.stack([part[name] for part in parts]).sum(0).detach() for name in parts[0]}
        return _network(self.star if norms is None else norms, weights, self.head)


class Apart(nn.Module):
    """N_1 ... N_n, each with its own head: the baseline."""

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.networks = nn.ModuleList(_drawn(setting, str(index)) for index in range(len(setting.tasks)))

    def loss(self, inputs: Sequence[Tensor], labels: Sequence[Tensor]) -> Tensor:
        """Return the sum of the networks' cross-entropies. They share no weight."""
        pairs = zip(self.networks, inputs, labels, strict=True)
        return torch.stack([F.cross_entropy(network(x), y) for network, x, y in pairs]).sum()

    def summed(self) -> Network:
        """Return the sum network: convolutions are added up; norm layers and heads are averaged.

        The paper does not specify how it combines norm layers and heads.
        """
        states = [network.state_dict() for network in self.networks]
        mean = {name: torch.stack([state[name].float() for state in states]).mean(0) for name in states[0]}
        combined = {name: tensor * len(states) if tensor.ndim == 4 else tensor for name, tensor in mean.items()}
        first = self.networks[0]
        assert isinstance(first, Network)
        return _network(first.extractor, {}, first.head, combined)


def measured(study: Study, setting: Setting) -> Accuracies:
    """Train by the setting, and return the test accuracies of N_1 ..., N*, their sum, and the sum without each."""
    return study.once(f"joint-{setting.seed}-{fingerprint(setting)}", setting, lambda: _measured(setting))


def trained(setting: Setting) -> Joint | Apart:
    """Train all networks of a setting, and return them after the last step."""
    together = Joint(setting) if setting.strength else Apart(setting)
    parts, size = [images(task, "train") for task in setting.tasks], setting.batch
    steps, training = _steps(setting, parts), TrainingConfig(rate=setting.rate, clip=5.0)
    descend(
        list(together.parameters()), lambda x, y: together.loss(x.split(size), y.split(size)), steps, recipe_of(training)
    )
    return together


def convolutions(extractor: nn.Module) -> Mapping[str, nn.Parameter]:
    """Return an extractor's convolution weights by name: the ones that are summed."""
    return {name: weight for name, weight in extractor.named_parameters() if weight.ndim == 4}


def _measured(setting: Setting) -> Accuracies:
    together, indices = trained(setting), range(len(setting.tasks))
    if isinstance(together, Apart):
        networks: dict[str, nn.Module] = {f"N{index + 1}": together.networks[index] for index in indices}
        networks["sum"] = together.summed()
    else:
        networks = {f"N{index + 1}": _network(together.own[index], {}, together.head) for index in indices}
        networks |= {"N*": _network(together.star, {}, together.head), "sum": together.summed(indices)}
        for index in indices:
            others = [other for other in indices if other != index]
            networks[f"forget N{index + 1}"] = together.summed(others)
            if len(others) == 1:
                networks[f"forget N{index + 1}, own norms"] = together.summed(others, together.own[others[0]])
    return {name: _accuracies(network, setting) for name, network in networks.items()}


def _accuracies(network: nn.Module, setting: Setting) -> dict[str, float]:
    """Return the accuracy on each domain and on the union. BatchNorm uses the statistics of mixed batches."""
    parts = [images(task, "test") for task in setting.tasks]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    order = torch.randperm(len(y), generator=torch_generator(0, "test"))
    right = torch.zeros(len(y))
    network.train()  # GroupNorm is the same in both modes
    with torch.inference_mode():
        for indices in order.split(TEST_BATCH):
            right[indices] = (network(to_float(x[indices])).argmax(1) == y[indices]).float()
    shares = right.split([len(part) for part in parts])
    return {**{task.domain: float(share.mean()) for task, share in zip(setting.tasks, shares, strict=True)},
            "union": float(right.mean())}  # fmt: skip


def _drawn(setting: Setting, name: str) -> Network:
    network = setting.network.build()
    assert isinstance(network, Network)  # as all of ours are
    initialise(network, torch_generator(setting.seed, "joint", name if setting.start == OWN else COMMON))
    return network.train()


def _network(
    extractor: nn.Module, weights: Mapping[str, Tensor], head: nn.Module, everything: Mapping[str, Tensor] | None = None
) -> Network:
    """Return a copy with other weights for its extractor, or for all of it."""
    network = Network(copy.deepcopy(extractor), copy.deepcopy(head))
    network.load_state_dict(
        {**network.state_dict(), **{f"extractor.{name}": weight for name, weight in weights.items()}, **(everything or {})}
    )
    return network


def _steps(setting: Setting, parts: Sequence[Examples]) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield the rate and a batch of each data set for every step. A data set starts again when it is used up."""
    draws = [_batches(len(part), setting, task) for part, task in zip(parts, setting.tasks, strict=True)]
    for step in range(setting.steps):
        indices = [next(draw) for draw in draws]
        x = torch.cat([part.x[own] for part, own in zip(parts, indices, strict=True)])
        yield (
            cosine(setting.rate, step, setting.steps),
            to_float(x),
            torch.cat([part.y[own] for part, own in zip(parts, indices, strict=True)]),
        )


def _batches(number: int, setting: Setting, task: Task) -> Iterator[Tensor]:
    draw = torch_generator(setting.seed, "joint", task.domain, "batches")
    while True:
        order = torch.randperm(number, generator=draw)
        yield from order[: number // setting.batch * setting.batch].split(setting.batch)
