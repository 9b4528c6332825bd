"""The interface of a strategy, the server's half of a method, and the registry of strategies.

A method's round reads like the algorithm in its paper. All that is durable is in named slots (server.ledger.declared), and
what can be measured is a function of them: forgetting, readmitting, rolling back, digests, checks, partial sums,
compositions and certificates are therefore not a method's business.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedloom.clients.objectives import OBJECTIVES, Experiment
from fedloom.conf.errors import UserError
from fedloom.conf.registry import Registry
from fedloom.conf.renamed import OF_STRATEGIES, refuse_renamed
from fedloom.conf.schema import Config
from fedloom.server.ledger.declared import PerClientSlot, Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.privacy import masked
from fedloom.server.rounds.schedules import Sampling, Schedule
from fedloom.server.rounds.view import Models, View

NO_SUMS = {"median": "FedMedian", "coordinate_median": "FedMedian", "trimmed_mean": "FedTrimmedAvg", "krum": "Krum",
           "bulyan": "Bulyan"}  # robust aggregations, by their usual names, and Flower's  # fmt: skip
PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,100}")  # names of slots


@dataclass(frozen=True)
class ResidualInfluence:
    """Where forgotten sites may have left traces that subtraction does not reach, and why."""

    location: str
    reason: str


@dataclass(frozen=True)
class Strategy(ABC):
    """A method at the server; its fields are its options. `begin`, `round` and `models` are what a new one has to have.

    `default_objective`: the name of the sites' half, taken where a configuration names none (server.strategies.defaults).
    `personal`: sites have networks of their own beside the aggregate, which are measured, too.
    """

    default_objective: ClassVar[str] = ""
    personal: ClassVar[bool] = False

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        refuse_renamed(cls, OF_STRATEGIES)

    @property
    def objective_defaults(self) -> Mapping[str, Any]:
        """Options of the sites' half that follow from those of this one."""
        return {}

    def resolve(self, experiment: Experiment) -> "Strategy":
        """What carries out the configured mode, where that is another strategy."""
        return self

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """What the sites put into, by name. A method without slots can forget nobody."""
        return {}

    def check(self, experiment: Experiment) -> None:
        """UserError for a configuration that the method cannot work with."""
        return

    def warnings(self, experiment: Experiment) -> Sequence[str]:
        """What to tell at the start of a run that works, but not as well as it could."""
        return ()

    @abstractmethod
    def begin(self, context: RoundContext) -> None:
        """Round 0: the first contents of the slots, and what is kept beside them. Nobody can be asked yet."""

    @abstractmethod
    def round(self, context: RoundContext) -> None:
        """One round: ask the participants, put what they gave, keep what all share."""

    @abstractmethod
    def models(self, view: View) -> Models:
        """The networks of a view of the slots, by the names that tables show: the aggregate first, sites by their names."""

    def recompute_derived(self, context: RoundContext) -> None:
        """Recompute what is kept and follows from the slots: after a round, and when sites are forgotten or readmitted."""
        return

    def initial_contribution(self, view: View, site: str) -> Mapping[str, dict[str, torch.Tensor]]:
        """By slot, what a site that is readmitted begins with."""
        return {}

    def heads_share_basis(self, view: View) -> bool:
        """Whether the inputs of the heads of all its aggregates correspond, channel by channel."""
        return False

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        """Where these forgotten sites (none named: any that will be) may have left traces."""
        if not view.rounds_with(names):
            return ()  # nothing was trained yet
        why = "they come from rounds in which the forgotten sites took part; subtraction does not change them"
        return (ResidualInfluence("the other sites' contributions, and what is kept beside the sums", why),)

    def summary_entries(self, view: View) -> Mapping[str, Any]:
        """What else the summary says of the run, by key."""
        return {}

    def measured_with(self, view: View) -> Mapping[str, dict[str, torch.Tensor]]:
        """By record name, what sites need of the server to measure networks that are their own."""
        return {}

    def schedule(self, experiment: Experiment) -> Schedule:
        """Who takes part when."""
        return Sampling(experiment.config)


STRATEGIES: Registry[Strategy] = Registry("strategy", Strategy, "fedloom.server.strategies", {
    "arithmetic": "arithmetic", "cla_ot": "cla_ot", "components.head_transfer": "head_transfer", "depthfl": "depthfl",
    "ditto": "ditto", "exclusive": "alone exclusive", "fedavg": "fedavg", "feddf": "feddf", "fednova": "fednova",
    "fedprox": "fedprox", "fedproto": "fedproto", "fedrolex": "fedrolex", "heterofl": "heterofl", "inco": "inco",
    "layer_selection": "layer_selection", "scaffold": "scaffold", "server_optimisers": "fedadagrad fedadam fedavgm fedyogi",
    "sum_aggregation": "sum_aggregation",
}, adapter="flower.strategy")  # fmt: skip


def strategy_of(experiment: Experiment) -> Strategy:
    """The configured strategy. UserError if there is no such one, or an option does not fit."""
    return STRATEGIES.build(experiment.config.strategy, "strategy").resolve(experiment)


def slots_of(experiment: Experiment) -> dict[str, Slot]:
    """The slots that the configured strategy declares. UserError for odd ones, or ones that workers cannot add up."""
    name, slots = experiment.config.strategy.get("name"), strategy_of(experiment).slots(experiment)
    if not isinstance(slots, Mapping) or not all(isinstance(slot, Sum | PerClientSlot) for slot in slots.values()):
        raise UserError(
            f"strategy '{name}': its slots() must give a dictionary of fedloom.server.strategies.Sum and PerClientSlot"
        )
    if odd := [slot for slot in slots if not isinstance(slot, str) or not PLAIN.fullmatch(slot)]:
        raise UserError(f"strategy '{name}': the slot {odd[0]!r} needs a name of letters, digits, '-', '_' and '.'")
    if experiment.federation.secure_aggregation:
        slots = masked(experiment.config, slots)
    if experiment.federation.partial_sums and (
        len(slots) > 1 or any(isinstance(slot, PerClientSlot) for slot in slots.values())
    ):
        raise UserError(f"federation.partial_sums: workers add up one sum alone; strategy '{name}' has other slots")
    return dict(slots)


def check_named(config: Config) -> None:
    """UserError for a robust aggregation by its usual name: what there is in its place."""
    for key in ("name", "weighting"):
        if isinstance(given := config.strategy.get(key), str) and given in NO_SUMS:
            raise UserError(f"strategy.{key}: '{given}' is no sum: no site could be subtracted again. Against poisoned "
                            "replies there are bounds: federation.largest_weight, largest_change, clip_change, "
                            "most_samples; and Flower's own, strategy.name=flwr.serverapp.strategy:"
                            f"{NO_SUMS[given]}")  # fmt: skip


def check_objective(experiment: Experiment, name: str) -> None:
    """UserError unless the sites' objective is the one of that name, or one that is made of it."""
    if not isinstance(experiment.objective, OBJECTIVES.get(name)):
        given, strategy = experiment.config.objective.get("name"), experiment.config.strategy.get("name")
        raise UserError(f"objective.name: got '{given}', strategy {strategy} takes {name}, or one that is made of it")


def counter(experiment: Experiment) -> str:
    """The first integer tensor of the configured network, which is a counter of BatchNorm's; empty if there is none."""
    state = experiment.architecture().build().state_dict()
    return next((name for name, tensor in state.items() if tensor.dtype == torch.int64), "")
