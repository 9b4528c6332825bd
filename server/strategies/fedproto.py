"""FedProto (Tan et al. 2022): only class prototypes are sent, so each site can have any network."""

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
    """Class prototypes: the mean feature over all sites' images of a class (Eq. 6, weighted by images).

    The objective is `fedproto`. All networks need features of one width. The server has no network: sites measure their
    own.
    """

    default_objective: ClassVar[str] = "fedproto"

    def resolve(self, experiment: Experiment) -> Strategy:
        return baseline(experiment) or self

    def slots(self, experiment: Experiment) -> dict[str, Slot]:
        """Return a sum over the sites' images, by class: features, and numbers of images."""
        return {PROTOTYPES: Sum(weighted=True)}

    def check(self, experiment: Experiment) -> None:
        check_objective(experiment, self, "fedproto")
        first, *others = groups_of(experiment)
        for one in others:
            if (ours := _shape(one.architecture)) != (theirs := _shape(first.architecture)):
                text = f"{one.name} has {ours[0]} outputs of {ours[1]} features, {first.name} {theirs[0]} of {theirs[1]}"
                raise UserError(f"network: strategy fedproto takes equally many features and outputs at all sites; {text}")

    def begin(self, context: RoundContext) -> None:
        """Save nothing: no prototype is known yet."""

    def round(self, context: RoundContext) -> None:
        """Send all prototypes. After the training, ask the sites for theirs."""
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
        """Return the record of all known prototypes. It is empty before the first round."""
        if not view.total(PROTOTYPES).addends:
            return {}
        mean = view.mean(PROTOTYPES)
        known = mean[COUNTS] > 0
        means = mean[SUMS] / torch.where(known, mean[COUNTS], 1.0)[:, None]
        return {PROTOTYPES: {MEANS: means, KNOWN: known.float()}}

    def models(self, view: View) -> Models:
        """Return no model: the networks are at the sites."""
        return Models({})


def _shape(architecture: Architecture) -> tuple[int, int]:
    """Return the numbers of outputs and of features. Raise UserError for a network without a linear head."""
    weight = architecture.build().state_dict().get("head.weight")
    if weight is None or weight.ndim != 2:
        raise UserError(f"network: strategy fedproto takes a linear head, '{architecture.options['name']}' has none")
    return weight.shape[0], weight.shape[1]
