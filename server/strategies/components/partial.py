"""Methods that average a part of all sites' networks, while the rest stays at the sites: FedPer, LG-FedAvg, FedRep,
FedBABU.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.components.sharing import EXTRACTOR, HEAD, Sharing
from fedloom.clients.protocol.messages import MEAN, SITE, TRAIN
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import View
from fedloom.server.strategies.by_architecture import cast, counted, representable
from fedloom.server.strategies.components.recombination import Recombining, check_outputs, components_of

SITES, SHARED = "parts", "shared"  # the slot; the saved mean


@dataclass(frozen=True)
class PartialAveraging(Recombining):
    """The mean of one part of all networks, weighted by images. The objective's mode sets the part.

    The mode also sets the order in which a site trains its parts (clients.objectives.components.sharing). If the mode
    averages no part, every site trains by itself.
    """

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        return (
            {SITES: Sum(weighted=True), **super().slots(experiment)}
            if _sharing(experiment).averaged
            else super().slots(experiment)
        )

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        if HEAD in _sharing(experiment).averaged:
            check_outputs(experiment)
        first = experiment.architecture(experiment.sites[0])
        for site in experiment.sites:
            if EXTRACTOR in _sharing(experiment).averaged and experiment.architecture(site).network != first.network:
                method = f"objective.mode={components_of(experiment).mode} averages extractors"
                raise UserError(f"{method}, but the networks of {site.name} and {experiment.sites[0].name} differ")

    def begin(self, context: RoundContext) -> None:
        part = self.sent(context)
        context.save_server_state(SHARED, representable(part, context.bits) if part else {})

    def train(self, context: RoundContext) -> None:
        shared = context.server_state(SHARED)
        sent, expected = ({MEAN: shared}, {SITE: RecordSpec(shared)}) if shared else ({}, {})
        for reply in context.ask(TRAIN, sent, expected):
            self.mark(context, reply.site)
            if shared:
                context.put(SITES, reply.site, reply[SITE], reply.samples)

    def recompute_derived(self, context: RoundContext) -> None:
        super().recompute_derived(context)
        if SITES in context.slots.totals and context.total(SITES).addends:
            context.save_server_state(SHARED, cast(counted(context).mean(SITES), context.server_state(SHARED)))

    def sent(self, view: View) -> State:
        return _sharing(view.experiment).part(view.initial(site=view.sites[0]))


def _sharing(experiment: Experiment) -> Sharing:
    return components_of(experiment).sharing
