"""FedAvg, and what averaging methods have in common: sites train the network that the server sends, and a mean comes back.

What is kept is what the last round began with; what the next one begins with follows from that and from what the sites put
(`next_state`). So the last step of the server is made again, without it, when a site is forgotten.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fedloom.clients.networks import Model
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.averaging import OWN, Averaged, norms
from fedloom.clients.objectives.steps import momentum_of
from fedloom.clients.protocol.messages import MEAN, SITE, TRAIN
from fedloom.conf.errors import UserError
from fedloom.conf.renamed import OF_AVERAGING, refuse_renamed
from fedloom.conf.sites import Site
from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence, Strategy, check_objective

NETWORKS = "networks"  # the slot
NETWORK = "network"  # what is kept of it: as the last round began with it
ROUND = "round"  # which round that was
UNEVEN = 1.0  # alpha of a Dirichlet distribution below which most sites lack most of some classes
MEAN_OF_NORMS = (
    "network: it has BatchNorm, and sites have different classes, which the mean of their statistics may not fit; compare "
    "network.norm=group (where the network has that option), or objective.batchnorm=own with evaluation.where=sites"
)


@dataclass(frozen=True)
class Averaging(Strategy):
    """A method whose server makes the next network of the last one and of a mean over the sites that answered."""

    default_objective: ClassVar[str] = "fedavg"

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        refuse_renamed(cls, OF_AVERAGING)

    memory: ClassVar[tuple[str, ...]] = ()  # states of the parameters' shapes, kept beside the network

    weighting: str = option(
        "samples", "how sites count in the mean: by their images, or alike", choices=("samples", "equal")
    )

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """What the sites sent last: of the whole network all that is no whole number."""
        return {NETWORKS: Sum(weighted=self.weighting == "samples")}

    def check(self, experiment: Experiment) -> None:
        """UserError for another objective, for several architectures, and for weights that masks would have to hide."""
        check_objective(experiment, self.default_objective)
        needed = experiment.objective.requires_strategy  # type: ignore[attr-defined]
        if needed and not isinstance(self, STRATEGIES.get(needed)):
            name = experiment.config.objective["name"]
            raise UserError(f"objective.name: sites of {name} need what strategy.name={needed} sends; take both")
        experiment.common_architecture()
        if experiment.federation.secure_aggregation and self.weighting == "samples":
            raise UserError("federation.secure_aggregation: sums under masks count no samples; set strategy.weighting=equal")

    def warnings(self, experiment: Experiment) -> list[str]:
        """That an aggregate without BatchNorm is measured otherwise, and that a mean of BatchNorms may fit no site."""
        if experiment.objective.batchnorm != OWN:  # type: ignore[attr-defined]
            return [MEAN_OF_NORMS] if differing_classes(experiment) and norms(_network(experiment)) else []
        if experiment.evaluation.where == "sites":
            return []
        return ["objective.batchnorm=own: the aggregate's BatchNorm stays as it began; each site's network is measured "
                "with evaluation.where=sites, the aggregate with evaluation.statistics=batch"]  # fmt: skip

    def begin(self, context: RoundContext) -> None:
        """The network starts at theta_0."""
        parameters = parameters_of(context.experiment)
        context.save_server_state(NETWORK, context.initial())
        for name in self.memory:
            context.save_server_state(
                name, {key: self.initial_memory(name, one) for key, one in context.initial().items() if key in parameters}
            )
        context.save_server_state(ROUND, _number(0))

    def initial_memory(self, name: str, like: Tensor) -> Tensor:
        """How a tensor of the memory of this name begins."""
        return torch.zeros_like(like)

    def round(self, context: RoundContext) -> None:
        """Send the network; put what the sites make of it."""
        now = self.next_state(context)
        for name, state in now.items():
            context.save_server_state(name, state)
        context.save_server_state(ROUND, _number(context.number))
        sent = {**now[NETWORK], **self.extra_broadcast(context)}
        own = now[NETWORK].keys() - shared(context.experiment, now[NETWORK]).keys()
        like = {name: one for name, one in sent.items() if name not in own}
        sent_records = {MEAN: sent, **self.extra_records(context)}
        context.gather(TRAIN, sent_records, {SITE: RecordSpec(like, slot=NETWORKS)}, self.trainees(context))

    def trainees(self, context: RoundContext) -> Sequence[Site]:
        """Who of the participants trains; a method may ask them something first."""
        return context.participants

    def extra_records(self, context: RoundContext) -> dict[str, State]:
        """Records that are sent beside the network, of which nothing comes back."""
        return {}

    def extra_broadcast(self, context: RoundContext) -> State:
        """What is sent beside the network; sites answer with the same names."""
        return {}

    def next_state(self, view: View) -> dict[str, State]:
        """What the next round begins with, by name of what is kept."""
        last = {name: view.server_state(name) for name in (NETWORK, *self.memory)}
        total = counted(view).total(NETWORKS)
        return self.step(last, total.mean(), parameters_of(view.experiment)) if total.addends else last

    def step(self, last: Mapping[str, State], mean: State, parameters: frozenset[str]) -> dict[str, State]:
        """What is kept after a round, of what it began with and the mean of what the sites sent. The network becomes it."""
        network = last[NETWORK]
        return {**last, NETWORK: {**network, **{name: one for name, one in mean.items() if name in network}}}

    def models(self, view: View) -> Models:
        """The network, under the method's name."""
        return Models({type(self).__name__.lower(): lambda: Model(view.architecture(), self.next_state(view)[NETWORK])})

    def residue(self, view: View, names: tuple[str, ...] = ()) -> list[ResidualInfluence]:  # pyright: ignore
        """What the last round began with, and what all made of it: none in the first one, which began with theta_0."""
        if view.rounds_with(names) < 2:
            return []
        why = "they were trained from networks in which those of the forgotten sites were; subtraction does not change them"
        found = [ResidualInfluence("the other sites' networks", why)]
        if self.memory:
            told = "made of all rounds before the last one, in which the forgotten sites took part"
            kept = f"the server's {' and '.join(self.memory)}, and the network that the last round began with"
            found.append(ResidualInfluence(kept, f"they are {told}; only the last step is made again without them"))
        return found


