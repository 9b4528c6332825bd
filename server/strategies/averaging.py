"""FedAvg, and what averaging methods have in common: sites train the server's network, and a mean of their networks
returns.

The server saves the state with which the last round began. The state of the next round follows from it and from the sites'
contributions (`next_state`). So when a site is forgotten, the server's last step is repeated without it.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.clients.data.standardise import KEY as STANDARDISE
from fedloom.clients.data.standardise import SITES
from fedloom.clients.networks import Model
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.averaging import OWN, Averaged, norms
from fedloom.clients.objectives.steps import momentum_of
from fedloom.clients.protocol.messages import MEAN, SITE, TRAIN
from fedloom.clients.protocol.partial_sums import ONCE, SAMPLES
from fedloom.conf.errors import UserError
from fedloom.conf.renamed import OF_AVERAGING, refuse_renamed
from fedloom.conf.sites import Site
from fedloom.conf.typed import option
from fedloom.fusion.state import State, moved_back
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.privacy import may_be_refused
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.base import STRATEGIES as STRATEGIES  # methods import both from here
from fedloom.server.strategies.base import ResidualInfluence, Strategy, check_objective

NETWORKS = "networks"  # the slot
ROUND_MEAN = "mean"  # without the slot, the server saves the mean of the last round's networks
NETWORK = "network"  # the saved network with which the last round began
ROUND = "round"  # the number of that round
UNEVEN = 1.0  # below this alpha of a Dirichlet distribution, most sites lack some classes
MEAN_OF_NORMS = (
    "network: it has BatchNorm, and sites have different classes, so the mean of their statistics may fit no site. Compare "
    "with network.norm=group (if the network has that option), or objective.batchnorm=own with evaluation.where=sites"
)


@dataclass(frozen=True)
class Averaging(Strategy):
    """A method that computes the next network from the last one and a mean over the sites that answered.

    Subclasses override `step`, and if needed `memory`, `initial_memory`, `extra_broadcast`, `extra_records` and `trainees`.
    """

    default_objective: ClassVar[str] = "fedavg"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        refuse_renamed(cls, OF_AVERAGING)

    unrestorable: ClassVar[str] = ""  # why `context.restoration` cannot work
    reads_contributions: ClassVar[bool] = False  # whether a step needs the contributions of single sites
    memory: ClassVar[tuple[str, ...]] = ()  # names of further saved states, with the parameters' shapes

    weighting: str = option(
        "samples", "weights of the sites in the mean: by their images, or equal", choices=("samples", "equal")
    )
    forgettable: bool = option(
        True, "store the sites' contributions, so that sites can be forgotten; false: rounds are faster, the bits the same"
    )

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        return {NETWORKS: Sum(weighted=self.weighting == "samples")} if self.forgettable else {}

    def check(self, experiment: Experiment) -> None:
        check_objective(experiment, self, self.default_objective)
        experiment.common_architecture()
        if not self.forgettable:
            self._check_stored(experiment)
        if experiment.federation.secure_aggregation and self.weighting == "samples":
            raise UserError("federation.secure_aggregation: masked sums have no sample counts; set strategy.weighting=equal")

    def _check_stored(self, experiment: Experiment) -> None:
        if self.reads_contributions:
            name = experiment.config.strategy["name"]
            raise UserError(f"strategy.forgettable: strategy {name} needs the sites' contributions; leave it true")
        if experiment.standardise == SITES:
            raise UserError(f"{STANDARDISE}: '{SITES}' (the default for tables) stores sums of each site, so it needs "
                            f"strategy.forgettable=true; or set {STANDARDISE}=none")  # fmt: skip
        if experiment.federation.history == "all":
            raise UserError("federation.history: 'all' stores contributions, but strategy.forgettable=false stores none")

    def warnings(self, experiment: Experiment) -> list[str]:
        """Warn if the mean of BatchNorm statistics may fit no site, if the aggregate lacks them, or of refused sums."""
        refused = may_be_refused(experiment.config, experiment.training.schedule) if self.forgettable else []
        if experiment.objective.batchnorm != OWN:  # type: ignore[attr-defined]
            return [*refused, *([MEAN_OF_NORMS] if differing_classes(experiment) and norms(_network(experiment)) else [])]
        if experiment.evaluation.where == "sites":
            return refused
        return [*refused,
                "objective.batchnorm=own: the aggregate's BatchNorm keeps its initial values. Set evaluation.where=sites to "
                "measure each site's network, or evaluation.statistics=batch to measure the aggregate"]  # fmt: skip

    def begin(self, context: RoundContext) -> None:
        parameters = parameters_of(context.experiment)
        context.save_server_state(NETWORK, context.initial(exact=True))
        for name in self.memory:
            context.save_server_state(
                name,
                {key: self.initial_memory(name, tensor) for key, tensor in context.initial().items() if key in parameters},
            )
        context.save_server_state(ROUND, number_state(0))

    def initial_memory(self, name: str, like: Tensor) -> Tensor:
        """Return the first value of a tensor in the saved state `name` (one of `memory`), with the shape of `like`."""
        return torch.zeros_like(like)

    def round(self, context: RoundContext) -> None:
        states = self.next_state(context)
        if context.restoration and context.restoration.back:
            states = self._moved_back(context, states[NETWORK], context.restoration.back)
        for name, state in states.items():
            context.save_server_state(name, state)
        context.save_server_state(ROUND, number_state(context.number))
        sent = {**states[NETWORK], **self.extra_broadcast(context)}
        own = states[NETWORK].keys() - shared(context.experiment, states[NETWORK]).keys()
        like = {name: tensor for name, tensor in sent.items() if name not in own}
        sent_records = {MEAN: sent, **self.extra_records(context)}
        if self.forgettable:
            context.gather(TRAIN, sent_records, {SITE: RecordSpec(like, slot=NETWORKS)}, self.trainees(context))
        else:
            counted = SAMPLES if self.weighting == "samples" else ONCE
            means = context.gather(TRAIN, sent_records, {SITE: RecordSpec(like, mean=counted)}, self.trainees(context))
            context.save_server_state(ROUND_MEAN, means[SITE])

    def no_restoration(self, experiment: Experiment) -> str:
        return self.unrestorable

    def _moved_back(self, context: RoundContext, network: State, share: float) -> dict[str, State]:
        """Return the network, moved by a share of the way to the initial one, and each memory as in the first round."""
        initial, parameters = context.initial(exact=True), parameters_of(context.experiment)
        begun = {key: tensor for key, tensor in initial.items() if key in parameters}
        memories = {name: {key: self.initial_memory(name, tensor) for key, tensor in begun.items()} for name in self.memory}
        return {NETWORK: moved_back(network, initial, share), **memories}

    def trainees(self, context: RoundContext) -> Sequence[Site]:
        """Return the participants that train in this round: all. A subclass may ask them something first, and choose."""
        return context.participants

    def extra_records(self, context: RoundContext) -> dict[str, State]:
        """Return further records to send with the network, by name. Sites do not send these back."""
        return {}

    def extra_broadcast(self, context: RoundContext) -> State:
        """Return further tensors to send with the network, by name. Sites send back tensors with the same names."""
        return {}

    def next_state(self, view: View) -> dict[str, State]:
        """Return the state with which the next round begins: the network and each memory, by name."""
        last = {name: view.server_state(name) for name in (NETWORK, *self.memory)}
        mean = self._mean(view)
        return self.step(last, mean, parameters_of(view.experiment)) if mean is not None else last

    def _mean(self, view: View) -> State | None:
        """Return the mean of the networks of the last round; None before the first round."""
        if not self.forgettable:
            return view.server_state(ROUND_MEAN) if ROUND_MEAN in view.slots.keeps() else None
        total = counted(view).total(NETWORKS)
        return total.mean() if total.addends else None

    def step(self, last: Mapping[str, State], mean: State, parameters: frozenset[str]) -> dict[str, State]:
        """Return the network and each memory after a round, by name. By default the mean becomes the network.

        Args:
            last: The network and each memory at the start of the round, by name.
            mean: The mean of the networks that the sites sent.
            parameters: The names of the network's trainable tensors.
        """
        network = last[NETWORK]
        return {**last, NETWORK: {**network, **{name: tensor for name, tensor in mean.items() if name in network}}}

    def models(self, view: View) -> Models:
        return Models({type(self).__name__.lower(): lambda: Model(view.architecture(), self.next_state(view)[NETWORK])})

    def residue(self, view: View, names: tuple[str, ...] = ()) -> list[ResidualInfluence]:  # pyright: ignore
        """Return no traces after the first round, in which sites start from an untrained network."""
        if not self.forgettable:
            reason = "no contributions are stored, so none can be subtracted"
            return [ResidualInfluence("the server's network, and the other sites' networks", reason)]
        if view.rounds_with(names) < 2:
            return []
        reason = "they were trained from networks that include the forgotten sites; subtraction does not change them"
        traces = [ResidualInfluence("the other sites' networks", reason)]
        if self.memory:
            origin = "computed from all rounds before the last one, in which the forgotten sites participated"
            places = f"the server's {' and '.join(self.memory)}, and the network that the last round began with"
            traces.append(ResidualInfluence(places, f"they are {origin}; only the last step is repeated"))
        return traces


def counted(view: View) -> View:
    """Return the view without sites that did not answer in the last round.

    Under masks it holds all sites with their last contributions, because no other sum is known.
    """
    if view.config.federation.secure_aggregation:
        return view
    last = int(view.server_state(ROUND)["number"])
    names = [site.name for site in view.sites if last and view.last_put(site.name) == last]
    return view if len(names) == len(view.sites) else view.subset(names)


def check_steps(experiment: Experiment) -> None:
    """Refuse training whose change is not a known weighted sum of gradients, as SCAFFOLD and FedNova need.

    Raises:
        UserError: The optimiser, rate or clipping does not fit.
    """
    name = experiment.config.strategy["name"]
    if momentum_of(experiment.training) is None:
        raise UserError(f"training.optimizer: strategy {name} takes sgd, with or without momentum, but without dampening, "
                        "nesterov or maximize")  # fmt: skip
    if not experiment.training.rate:
        raise UserError(f"training.rate: got 0, but strategy {name} needs a rate above 0")
    if experiment.training.clip:
        raise UserError(f"training.clip: strategy {name} divides a site's change by the weights of its gradients, and "
                        "clipping would alter these weights; set it to 0")  # fmt: skip


def shared(experiment: Experiment, state: State) -> State:
    """Return the tensors of a network's `state` that are averaged over the sites."""
    objective = experiment.objective
    assert isinstance(objective, Averaged)
    return objective.shared(_network(experiment), state)


@functools.lru_cache(maxsize=4)
def _network(experiment: Experiment) -> nn.Module:
    return experiment.architecture().build()


@functools.lru_cache(maxsize=4)
def parameters_of(experiment: Experiment) -> frozenset[str]:
    """Return the names of the trainable tensors of the configured network."""
    return frozenset(name for name, weight in _network(experiment).named_parameters() if weight.requires_grad)


def differing_classes(experiment: Experiment) -> bool:
    """Return whether, by the configuration, sites have very different shares of the classes."""
    specs = [(site.spec, site.parts) for site in experiment.sites]
    uneven = any(parts > 1 and (spec.partition.name == "classes" or
                                (spec.partition.name == "dirichlet" and spec.partition.alpha < UNEVEN))
                 for spec, parts in specs)  # fmt: skip
    return uneven or len({tuple(sorted(spec.classes)) for spec, _ in specs}) > 1


def number_state(round: int) -> State:
    """Return the number of a round as a state."""
    return {"number": torch.tensor(round)}
