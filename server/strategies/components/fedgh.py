"""FedGH (Yi et al. 2023, Alg. 1): sites send the mean features of their classes, on which the server trains one head."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.components.sharing import HEAD
from fedloom.clients.objectives.fedproto import COUNTS, PROTOTYPES, SUMS, check_prototypes
from fedloom.clients.objectives.plain import below
from fedloom.clients.protocol.messages import MEAN, TRAIN
from fedloom.conf.sites import Site
from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import PerClientSlot, Slot
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import View
from fedloom.server.strategies.by_architecture import representable
from fedloom.server.strategies.components.recombination import Recombining, check_outputs, feature_shape

GLOBAL = "head"  # the saved head


@dataclass(frozen=True)
class FedGH(Recombining):
    """One head for all sites. Each site replaces its head by the server's and trains it with its extractor."""

    passes: int = option(10, "passes of the server over all mean features, each round", low=1)

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        return {PROTOTYPES: PerClientSlot(), **super().slots(experiment)}

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        check_outputs(experiment)

    def begin(self, context: RoundContext) -> None:
        head = {name: tensor for name, tensor in context.initial(site=context.sites[0]).items() if name.startswith(HEAD)}
        context.save_server_state(GLOBAL, representable(head, context.bits))

    def train(self, context: RoundContext) -> None:
        """Send the head. After the training, ask the sites for their mean features of each class."""
        samples: dict[str, int] = {}
        for reply in context.ask(TRAIN, {MEAN: context.server_state(GLOBAL)}, {}):
            self.mark(context, reply.site)
            samples[reply.site.name] = reply.samples
        architecture, largest = context.architecture(context.sites[0]), context.config.federation.largest_weight
        features = feature_shape(architecture)
        like = {SUMS: torch.zeros(architecture.outputs, *features), COUNTS: torch.zeros(architecture.outputs)}

        def expected(site: Site) -> dict[str, RecordSpec]:
            check = functools.partial(check_prototypes, samples=samples[site.name], largest=largest)
            return {PROTOTYPES: RecordSpec(like, bounded=False, check=check)}

        trained = [site for site in context.participants if site.name in samples]
        for reply in context.ask(PROTOTYPES, {}, expected, trained):
            context.put(PROTOTYPES, reply.site, reply[PROTOTYPES])

    def recompute_derived(self, context: RoundContext) -> None:
        """Train the head further on the mean features of all remaining sites."""
        super().recompute_derived(context)
        if means := [_means(context, site.name) for site in context.sites if context.has(PROTOTYPES, site.name)]:
            features, labels = (torch.cat(parts) for parts in zip(*means, strict=True))
            if len(labels):
                context.save_server_state(GLOBAL, self._trained(context, features, labels))

    def _trained(self, context: RoundContext, features: torch.Tensor, labels: torch.Tensor) -> State:
        head = context.architecture(context.sites[0]).build().head
        head.load_state_dict(below(context.server_state(GLOBAL), HEAD))
        training, weights = replace(context.experiment.training, weight_decay=0.0), list(head.train().parameters())
        step = training.optimizer.bind(weights, training)
        for _ in range(self.passes):
            gradients = torch.autograd.grad(F.cross_entropy(head(features), labels), weights)
            with torch.no_grad():
                step(training.rate, gradients)
        return {HEAD + name: tensor.detach() for name, tensor in head.state_dict().items()}

    def sent(self, view: View) -> State:
        sites = [site.name for site in view.sites if view.has(PROTOTYPES, site.name)]
        return view.contribution(PROTOTYPES, sites[0]) if sites else {}


def _means(view: View, site: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean features of the classes that a site has, and these classes' indices."""
    sums = view.contribution(PROTOTYPES, site)
    has = sums[COUNTS] > 0
    counts = sums[COUNTS][has].view(-1, *[1] * (sums[SUMS].ndim - 1))
    return sums[SUMS][has] / counts, has.nonzero()[:, 0]
