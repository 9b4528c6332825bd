"""Sum aggregation at a site: train N_i so that the sum of all sites' networks is a good network too.

There are four modes. `exact` (ours): the aggregate is S/n = (N_1 + ... + N_n) / n by construction. Each site minimises the
loss of its own network, and of the aggregate as its own steps move it. `regularised` (sum aggregation, Eq. 1-4): a penalty
ties a free network N* to the sum. `independent` and `fedavg` are the baselines.

Each loss is a pure function `loss_of` of the weights and the batch's random draws, so that clients.training.vectorised can
train several sites together.
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
from fedloom.clients.objectives.plain import PlainSession, below, state_of
from fedloom.clients.protocol.messages import MEAN, ROUND, SITE, STAR, SUBSET
from fedloom.conf.typed import option
from fedloom.fusion.state import State, moved_back

STAR_ = "star."  # prefix of the names of N*'s weights


@OBJECTIVES.register("sum_aggregation")
@dataclass(frozen=True)
class SumAggregation(Objective):
    """Networks whose sum is a good network, too. Modes: exact, regularised (the paper's), independent, fedavg."""

    mode: str = option("exact", "method that makes the sum a good network", choices=tuple(MODES))
    initialisation: str = option(
        "shared",
        "initial weights of the sites' networks; aggregate (exact): a new site starts from the aggregate",
        choices=("shared", "own", AGGREGATE),
    )
    own_weight: float = option(1.0, "weight of the loss of the site's own network (the aggregate's has 1)", low=0.0)
    subset_probability: float = option(0.0, "exact: share of batches that see a leave-one-out sum", low=0.0, high=1.0)
    strength: float = option(1.0, "regularised: weight of the penalty (the paper's lambda)", low=0.0)
    norm: str = option("squared", "regularised: ||.||_F^2 or ||.||_F of each layer", choices=("squared", "frobenius"))
    others: str = option(
        "alike",
        "regularised: the other sites' weights move like the site's (ours), or stay still within a round (Eq. 3)",
        choices=("alike", "still"),
    )

    @property
    def keeps_frozen(self) -> bool:  # type: ignore[override]
        """Whether the aggregate is a mean of networks, and no sum."""
        return self.mode != "regularised"

    def session(self, task: Task) -> Session:
        return SESSIONS[self.mode](self, task)


class AverageSession(PlainSession):
    """Session of mode `fedavg`: one network and one loss, from the aggregate in each round."""

    from_server = frozenset({ROUND})

    def __init__(self, objective: SumAggregation, task: Task) -> None:
        self.objective = objective
        super().__init__(task)

    def contribution(self) -> dict[str, State]:
        return {ROUND: state_of(self.network)}


class OwnSession(AverageSession):
    """Session of mode `independent`: the site trains its own network, including the head, in all rounds."""

    from_server = frozenset()

    def start(self) -> State:
        if self.task.own is not None:
            return self.task.own
        return self._initial()

    def _initial(self) -> State:
        who = self.task.site.name if self.objective.initialisation == "own" else SHARED
        return initial_state(self.task.config, who, self.task.site)

    def contribution(self) -> dict[str, State]:
        state = state_of(self.network)
        return {SITE: state, ROUND: _part(state, HEAD)}

    def local_state(self) -> State | None:
        return state_of(self.network)


class ExactSession(OwnSession):
    """Session of mode `exact`. It minimises own_weight CE(phi_i) + CE(S/n + phi_i - phi_i at the round's start).

    Both losses share the head. All sites train at once, and S/n moves by the mean of their steps, as in FedAvg. With
    probability `subset_probability`, a batch sees (S - phi_j) / (n - 1) for a random other site j instead of S/n. Then the
    sum stays good when a site is removed.

    In a round that restores the aggregate, the aggregate's loss replaces the own network's.
    """

    from_server = frozenset({ROUND})

    def __init__(self, objective: SumAggregation, task: Task) -> None:
        super().__init__(objective, task)
        self.phi = dict(self.network.extractor.named_parameters())
        begin = {name: tensor.detach().clone() for name, tensor in self.phi.items()}
        own = SUBSET + task.site.name
        records = [task.incoming[MEAN]]
        records += [record for name, record in task.incoming.items() if name.startswith(SUBSET) and name != own]
        self.offsets = [
            {name: record[EXTRACTOR + name].to(task.device) - begin[name] for name in begin} for record in records
        ]

    def start(self) -> State:
        mean = self.task.incoming[MEAN]
        joins = self.objective.initialisation == AGGREGATE and self.task.own is None
        if joins:
            return dict(mean)
        own = super().start()
        if self.task.back:
            own = moved_back(own, self._initial(), self.task.back)
        return {**own, **_part(mean, HEAD)}

    def contribution(self) -> dict[str, State]:
        state = state_of(self.network)
        return {SITE: _part(state, EXTRACTOR), ROUND: _part(state, HEAD)}

    def per_step_inputs(self) -> tuple[State, ...]:
        return (self._offset(),)

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        (offset,) = drawn
        view = {EXTRACTOR + name: weights[EXTRACTOR + name] + shift for name, shift in offset.items()}
        aggregate = self.cross_entropy({**weights, **view}, images, labels)
        own = aggregate if self.task.restoring else self.cross_entropy(weights, images, labels)
        return self.objective.own_weight * own + aggregate

    def _offset(self) -> dict[str, Tensor]:
        if (others := len(self.offsets) - 1) == 0:
            return self.offsets[0]
        draw, choice = torch.rand(2, generator=self.task.generator).tolist()
        if draw >= self.objective.subset_probability:
            return self.offsets[0]
        return self.offsets[1 + min(int(choice * others), others - 1)]


class RegularisedSession(OwnSession):
    """Session of mode `regularised`: CE(N_i) + CE(N*) + strength * sum over convolutions of ||W* - (W_1 + ... + W_n)||.

    N_i and N* share the head. The site does not know the other sites' weights, so the option `others` sets an assumption:

    - `alike`: they change as W_i does. The sum is S + n (W_i - W_i at the round's start), and the penalty's gradient on W_i
      is n times that of Eq. 3.
    - `still`: they do not change. The sum is S + W_i - W_i at the start, with the gradient of Eq. 3.
    """

    from_server = frozenset({ROUND})

    def __init__(self, objective: SumAggregation, task: Task) -> None:
        super().__init__(objective, task)
        star = task.incoming[STAR]
        self.star = _like(self.network.extractor, below(star, EXTRACTOR))
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
        star = {EXTRACTOR + name: weight for name, weight in below(weights, STAR_).items()}
        entropy = self.objective.own_weight * self.cross_entropy(own, images, labels)
        entropy = entropy + self.cross_entropy({**own, **star}, images, labels)
        return entropy + self.objective.strength * self.penalty_of(weights, *drawn)

    def penalty(self) -> Tensor:
        """Return `penalty_of` at the current weights: how far N* is from the sum."""
        return self.penalty_of(self.weights(), *self.per_step_inputs())

    def penalty_of(self, weights: Mapping[str, Tensor], mean: State, begin: State) -> Tensor:
        """Return the penalty, a scalar, on W* - (S + k (W_i - W_i at the start)), with k = n (`alike`) or 1 (`still`).

        It is the sum over convolutions of the (squared) Frobenius norm.
        """
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
