"""Baselines of methods for different networks: averages within each architecture, and no averages."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedloom.clients.objectives.heterogeneous import ALONE, EXCLUSIVE, FUSED
from fedloom.clients.protocol.messages import SITE, TRAIN
from fedloom.fusion.state import State
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.architectures import group_by_site, groups_of
from fedloom.server.strategies.base import STRATEGIES
from fedloom.server.strategies.by_architecture import ByArchitecture, averaged, has, network_key


@STRATEGIES.register("exclusive")
@dataclass(frozen=True)
class Exclusive(ByArchitecture):
    """FedAvg (McMahan et al. 2017, Alg. 1) among the sites with one architecture: sum n_k w_k / sum n_k."""

    @classmethod
    def listed_as(cls, mode: str) -> str:
        return EXCLUSIVE if mode == FUSED else mode

    def combined(self, view: View) -> Mapping[str, State]:
        return {mean.group.name: mean.state for mean in averaged(view)}


@STRATEGIES.register("alone")
@dataclass(frozen=True)
class Alone(ByArchitecture):
    """Every site trains its own network, from its own start, without any exchange."""

    @classmethod
    def listed_as(cls, mode: str) -> str:
        return ALONE if mode == FUSED else mode

    def round(self, context: RoundContext) -> None:
        ask_alone(context)

    def combined(self, view: View) -> Mapping[str, State]:
        """Return nothing: no network is shared."""
        return {}

    def models(self, view: View) -> Models:
        models = super().models(view)
        return Models({site.name: lambda name=site.name: models[name] for site in view.sites if has(view, site)})


def ask_alone(context: RoundContext) -> None:
    """Run a round in which sites receive nothing, and store the networks that they return."""
    groups = group_by_site(context.experiment)
    like = {group.name: context.server_state(network_key(group.name)) for group in groups_of(context.experiment)}
    for reply in context.ask(TRAIN, {}, lambda site: {SITE: RecordSpec(like[groups[site.name].name], bounded=False)}):
        context.put(groups[reply.site.name].name, reply.site, reply[SITE], reply.samples)
