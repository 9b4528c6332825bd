"""FedProto (Tan et al. 2022): only prototypes of classes travel, so that every site may have whatever network it likes."""

import functools
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedloom.clients.networks import Architecture
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.fedproto import COUNTS, KNOWN, MEANS, PROTOTYPES, SUMS, check_prototypes
from fedloom.clients.protocol.messages import TRAIN
from fedloom.conf.errors import UserError
from fedloom.conf.sites import Site
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.architectures import groups_of
from fedloom.server.strategies.base import STRATEGIES, Strategy, check_objective
from fedloom.server.strategies.by_architecture import baseline


@STRATEGIES.register("fedproto")
@dataclass(frozen=True)
class FedProto(Strategy):
    """A class's prototype is the mean feature over all sites' images of it (Eq. 6, weighted by images). The objective is
    `fedproto`; networks need features of one width. There is no aggregate: sites' own networks are measured at the sites."""

    default_objective: ClassVar[str] = "fedproto"

    def resolve(self, experiment: Experiment) -> Strategy:
        """Itself, or a baseline."""
        return baseline(experiment) or self

    def slots(self, experiment: Experiment) -> dict[str, Slot]:
        """Sums over the sites' images, by class: features, and images."""
        return {PROTOTYPES: Sum(weighted=True)}

    def check(self, experiment: Experiment) -> None:
        """UserError for another objective, and for networks whose features, or classes, are not as many."""
        check_objective(experiment, "fedproto")
        first, *others = groups_of(experiment)
        for one in others:
            if (ours := _shape(one.architecture)) != (theirs := _shape(first.architecture)):
                told = f"{one.name} has {ours[0]} outputs of {ours[1]} features, {first.name} {theirs[0]} of {theirs[1]}"
                raise UserError(f"network: strategy fedproto takes features and outputs that all sites share; {told}")

    def begin(self, context: RoundContext) -> None:
        """Nothing is known yet."""

    def round(self, context: RoundContext) -> None:
        """Send all prototypes; when the sites have trained, ask for theirs."""
        classes, features = _shape(groups_of(context.experiment)[0].architecture)
        like = {SUMS: torch.zeros(classes, features), COUNTS: torch.zeros(classes)}
        samples = {reply.site.name: reply.samples for reply in context.ask(TRAIN, self.prototypes(context), {})}
        trained = [site for site in context.participants if site.name in samples]
        largest = context.config.federation.largest_weight

        def expected(site: Site) -> dict[str, RecordSpec]:
            check = functools.partial(check_prototypes, samples=samples[site.name], largest=largest)
            return {PROTOTYPES: RecordSpec(like, bounded=False, check=check)}

        for reply in context.ask(PROTOTYPES, {}, expected, trained):
            context.put(PROTOTYPES, reply.site, reply[PROTOTYPES], samples[reply.site.name])

    def prototypes(self, view: View) -> dict[str, State]:
        """The record of all that are known; none before the first round."""
        if not view.total(PROTOTYPES).addends:
            return {}
        mean = view.mean(PROTOTYPES)
        known = mean[COUNTS] > 0
        means = mean[SUMS] / torch.where(known, mean[COUNTS], 1.0)[:, None]
        return {PROTOTYPES: {MEANS: means, KNOWN: known.float()}}

    def models(self, view: View) -> Models:
        """None at the server."""
        return Models({})


def _shape(architecture: Architecture) -> tuple[int, int]:
    """Outputs and features. UserError for a network without a linear head."""
    weight = architecture.build().state_dict().get("head.weight")
    if weight is None or weight.ndim != 2:
        raise UserError(f"network: strategy fedproto takes a linear head, '{architecture.options['name']}' has none")
    return weight.shape[0], weight.shape[1]
