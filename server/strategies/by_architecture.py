"""What methods for sites of different networks have in common: a slot for each architecture, and a network for each.

A method says how the networks of all architectures follow from the sites' (`combined`). Sums are weighted by the sites'
numbers of images. Where only some sites are asked in a round, those asked last count, as in the published rules.
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
    """The weighted mean of the networks of one architecture, and its weight: the number of images behind it."""

    group: Group
    state: State
    weight: float


@dataclass(frozen=True)
class ByArchitecture(Strategy):
    """A method for sites of different networks. Its baselines are the modes of the objective that bring none together."""

    default_objective: ClassVar[str] = "heterogeneous"

    def resolve(self, experiment: Experiment) -> Strategy:
        """Itself, or the baseline."""
        return baseline(experiment) or self

    def check(self, experiment: Experiment) -> None:
        """UserError for another objective, and for a site that has the name of an architecture."""
        check_objective(experiment, "heterogeneous")
        groups = [group.name for group in groups_of(experiment)]
        if odd := next((site.name for site in experiment.sites if site.name in groups), ""):
            raise UserError(f"sites: '{odd}' is the name of an architecture in the results; give the site another one")

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """The sites' networks, by architecture."""
        return {group.name: Sum(weighted=True, resumable=True) for group in groups_of(experiment)}

    def begin(self, context: RoundContext) -> None:
        """What the networks of each architecture start from."""
        for name, state in self.initial_states(context).items():
            context.save_server_state(kept(name), _rounded(state, context.bits))

    def round(self, context: RoundContext) -> None:
        """Send every site its architecture's network; put what it makes of it."""
        groups = group_by_site(context.experiment)
        sent = {group.name: context.server_state(kept(group.name)) for group in groups_of(context.experiment)}

        def content(site: Site) -> dict[str, State]:
            return {MEAN: sent[groups[site.name].name]}

        for reply in context.ask(TRAIN, content, lambda site: {SITE: RecordSpec(sent[groups[site.name].name])}):
            context.put(groups[reply.site.name].name, reply.site, reply[SITE], reply.samples)

    def recompute_derived(self, context: RoundContext) -> None:
        """The architectures' networks, from what the sites put."""
        for name, state in self._combined(context).items():
            context.save_server_state(kept(name), state)

    def models(self, view: View) -> Models:
        """The networks of all architectures, the reference's first; each site's own."""
        found = functools.lru_cache(maxsize=1)(lambda: self._combined(view))

        def shared(group: Group) -> Model:
            state = {} if view.whole else found().get(group.name, {})
            return Model(group.architecture, state or view.server_state(kept(group.name)))

        def own(site: Site) -> Model:
            group = group_by_site(view.experiment)[site.name]
            return Model(
                group.architecture, cast(view.contribution(group.name, site.name), view.server_state(kept(group.name)))
            )

        first = reference_of(view.experiment, self.reference_name)
        groups = [first, *(group for group in groups_of(view.experiment) if group is not first)]
        makers: dict[str, Callable[[], Model]] = {group.name: functools.partial(shared, group) for group in groups}
        return Models(makers | {site.name: functools.partial(own, site) for site in view.sites if has(view, site)})

    @property
    def reference_name(self) -> str:
        """The architecture that counts as the aggregate's; empty: the deepest."""
        return ""

    def initial_states(self, context: RoundContext) -> Mapping[str, State]:
        """By architecture, what its first networks are."""
        return {group.name: context.initial(site=group.site) for group in groups_of(context.experiment)}

    @abstractmethod
    def combined(self, view: View) -> Mapping[str, State]:
        """By architecture, the network that follows from what the sites have put."""

    def _combined(self, view: View) -> Mapping[str, State]:
        """The same; an architecture of which no site's network is left is what it was before all rounds."""
        found = dict(self.combined(view))
        for group in groups_of(view.experiment):
            if group.name not in found and not view.total(group.name).addends:
                found[group.name] = _rounded(view.initial(site=group.site), view.bits)
        return found

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        """The networks of all other sites: what they started from held the forgotten ones."""
        if view.rounds_with(names) < 2:
            return ()  # the others started from networks that have seen no data
        why = "after round 1 they start from networks in which those of the forgotten sites were"
        return (ResidualInfluence("other sites' networks, of all architectures", why),)


def baseline(experiment: Experiment) -> Strategy | None:
    """The strategy of that name, if the objective's mode is one that brings no architectures together."""
    mode = experiment.objective.mode
    return STRATEGIES.get(mode)() if mode in (EXCLUSIVE, ALONE) else None


def kept(group: str) -> str:
    """The name under which an architecture's network is kept."""
    return f"shared.{group}"


def has(view: View, site: Site) -> bool:
    """Whether a site has put its network."""
    return view.has(group_by_site(view.experiment)[site.name].name, site.name)


def averaged(view: View, fresh: bool = False) -> list[Averaged]:
    """The mean of each architecture of which some site has trained: in the last round, if not all are asked in each, or
    `fresh` ones alone count."""
    those, found = counted(view, fresh), []
    for group in groups_of(view.experiment):
        total = those.total(group.name)
        if total.addends:
            state = cast(total.mean(), view.server_state(kept(group.name)))
            found.append(Averaged(group, state, float(total.addends)))
    return found


def counted(view: View, fresh: bool = False) -> View:
    """The sites that count in `averaged`."""
    if view.config.federation.fraction >= 1.0 and not fresh:
        return view
    rounds = {site.name: view.last_put(site.name) for site in view.sites}
    last = max(rounds.values(), default=0)
    return view.subset([name for name, number in rounds.items() if number == last])


def _rounded(state: State, bits: int) -> State:
    """As exact sums hold it."""
    return cast(dequantise(quantise(state, bits), bits), state)


def representable(state: State, bits: int) -> State:
    """A state as exact sums have it: in units of 2**-bits."""
    return cast(dequantise(quantise(state, bits), bits), state)


def cast(state: State, like: Mapping[str, object]) -> State:
    """A mean with the types of a network's tensors: counters are rounded."""
    types = {name: tensor.dtype for name, tensor in like.items()}  # pyright: ignore[reportAttributeAccessIssue]
    return {name: tensor.to(types[name]) if types[name].is_floating_point else tensor.round().to(types[name])
            for name, tensor in state.items()}  # fmt: skip
