"""The interface of a strategy (the server's half of a method), and the registry of strategies.

A method's round reads like the algorithm in its paper. All durable data is in named slots (server.ledger.declared), and the
networks are functions of the slots. So the framework, not the method, does the rest: forgetting, readmission, rollback,
digests, checks, partial sums, compositions and certificates.
"""

import contextlib
import re
import traceback
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedloom.clients.objectives import OBJECTIVES, Experiment
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.package import NAME
from fedloom.conf.plugins import error_summary, own_trace, place_of
from fedloom.conf.registry import Registry
from fedloom.conf.renamed import OF_STRATEGIES, refuse_renamed
from fedloom.conf.schema import Config
from fedloom.server.ledger.declared import PerClientSlot, Slot, Sum
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.feature_statistics import with_statistics
from fedloom.server.rounds.privacy import masked
from fedloom.server.rounds.schedules import Sampling, Schedule
from fedloom.server.rounds.view import Models, View

NO_SUMS = {"median": "FedMedian", "coordinate_median": "FedMedian", "trimmed_mean": "FedTrimmedAvg", "krum": "Krum",
           "bulyan": "Bulyan"}  # usual name of a robust aggregation: Flower's class  # fmt: skip
PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,100}")  # what a slot's name must match


class OwnStrategyError(UserError):
    """The user's own strategy, or its schedule, failed at the server."""


@contextlib.contextmanager
def naming(when: str = "") -> Generator[None]:
    """Raise an error of the user's own strategy as OwnStrategyError, which names it. `when`: "in round 3", for example."""
    try:
        yield
    except Exception as error:
        if (known := named(error, when)) is error:
            raise
        raise known from error


def named(error: Exception, when: str) -> Exception:
    """Return an error as OwnStrategyError if the user's own strategy raised it; else return it unchanged."""
    if isinstance(error, UserError | FailedError):
        return error
    for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
        owner, module = frame.f_locals.get("self"), frame.f_globals.get("__name__", "")
        ours = module.partition(".")[0] == NAME
        if isinstance(owner, ClientChannel) or (ours and isinstance(error, OSError)):
            return error  # of an engine, or of a file of this project
        if isinstance(owner, Strategy | Schedule) and type(owner).__module__.partition(".")[0] != NAME:
            kind = "strategy" if isinstance(owner, Strategy) else "schedule"
            what = f"{kind}: '{type(owner).__module__}:{type(owner).__qualname__}' failed{f' {when}' if when else ''}"
            cause, then = "; ".join(filter(None, (error_summary(error), place_of(error)))), "resume" if when else "try again"
            known = OwnStrategyError(f"{what}, in `{frame.f_code.co_name}` ({cause}); correct it, then {then}")
            known.trace = own_trace(error)
            return known
    return error


@dataclass(frozen=True)
class ResidualInfluence:
    """A place where forgotten sites may have left traces that subtraction does not remove, and the reason."""

    location: str
    reason: str


@dataclass(frozen=True)
class Strategy(ABC):
    """A method at the server. Its dataclass fields are its options.

    A subclass must define `begin`, `round` and `models`. The other methods have defaults.

    `default_objective` names the objective to use if the configuration names none (server.strategies.defaults). `personal`
    is true if sites have their own networks in addition to the aggregate. These are then measured too.
    """

    default_objective: ClassVar[str] = ""
    personal: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_renamed(cls, OF_STRATEGIES)

    @property
    def objective_defaults(self) -> Mapping[str, Any]:
        """Options of the objective that follow from this strategy's options, by name."""
        return {}

    @classmethod
    def listed_as(cls, mode: str) -> str:
        """Return what tables call this method with this mode of the objective."""
        return mode

    def resolve(self, experiment: Experiment) -> "Strategy":
        """Return the strategy to run: this one, or another one that implements the configured mode."""
        return self

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """Return the slots by name: the sums or stores that hold the sites' contributions.

        Without slots, no site can be forgotten. A name has 1 to 100 letters, digits, '-', '_' and '.'.
        """
        return {}

    def check(self, experiment: Experiment) -> None:
        """Refuse a configuration that the method cannot run.

        Raises:
            UserError: The message names the option at fault and how to change it.
        """
        return

    def warnings(self, experiment: Experiment) -> Sequence[str]:
        """Return messages to show at the start of a run, if a different configuration may give better results."""
        return ()

    @abstractmethod
    def begin(self, context: RoundContext) -> None:
        """Set the first contents of the slots and of the server's state, in round 0.

        No site can be asked in round 0.

        Args:
            context: Use `context.put`, `context.put_all` and `context.save_server_state`.
        """

    @abstractmethod
    def round(self, context: RoundContext) -> None:
        """Run one round: ask the participants, store their contributions, save the state that all share.

        If it raises, the round leaves no trace.

        Args:
            context: A view of the slots that can also ask sites: `context.gather` or `context.ask`.
        """

    @abstractmethod
    def models(self, view: View) -> Models:
        """Return the method's networks, computed from a view of the slots.

        Args:
            view: Read only. It may leave out sites, so read contributions and sums from it alone.

        Returns:
            Models by the names that tables show: the aggregate first, then single sites by their names.
        """

    def recompute_derived(self, context: RoundContext) -> None:
        """Recompute and save what the server derives from the slots, such as a mean.

        The run calls this after each round, and after sites are forgotten or readmitted.
        """
        return

    def initial_contribution(self, view: View, site: str) -> Mapping[str, dict[str, torch.Tensor]]:
        """Return the contribution with which a readmitted site starts.

        Args:
            view: The slots before the site returns.
            site: The site's name.

        Returns:
            A state (tensor name to tensor) for each slot's name. A slot that is missing here starts empty.
        """
        return {}

    def heads_share_basis(self, view: View) -> bool:
        """Return whether the heads of all aggregates read the same features, channel by channel."""
        return False

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        """Return where forgotten sites may have left traces.

        Args:
            view: The slots.
            names: The forgotten sites. Empty: any site that may be forgotten later.

        Returns:
            The places and reasons, for the summary and the certificate. It is empty without traces.
        """
        if not view.rounds_with(names):
            return ()  # no training yet
        reason = "they come from rounds in which the forgotten sites participated; subtraction does not change them"
        return (ResidualInfluence("the other sites' contributions, and the server's saved state", reason),)

    def no_restoration(self, experiment: Experiment) -> str:
        """Return why `round` cannot restore the aggregate after a subtraction (`context.restoration`); empty: it can."""
        return "the method has no network that all sites train, or its rounds do not use `context.restoration`"

    def summary_entries(self, view: View) -> Mapping[str, Any]:
        """Return further entries of `summary.json`, by key."""
        return {}

    def measured_with(self, view: View) -> Mapping[str, dict[str, torch.Tensor]]:
        """Return the records to send to sites when they measure their own networks.

        Returns:
            A state (tensor name to tensor) for each record's name.
        """
        return {}

    def schedule(self, experiment: Experiment) -> Schedule:
        """Return the schedule, which says which sites participate in which round."""
        return Sampling(experiment.config)