def counted(view: View) -> View:
    """The sites that answered in the last round. Under masks all count with what they sent last: no other sum is known."""
    if view.config.federation.secure_aggregation:
        return view
    last = int(view.server_state(ROUND)["number"])
    names = [site.name for site in view.sites if last and view.last_put(site.name) == last]
    return view if len(names) == len(view.sites) else view.subset(names)


def check_steps(experiment: Experiment) -> None:
    """UserError for sites whose change is no known sum of gradients: it is divided by the weights of that sum."""
    name = experiment.config.strategy["name"]
    if momentum_of(experiment.training) is None:
        raise UserError(f"training.optimizer: strategy {name} takes sgd, with momentum or without (no dampening, nesterov "
                        "or maximize)")  # fmt: skip
    if not experiment.training.rate:
        raise UserError(f"training.rate: got 0, strategy {name} takes more")
    if experiment.training.clip:
        raise UserError(f"training.clip: strategy {name} divides a site's change by the weights of its gradients, of which "
                        "clipped ones have others; set it to 0")  # fmt: skip


def shared(experiment: Experiment, state: State) -> State:
    """Of a network's state, what the sites average."""
    objective = experiment.objective
    assert isinstance(objective, Averaged)
    return objective.shared(_network(experiment), state)


@functools.lru_cache(maxsize=4)
def _network(experiment: Experiment) -> nn.Module:
    return experiment.architecture().build()


@functools.lru_cache(maxsize=4)
def parameters_of(experiment: Experiment) -> frozenset[str]:
    return frozenset(name for name, _ in _network(experiment).named_parameters())


def differing_classes(experiment: Experiment) -> bool:
    """Whether the configuration says that sites have very different shares of the classes."""
    specs = [(site.spec, site.parts) for site in experiment.sites]
    uneven = any(parts > 1 and (spec.partition.name == "classes" or
                                (spec.partition.name == "dirichlet" and spec.partition.alpha < UNEVEN))
                 for spec, parts in specs)  # fmt: skip
    return uneven or len({tuple(sorted(spec.classes)) for spec, _ in specs}) > 1


def _number(round: int) -> State:
    return {"number": torch.tensor(round)}
