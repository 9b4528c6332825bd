"""Fusion of different networks at the server (CLA+OT), round after round: all architectures are kept in one basis.

After *On Cross-Layer Alignment for Model Fusion of Heterogeneous Neural Networks* (CLA+OT): layers of networks of different
depth are aligned, depths balanced by layers that leave the function as it is, and the networks averaged. There this is done
once, with networks trained apart; here sites start from parts of one network, so that layers and channels correspond from
the first round on and no plan has to be found: a round is the mean of the balanced networks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from clients.objectives import objective_of
from clients.objectives.heterogeneous import ALONE, EXCLUSIVE
from conf.schema import Config
from conf.typed import value
from fusion.exact import State
from fusion.submodels import mean_over_holders
from server.rounds.run import Run
from server.rounds.view import View
from server.strategies.base import STRATEGIES, Strategy
from server.strategies.by_architecture import averaged, cast
from server.strategies.exclusive import Alone, Exclusive
from server.strategies.in_parts import REFERENCE, InParts

BASELINES: dict[str, type[Strategy]] = {EXCLUSIVE: Exclusive, ALONE: Alone}


@STRATEGIES.register("cla_ot")
@dataclass(frozen=True)
class ClaOt(InParts):
    """Options of the server's side; the objective is `heterogeneous`."""

    lacking: float = value(
        0.3, "weight with which a layer that a network lacks counts as one that changes nothing", low=0.0, high=1.0
    )
    server_mix: float = value(
        1.0, "share of the fused network in what an architecture goes on from; the rest is its own mean", low=0.0, high=1.0
    )

    def at_work(self, config: Config) -> Strategy:
        """Its baselines bring no architectures together."""
        mode = objective_of(config).mode
        return BASELINES[mode]() if mode in BASELINES else self

    def first_reference(self, run: Run) -> State:
        """Layers that not all have leave the function as it is."""
        state = super().first_reference(run)
        for part in self.parts(run.config).values():
            state |= {name: tensor.clone() for name, tensor in part.neutral.items()}
        return state

    def fused(self, view: View) -> State:
        """The reference as the mean over all architectures, balanced, weighted by images."""
        return mean_over_holders(self.held(view, self.lacking), view.kept(REFERENCE))

    def taken(self, view: View, whole: State) -> Mapping[str, State]:
        """Every architecture's part of the fused network, mixed with its own mean."""
        found = super().taken(view, whole)
        if self.server_mix == 1.0:
            return found
        means = {one.group.name: one.state for one in averaged(view)}
        return {name: self._mixed(state, means[name]) if name in means else state for name, state in found.items()}

    def _mixed(self, fused: State, own: State) -> State:
        mixed = {name: self.server_mix * tensor.double() + (1.0 - self.server_mix) * own[name].double()
                 for name, tensor in fused.items()}  # fmt: skip
        return cast(mixed, fused)
