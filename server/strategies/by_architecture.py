"""Base of methods for sites with different networks: a slot and a network for each architecture.

A method defines how the networks of all architectures follow from the sites' networks (`combined`). Sums are weighted by
the sites' numbers of images. If a round asks only some sites, only those of the last round count, as in the published
rules.
"""

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from fedloom.clients.networks import Model
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.heterogeneous import ALONE, EXCLUSIVE
from fedloom.clients.protocol.messages import MEAN, SITE, TRAIN
from fedloom.conf.errors import UserError
from fedloom.conf.sites import Site
from fedloom.fusion.exact import dequantise, quantise
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.architectures import Group, group_by_site, groups_of, reference_of
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence, Strategy, check_objective


@dataclass(frozen=True)
class Averaged:
    """The weighted mean network of one architecture. `weight`: the number of images of its sites."""

    group: Group
    state: State
    weight: float


@dataclass(frozen=True)
class ByArchitecture(Strategy):
    """A method for sites with different networks. Subclasses define `combined`.

    Modes of the objective that do not combine architectures are its baselines.
    """

    default_objective: ClassVar[str] = "heterogeneous"

    def resolve(self, experiment: Experiment) -> Strategy:
        """Return the baseline that the objective's mode names, or this strategy."""
        return baseline(experiment) or self

    def check(self, experiment: Experiment) -> None:
        check_objective(experiment, self, "heterogeneous")
        groups = [group.name for group in groups_of(experiment)]
        if taken := next((site.name for site in experiment.sites if site.name in groups), ""):
            raise UserError(f"sites: '{taken}' is the name of an architecture in the results; give the site another one")

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """Return a weighted sum of networks for each architecture, by its name."""
        return {group.name: Sum(weighted=True, resumable=True) for group in groups_of(experiment)}

    def begin(self, context: RoundContext) -> None:
        for name, state in self.initial_states(context).items():
            context.save_server_state(network_key(name), representable(state, context.bits))

    def round(self, context: RoundContext) -> None:
        """Send every site the network of its architecture, and store the networks that sites return."""
        groups = group_by_site(context.experiment)
        sent = {group.name: context.server_state(network_key(group.name)) for group in groups_of(context.experiment)}

        def content(site: Site) -> dict[str, State]:
            return {MEAN: sent[groups[site.name].name]}

        for reply in context.ask(TRAIN, content, lambda site: {SITE: RecordSpec(sent[groups[site.name].name])}):
            context.put(groups[reply.site.name].name, reply.site, reply[SITE], reply.samples)

    def recompute_derived(self, context: RoundContext) -> None:
        for name, state in self._combined(context).items():
            context.save_server_state(network_key(name), state)

    def models(self, view: View) -> Models:
        """Return the networks of all architectures, the reference's first, and each site's own network."""
        networks = functools.lru_cache(maxsize=1)(lambda: self._combined(view))

        def shared(group: Group) -> Model:
            state = {} if view.whole else networks().get(group.name, {})
            return Model(group.architecture, state or view.server_state(network_key(group.name)))

        def own(site: Site) -> Model:
            group = group_by_site(view.experiment)[site.name]
            return Model(
                group.architecture,
                cast(view.contribution(group.name, site.name), view.server_state(network_key(group.name))),
            )

        first = reference_of(view.experiment, self.reference_name)
        groups = [first, *(group for group in groups_of(view.experiment) if group is not first)]
        makers: dict[str, Callable[[], Model]] = {group.name: functools.partial(shared, group) for group in groups}
        return Models(makers | {site.name: functools.partial(own, site) for site in view.sites if has(view, site)})

    @property
    def reference_name(self) -> str:
        """The name of the aggregate's architecture. Empty: the deepest one."""
        return ""

    def initial_states(self, context: RoundContext) -> Mapping[str, State]:
        """Return the first network of each architecture, by its name."""
        return {group.name: context.initial(site=group.site) for group in groups_of(context.experiment)}

    @abstractmethod
    def combined(self, view: View) -> Mapping[str, State]:
        """Compute the next network of each architecture from the sites' contributions.

        Args:
            view: The slots. It may lack sites.

        Returns:
            States by the architectures' names. An architecture without contributions may be missing.
        """

    def _combined(self, view: View) -> Mapping[str, State]:
        """Return `combined`, with the initial network for architectures that no remaining site has trained."""
        states = dict(self.combined(view))
        for group in groups_of(view.experiment):
            if group.name not in states and not view.total(group.name).addends:
                states[group.name] = representable(view.initial(site=group.site), view.bits)
        return states

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        if view.rounds_with(names) < 2:
            return ()  # the others started from untrained networks
        reason = "after round 1 they start from networks that include the forgotten sites"
        return (ResidualInfluence("other sites' networks, of all architectures", reason),)


def baseline(experiment: Experiment) -> Strategy | None:
    """Return the baseline (`exclusive` or `alone`) that the objective's mode names, or None for other modes."""
    mode = experiment.objective.mode
    return STRATEGIES.get(mode)() if mode in (EXCLUSIVE, ALONE) else None


def network_key(group: str) -> str:
    """Return the name under which the server saves the network of the architecture `group`."""
    return f"shared.{group}"


def has(view: View, site: Site) -> bool:
    """Return whether a site has contributed a network."""
    return view.has(group_by_site(view.experiment)[site.name].name, site.name)


def averaged(view: View, fresh: bool = False) -> list[Averaged]:
    """Return the mean network of each architecture with contributions.

    Only contributions of the last round count if a round does not ask all sites, or if `fresh` is true.
    """
    counting, means = counted(view, fresh), []
    for group in groups_of(view.experiment):
        total = counting.total(group.name)
        if total.addends:
            state = cast(total.mean(), view.server_state(network_key(group.name)))
            means.append(Averaged(group, state, float(total.addends)))
    return means


def counted(view: View, fresh: bool = False) -> View:
    """Return the view that `averaged` reads: all sites, or those of the last round."""
    if view.config.federation.fraction >= 1.0 and not fresh:
        return view
    rounds = {site.name: view.last_put(site.name) for site in view.sites}
    last = max(rounds.values(), default=0)
    return view.subset([name for name, number in rounds.items() if number == last])


def representable(state: State, bits: int) -> State:
    """Return a state rounded to the units of exact sums, 2**-bits."""
    return cast(dequantise(quantise(state, bits), bits), state)


def cast(state: State, like: Mapping[str, object]) -> State:
    """Return `state` with the tensor types of `like`. Values are rounded where the type is whole numbers."""
    types = {name: tensor.dtype for name, tensor in like.items()}  # pyright: ignore[reportAttributeAccessIssue]
    return {name: tensor.to(types[name]) if types[name].is_floating_point else tensor.round().to(types[name])
            for name, tensor in state.items()}  # fmt: skip
