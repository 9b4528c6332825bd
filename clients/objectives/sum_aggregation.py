"""Sum aggregation at a site: train N_i so that the sum of all sites' networks is a good network too.

Four modes. `exact` (ours): the aggregate is S/n = (N_1 + ... + N_n) / n by construction, and each site minimises the
loss of its own network and of the aggregate as its own steps move it. `regularised` (sum aggregation, Eq. 1-4): a free
N* is tied to the sum by a penalty. `independent` and `fedavg` are the baselines.
"""

import copy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from clients.initial import SHARED, initial_state
from clients.messages import MEAN, ROUND, SITE, STAR, SUBSET
from clients.objectives.base import OBJECTIVES, Objective, Session, Task
from clients.objectives.modes import EXTRACTOR, HEAD, MODES
from conf.typed import value
from fusion.exact import State


@OBJECTIVES.register("sum_aggregation")
@dataclass(frozen=True)
class SumAggregation(Objective):
    """Options of the method; see the module's text for the modes."""

    mode: str = value("exact", "how the sum is made a good network", choices=tuple(MODES))
    initialisation: str = value("shared", "of the sites' networks", choices=("shared", "own"))
    own_weight: float = value(1.0, "weight of the loss of the site's own network (the aggregate's has 1)", low=0.0)
    subset_probability: float = value(0.0, "exact: share of batches that see a leave-one-out sum", low=0.0, high=1.0)
    strength: float = value(1.0, "regularised: weight of the penalty (the paper's lambda)", low=0.0)
    norm: str = value("squared", "regularised: ||.||_F^2 or ||.||_F of each layer", choices=("squared", "frobenius"))

    def session(self, task: Task) -> Session:
        """Start on a task."""
        return SESSIONS[self.mode](self, task)


class PlainSession(Session):
    """One network, one loss: `fedavg` starts from the aggregate in each round, `independent` from the site's own state."""

    def __init__(self, objective: SumAggregation, task: Task) -> None:
        self.objective = objective
        self.task = task
        self.network = task.network
        self.network.load_state_dict(self.start())

    def start(self) -> State:
        """Where the network starts: at the aggregate."""
        return self.task.incoming[MEAN]

    def parameters(self) -> list[nn.Parameter]:
        return list(self.network.parameters())

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(images), labels)

    def contribution(self) -> dict[str, State]:
        return {ROUND: _state(self.network)}

    def own(self) -> State | None:
        return None


class OwnSession(PlainSession):
    """A site that holds a network of its own for good (`independent`): it is trained alone, head included."""

    def start(self) -> State:
        if self.task.own is not None:
            return self.task.own
        who = self.task.site.name if self.objective.initialisation == "own" else SHARED
        return initial_state(self.task.config, who)

    def contribution(self) -> dict[str, State]:
        state = _state(self.network)
        return {SITE: state, ROUND: _part(state, HEAD)}

    def own(self) -> State | None:
        return _state(self.network)


class ExactSession(OwnSession):
    """Minimise own_weight CE(phi_i) + CE(S/n + phi_i - phi_i at the start of the round), the head shared.

    All sites move at once, each by its own step: S/n then moves by the mean of the steps, as in FedAvg. With
    `subset_probability` a batch sees (S - phi_j) / (n - 1) for a random other site j instead of S/n, so that the sum stays
    good when a site is taken out.
    """

    def __init__(self, objective: SumAggregation, task: Task) -> None:
        super().__init__(objective, task)
        self.phi = dict(self.network.extractor.named_parameters())
        begin = {name: tensor.detach().clone() for name, tensor in self.phi.items()}
        mine = SUBSET + task.site.name
        records = [task.incoming[MEAN]]
        records += [record for name, record in task.incoming.items() if name.startswith(SUBSET) and name != mine]
        self.offsets = [
            {name: record[EXTRACTOR + name].to(task.device) - begin[name] for name in begin} for record in records
        ]

    def start(self) -> State:
        return {**super().start(), **_part(self.task.incoming[MEAN], HEAD)}

    def contribution(self) -> dict[str, State]:
        state = _state(self.network)
        return {SITE: _part(state, EXTRACTOR), ROUND: _part(state, HEAD)}

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        offset = self._offset()
        view = {name: weight + offset[name] for name, weight in self.phi.items()}
        aggregate = self.network.head(functional_call(self.network.extractor, view, (images,)))
        own = self.network(images)
        return self.objective.own_weight * F.cross_entropy(own, labels) + F.cross_entropy(aggregate, labels)

    def _offset(self) -> dict[str, Tensor]:
        draw, choice = torch.rand(2, generator=self.task.generator).tolist()
        others = len(self.offsets) - 1
        if others == 0 or draw >= self.objective.subset_probability:
            return self.offsets[0]
        return self.offsets[1 + min(int(choice * others), others - 1)]


class RegularisedSession(OwnSession):
    """The paper's: CE(N_i) + CE(N*) + strength * sum over convolutions of ||W* - (W_1 + ... + W_n)||.

    The other sites' weights are not here, and all sites move at once: the site takes them to move as it does itself, so
    that the sum is S + n (W_i - W_i at the start of the round). The head is shared by N_i and N*.
    """

    def __init__(self, objective: SumAggregation, task: Task) -> None:
        super().__init__(objective, task)
        star = task.incoming[STAR]
        self.star = _like(self.network.extractor, {name[len(EXTRACTOR) :]: tensor for name, tensor in star.items()})
        mean = task.incoming[MEAN]
        self.ties = [
            (weight, dict(self.network.extractor.named_parameters())[name], mean[EXTRACTOR + name].to(task.device))
            for name, weight in self.star.named_parameters()
            if weight.ndim == 4
        ]
        self.begin = [own.detach().clone() for _, own, _ in self.ties]

    def start(self) -> State:
        return {**super().start(), **_part(self.task.incoming[MEAN], HEAD)}

    def parameters(self) -> list[nn.Parameter]:
        return [*self.network.parameters(), *self.star.parameters()]

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        own = F.cross_entropy(self.network(images), labels)
        star = F.cross_entropy(self.network.head(self.star(images)), labels)
        return self.objective.own_weight * own + star + self.objective.strength * self.penalty()

    def penalty(self) -> Tensor:
        """sum over convolutions of the (squared) Frobenius norm of W* - (S + n (W_i - W_i at the start))."""
        total = torch.zeros((), device=self.task.device)
        for (star, own, mean), begin in zip(self.ties, self.begin, strict=True):
            square = (star - self.task.members * (mean + own - begin)).square().sum()
            total = total + (square if self.objective.norm == "squared" else (square + 1e-12).sqrt())
        return total

    def contribution(self) -> dict[str, State]:
        star = {EXTRACTOR + name: tensor for name, tensor in _state(self.star).items()}
        state = _state(self.network)
        return {SITE: _part(state, EXTRACTOR), ROUND: {**star, **_part(state, HEAD)}}


SESSIONS: dict[str, type[PlainSession]] = {
    "exact": ExactSession,
    "regularised": RegularisedSession,
    "independent": OwnSession,
    "fedavg": PlainSession,
}


def _state(module: nn.Module) -> State:
    return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}


def _part(state: State, prefix: str) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith(prefix)}


def _like(module: nn.Module, state: State) -> nn.Module:
    twin = copy.deepcopy(module)
    twin.load_state_dict(state)
    return twin
