"""DepthFL (Kim et al. 2023): shallow networks are the first blocks of the deepest one, and each block has a classifier."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fedloom.clients.networks.exits import ExitNetwork
from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State
from fedloom.fusion.submodels import Held, Submodel, mean_over_holders
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.view import View
from fedloom.server.strategies.architectures import Group, groups_of, reference_of
from fedloom.server.strategies.base import STRATEGIES, check_objective
from fedloom.server.strategies.by_architecture import ByArchitecture, averaged, network_key
from fedloom.server.strategies.in_parts import REFERENCE


@STRATEGIES.register("depthfl")
@dataclass(frozen=True)
class DepthFL(ByArchitecture):
    """DepthFL (Alg. 1, weighted by images): every parameter becomes the mean over the sites that hold it.

    A parameter without holders does not change. Networks predict with the mean logits of their classifiers. The objective
    is `depthfl`, and networks are `exits` of several depths.
    """

    default_objective: ClassVar[str] = "depthfl"

    def check(self, experiment: Experiment) -> None:
        check_objective(experiment, self, "depthfl")
        super().check(experiment)
        for group in groups_of(experiment):
            if not isinstance(group.architecture.build(), ExitNetwork):
                takes = "{name: exits, of: NETWORK, after: BLOCKS, depth: HOW MANY}"
                raise UserError(f"network: strategy depthfl takes {takes} at every site, but got {group.name}")
            _prefix(reference_of(experiment), group)

    def initial_states(self, context: RoundContext) -> Mapping[str, State]:
        deepest = reference_of(context.experiment)
        context.save_server_state(REFERENCE, state := context.initial(site=deepest.site))
        return {group.name: _prefix(deepest, group).taken(state) for group in groups_of(context.experiment)}

    def recompute_derived(self, context: RoundContext) -> None:
        context.save_server_state(REFERENCE, state := self.whole(context))
        for group in groups_of(context.experiment):
            context.save_server_state(network_key(group.name), _prefix(reference_of(context.experiment), group).taken(state))

    def combined(self, view: View) -> Mapping[str, State]:
        state, deepest = self.whole(view), reference_of(view.experiment)
        return {group.name: _prefix(deepest, group).taken(state) for group in groups_of(view.experiment)}

    def whole(self, view: View) -> State:
        """Return the deepest network: each parameter's mean over its holders."""
        deepest = reference_of(view.experiment)
        held = [Held(_prefix(deepest, mean.group), mean.state, mean.weight) for mean in averaged(view)]
        return mean_over_holders(held, _before(view))


def _before(view: View) -> State:
    """Return the values of tensors that no site holds.

    They keep their values. But if no remaining site has an architecture with the tensor, its initial value returns.
    """
    deepest, state = reference_of(view.experiment), view.server_state(REFERENCE)
    left = [group for group in groups_of(view.experiment) if view.total(group.name).addends]
    if len(left) == len(groups_of(view.experiment)):
        return state
    held, first = {name for group in left for name in _prefix(deepest, group).places}, view.initial(site=deepest.site)
    return {name: tensor if name in held else first[name] for name, tensor in state.items()}


def _prefix(large: Group, small: Group) -> Submodel:
    """Return a network with exits as the first blocks of another. Raise UserError, naming both, if it is not."""
    state, own = large.architecture.build().state_dict(), small.architecture.build().state_dict()
    if lacking := next((name for name in own if name not in state or own[name].shape != state[name].shape), ""):
        raise UserError(f"{small.name} is not a prefix of {large.name}, which has no tensor '{lacking}' of this shape")
    return Submodel({name: (name, (None,) * tensor.ndim) for name, tensor in own.items()}, {})
