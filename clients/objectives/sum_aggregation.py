"""Sum aggregation at a site: train N_i so that the sum of all sites' networks is a good network too.

Four modes. `exact` (ours): the aggregate is S/n = (N_1 + ... + N_n) / n by construction, and each site minimises the
loss of its own network and of the aggregate as its own steps move it. `regularised` (sum aggregation, Eq. 1-4): a free
N* is tied to the sum by a penalty. `independent` and `fedavg` are the baselines.

Each loss is a pure function `loss_of` of the weights and of what the site has drawn for the batch, so that
clients.training.vectorised can train several sites as one.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedloom.clients.networks.base import EXTRACTOR, HEAD
from fedloom.clients.networks.initial import SHARED, initial_state
from fedloom.clients.objectives.base import OBJECTIVES, Objective, Session, Task
from fedloom.clients.objectives.modes import AGGREGATE, MODES
from fedloom.clients.objectives.plain import PlainSession, state_of
from fedloom.clients.protocol.messages import MEAN, ROUND, SITE, STAR, SUBSET
from fedloom.conf.typed import option
from fedloom.fusion.state import State

STAR_ = "star."  # before the names of N*'s weights, beside those of N_i


@OBJECTIVES.register("sum_aggregation")
@dataclass(frozen=True)
class SumAggregation(Objective):
    """Networks whose sum is a good one, too; modes exact, regularised (the paper's), independent and fedavg."""

    mode: str = option("exact", "how the sum is made a good network", choices=tuple(MODES))
    initialisation: str = option(
        "shared",
        "of the sites' networks; aggregate (exact): a site that joins begins at what there is",
        choices=("shared", "own", AGGREGATE),
    )
    own_weight: float = option(1.0, "weight of the loss of the site's own network (the aggregate's has 1)", low=0.0)
    subset_probability: float = option(0.0, "exact: share of batches that see a leave-one-out sum", low=0.0, high=1.0)
    strength: float = option(1.0, "regularised: weight of the penalty (the paper's lambda)", low=0.0)
    norm: str = option("squared", "regularised: ||.||_F^2 or ||.||_F of each layer", choices=("squared", "frobenius"))
    others: str = option(
        "alike",
        "regularised: the other sites' weights move as the site's own do (ours), or stay within a round (Eq. 3's gradient)",
        choices=("alike", "still"),
    )

    def session(self, task: Task) -> Session:
        """Start on a task."""
        return SESSIONS[self.mode](self, task)


class AverageSession(PlainSession):
    """One network, one loss: `fedavg` starts from the aggregate in each round."""

    from_server = frozenset({ROUND})

    def __init__(self, objective: SumAggregation, task: Task) -> None:
        self.objective = objective
        super().__init__(task)

    def contribution(self) -> dict[str, State]:
        return {ROUND: state_of(self.network)}


class OwnSession(AverageSession):
    """A site that holds a network of its own for good (`independent`): it is trained alone, head included."""

    from_server = frozenset()

    def start(self) -> State:
        if self.task.own is not None:
            return self.task.own
        who = self.task.site.name if self.objective.initialisation == "own" else SHARED
        return initial_state(self.task.config, who, self.task.site)

    def contribution(self) -> dict[str, State]:
        state = state_of(self.network)
        return {SITE: state, ROUND: _part(state, HEAD)}

    def local_state(self) -> State | None:
        return state_of(self.network)


class ExactSession(OwnSession):
    """Minimise own_weight CE(phi_i) + CE(S/n + phi_i - phi_i at the start of the round), the head shared.

    All sites move at once, each by its own step: S/n then moves by the mean of the steps, as in FedAvg. With
    `subset_probability` a batch sees (S - phi_j) / (n - 1) for a random other site j instead of S/n, so that the sum stays
    good when a site is taken out.
    """

    from_server = frozenset({ROUND})

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
        mean = self.task.incoming[MEAN]
        joins = self.objective.initialisation == AGGREGATE and self.task.own is None
        return dict(mean) if joins else {**super().start(), **_part(mean, HEAD)}

    def contribution(self) -> dict[str, State]:
        state = state_of(self.network)
        return {SITE: _part(state, EXTRACTOR), ROUND: _part(state, HEAD)}

    def per_step_inputs(self) -> tuple[State, ...]:
        return (self._offset(),)

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        (offset,) = drawn
        view = {EXTRACTOR + name: weights[EXTRACTOR + name] + shift for name, shift in offset.items()}
        aggregate = self.cross_entropy({**weights, **view}, images, labels)
        return self.objective.own_weight * self.cross_entropy(weights, images, labels) + aggregate

    def _offset(self) -> dict[str, Tensor]:
        if (others := len(self.offsets) - 1) == 0:
            return self.offsets[0]
        draw, choice = torch.rand(2, generator=self.task.generator).tolist()
        if draw >= self.objective.subset_probability:
            return self.offsets[0]
        return self.offsets[1 + min(int(choice * others), others - 1)]


class RegularisedSession(OwnSession):
    """The paper's: CE(N_i) + CE(N*) + strength * sum over convolutions of ||W* - (W_1 + ... + W_n)||.

    The other sites' weights are not here. `others`: they move alike, so that the sum is S + n (W_i - W_i at the start of
    the round) and the penalty's gradient on W_i is n times that of Eq. 3; or they stay still, and the sum is
    S + W_i - W_i at the start: the gradient of Eq. 3, while the sum as it will be is not seen. The head is shared by N_i
    and N*.
    """

    from_server = frozenset({ROUND})

    def __init__(self, objective: SumAggregation, task: Task) -> None:
        super().__init__(objective, task)
        star = task.incoming[STAR]
        self.star = _like(self.network.extractor, {name[len(EXTRACTOR) :]: tensor for name, tensor in star.items()})
        mean, own = task.incoming[MEAN], dict(self.network.extractor.named_parameters())
        tied = [name for name, weight in self.star.named_parameters() if weight.ndim == 4]
        self.mean = {name: mean[EXTRACTOR + name].to(task.device) for name in tied}
        self.begin = {name: own[name].detach().clone() for name in tied}

    def start(self) -> State:
        return {**super().start(), **_part(self.task.incoming[MEAN], HEAD)}

    def weights(self) -> dict[str, nn.Parameter]:
        return {**super().weights(), **{STAR_ + name: weight for name, weight in self.star.named_parameters()}}

    def per_step_inputs(self) -> tuple[State, ...]:
        return self.mean, self.begin

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        own = {name: weight for name, weight in weights.items() if not name.startswith(STAR_)}
        star = {EXTRACTOR + name[len(STAR_) :]: weight for name, weight in weights.items() if name.startswith(STAR_)}
        entropy = self.objective.own_weight * self.cross_entropy(own, images, labels)
        entropy = entropy + self.cross_entropy({**own, **star}, images, labels)
        return entropy + self.objective.strength * self.penalty_of(weights, *drawn)

    def penalty(self) -> Tensor:
        """penalty_of at the present weights."""
        return self.penalty_of(self.weights(), *self.per_step_inputs())

    def penalty_of(self, weights: Mapping[str, Tensor], mean: State, begin: State) -> Tensor:
        """sum over convolutions of the (squared) Frobenius norm of W* - (S + k (W_i - W_i at the start)), k = n or 1."""
        total = torch.zeros((), device=self.task.device)
        for name in mean:
            own = weights[EXTRACTOR + name]
            if self.objective.others == "still":
                own = begin[name] + (own - begin[name]) / self.task.members
            square = (weights[STAR_ + name] - self.task.members * (mean[name] + own - begin[name])).square().sum()
            total = total + (square if self.objective.norm == "squared" else (square + 1e-12).sqrt())
        return total

    def contribution(self) -> dict[str, State]:
        star = {EXTRACTOR + name: tensor for name, tensor in state_of(self.star).items()}
        state = state_of(self.network)
        return {SITE: _part(state, EXTRACTOR), ROUND: {**star, **_part(state, HEAD)}}


SESSIONS: dict[str, type[AverageSession]] = {
    "exact": ExactSession,
    "regularised": RegularisedSession,
    "independent": OwnSession,
    "fedavg": AverageSession,
}


def _part(state: State, prefix: str) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith(prefix)}


def _like(module: nn.Module, state: State) -> nn.Module:
    twin = copy.deepcopy(module)
    twin.load_state_dict(state)
    return twin