STRATEGIES: Registry[Strategy] = Registry("strategy", Strategy, "fedloom.server.strategies", {
    "arithmetic": "arithmetic", "cla_ot": "cla_ot", "components.head_transfer": "head_transfer", "depthfl": "depthfl",
    "ditto": "ditto", "exclusive": "alone exclusive", "fedavg": "fedavg", "fedbuff": "fedbuff", "feddf": "feddf",
    "fednova": "fednova",
    "fedprox": "fedprox", "fedproto": "fedproto", "fedrolex": "fedrolex", "heterofl": "heterofl", "inco": "inco",
    "layer_selection": "layer_selection", "scaffold": "scaffold", "server_optimisers": "fedadagrad fedadam fedavgm fedyogi",
    "sum_aggregation": "sum_aggregation",
}, adapter="flower.strategy")  # fmt: skip


def strategy_of(experiment: Experiment) -> Strategy:
    """Return the configured strategy.

    Raises:
        UserError: The strategy does not exist, or an option does not fit.
    """
    return STRATEGIES.build(experiment.config.strategy, "strategy").resolve(experiment)


def slots_of(experiment: Experiment) -> dict[str, Slot]:
    """Return the slots that the configured strategy declares, by name.

    Raises:
        UserError: A slot has a wrong type or name, or excludes `data.standardise` or `federation.partial_sums`.
    """
    name, slots = experiment.config.strategy.get("name"), strategy_of(experiment).slots(experiment)
    if not isinstance(slots, Mapping) or not all(isinstance(slot, Sum | PerClientSlot) for slot in slots.values()):
        raise UserError(
            f"strategy '{name}': its slots() must return a dictionary of fedloom.server.strategies.Sum and PerClientSlot"
        )
    if wrong := [slot for slot in slots if not isinstance(slot, str) or not PLAIN.fullmatch(slot)]:
        raise UserError(f"strategy '{name}': the slot {wrong[0]!r} must have a name of letters, digits, '-', '_' and '.'")
    slots = with_statistics(experiment, slots)
    if experiment.federation.secure_aggregation:
        slots = masked(experiment.config, slots)
    if experiment.federation.partial_sums and (
        len(slots) > 1 or any(isinstance(slot, PerClientSlot) for slot in slots.values())
    ):
        raise UserError(f"federation.partial_sums: workers can add up only one sum, strategy '{name}' has more")
    return dict(slots)


def check_named(config: Config) -> None:
    """Refuse the name of a robust aggregation (median, krum), and name alternatives.

    Raises:
        UserError: `strategy.name` or `strategy.weighting` is such a name.
    """
    for key in ("name", "weighting"):
        if isinstance(rule := config.strategy.get(key), str) and rule in NO_SUMS:
            raise UserError(f"strategy.{key}: '{rule}' is not a sum, so no site could be subtracted from it. To limit "
                            "poisoned replies, set federation.largest_weight, largest_change, clip_change or "
                            "most_samples; or use Flower's strategy.name=flwr.serverapp.strategy:"
                            f"{NO_SUMS[rule]}")  # fmt: skip


def check_objective(experiment: Experiment, strategy: Strategy, name: str) -> None:
    """Refuse an objective that is neither the objective `name` nor derived from it, or that needs another strategy.

    Raises:
        UserError: The message names the objective and what is needed.
    """
    objective = experiment.objective
    given, ours = experiment.config.objective.get("name"), experiment.config.strategy.get("name")
    if not isinstance(objective, OBJECTIVES.get(name)):
        raise UserError(f"objective.name: got '{given}', strategy {ours} takes {name}, or one that is derived from it")
    if (needed := objective.needed_strategy()) and not isinstance(strategy, STRATEGIES.get(needed)):
        raise UserError(f"objective.name: '{given}' needs strategy.name={needed}, or one that is derived from it, but got "
                        f"'{ours}'; change one of the two")  # fmt: skip


def counter(experiment: Experiment) -> str:
    """Return the name of the configured network's first integer tensor (a counter of BatchNorm), or an empty string."""
    state = experiment.architecture().build().state_dict()
    return next((name for name, tensor in state.items() if tensor.dtype == torch.int64), "")
