"""The baseline of arithmetic: one network travels from site to site, and each site trains it further."""

from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.clients.networks import Model
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.local import FORWARD
from fedloom.clients.protocol.messages import MEAN, SITE, TRAIN
from fedloom.fusion.arithmetic import to_state
from fedloom.fusion.exact import quantise
from fedloom.fusion.state import State
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import OneByOne, Schedule
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.base import ResidualInfluence, Strategy

THETA = "shared"  # the ledger's name for the network's state


@dataclass(frozen=True)
class Sequential(Strategy):
    """One network, trained for all rounds at one site, then for all rounds at the next.

    A site's round numbers, batches and rates are the same as if it trained alone.
    """

    def schedule(self, experiment: Experiment) -> Schedule:
        """Return the roster's order, or the reverse."""
        sites = experiment.sites
        return OneByOne(sites if experiment.objective.mode == FORWARD else sites[::-1], experiment.rounds)

    def begin(self, context: RoundContext) -> None:
        context.save_server_state(THETA, quantise(context.initial(), context.bits))

    def round(self, context: RoundContext) -> None:
        sent = _network(context)
        for reply in context.ask(TRAIN, {MEAN: sent}, {SITE: RecordSpec(sent)}):
            context.save_server_state(THETA, dict(reply.integers[SITE]))

    def models(self, view: View) -> Models:
        return Models({view.experiment.objective.mode: lambda: Model(view.architecture(), _network(view))})

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        return [
            ResidualInfluence("the network", "it was trained at one site after the other; no site's part can be subtracted")
        ]


def _network(view: View) -> State:
    return to_state(view.server_state(THETA), view.initial(), view.bits)
