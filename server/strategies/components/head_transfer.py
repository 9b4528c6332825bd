"""Compatible components (Gygli et al. 2021): sites share small auxiliary heads; extractors and task heads are their own.

Sites that train against the same auxiliary heads learn features that fit all of these, and with them each other's task
heads (Sec. 3). Jointly, the auxiliary heads of a round are the mean over the sites (Sec. 3.4); incrementally, those of the
sites that come first are handed, frozen, to the others.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fedloom.clients.data import class_things
from fedloom.clients.networks import initialise
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.components.auxiliary import Auxiliary
from fedloom.clients.objectives.components.session import AUXILIARY_HEADS, COMMON, FROZEN, NUMBER, START, head_of
from fedloom.clients.objectives.components.sharing import COMPATIBLE, EXTRACTOR
from fedloom.clients.protocol.messages import TRAIN
from fedloom.clients.storage.states import read_state
from fedloom.clients.training.optimizers import SGD
from fedloom.clients.training.recipe import Recipe
from fedloom.conf.errors import UserError, plain
from fedloom.conf.randomness import torch_generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import has_data
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import Participation, Sampling, Schedule
from fedloom.server.rounds.view import View
from fedloom.server.strategies.base import STRATEGIES, Strategy
from fedloom.server.strategies.by_architecture import cast, counted, representable
from fedloom.server.strategies.components.classes import NAMES, Kinds, decoded, encoded
from fedloom.server.strategies.components.fedgh import FedGH
from fedloom.server.strategies.components.partial import PartialAveraging
from fedloom.server.strategies.components.recombination import TRAINED, Recombining, components_of

JOINT, INCREMENTAL = "joint", "incremental"
HEADS = "heads"  # kept: the auxiliary heads that sites are sent
MEAN_OF = "auxiliary"  # slot


@dataclass(frozen=True)
class Arrival(Schedule):
    """The first sites for the first half of the rounds, the others for the second; a site's own rounds count from 1."""

    config: Config
    first_sites: int

    def length(self, rounds: int) -> int:
        return 2 * rounds

    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        late = round > self.config.rounds
        there = [site for site in members if (site.index >= self.first_sites) == late]
        return Sampling(self.config).participation(self.site_round(round), there)

    def site_round(self, round: int) -> int:
        return round - self.config.rounds if round > self.config.rounds else round


@STRATEGIES.register("head_transfer")
@dataclass(frozen=True)
class HeadTransfer(Recombining):
    """Averages auxiliary heads, and keeps a catalogue of the components that sites publish. The objective is `components`,
    whose other modes are other ways to share a part of networks."""

    default_objective: ClassVar[str] = "components"

    scheme: str = option(
        JOINT,
        "all sites at once; or those that come first, and the others with heads that are frozen",
        choices=(JOINT, INCREMENTAL),
    )
    pretrained: list[str] = option([], "files of trained networks; sites start from their extractors, dealt out in turn")
    first_sites: int = option(1, "incremental: how many sites of the roster come first", low=1)

    def resolve(self, experiment: Experiment) -> Strategy:
        """Itself, or what the objective's mode names."""
        objective = components_of(experiment)
        if objective.mode == COMPATIBLE:
            return self
        kind = FedGH if objective.sharing.prototypes else PartialAveraging
        return kind(every=self.every, alike=self.alike)

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """The sites' copies of the auxiliary heads, each counting once; and the catalogue."""
        return {MEAN_OF: Sum(), **super().slots(experiment)}

    def schedule(self, experiment: Experiment) -> Schedule:
        return Arrival(experiment.config, self.first_sites) if self.scheme == INCREMENTAL else Sampling(experiment.config)

    def check(self, experiment: Experiment) -> None:
        """UserError as for all, for unknown tasks, and for DCC without common classes where that is known; or as what is at
        work in its place."""
        if (other := self.resolve(experiment)) is not self:
            other.check(experiment)
        else:
            super().check(experiment)
            self._check_heads(experiment)

    def _check_heads(self, experiment: Experiment) -> None:
        objective = components_of(experiment)
        if self.scheme == INCREMENTAL and self.first_sites >= (count := len(experiment.sites)):
            raise UserError(f"strategy.first_sites: got {self.first_sites}, takes fewer than the {count} sites")
        if objective.same_start and len({experiment.architecture(site) for site in experiment.sites}) > 1:
            raise UserError("objective.same_start: takes one network for all sites; theirs differ")
        for site in experiment.sites if self.pretrained else ():
            self._start(experiment, site)
        check_pull(objective.pull, experiment.training)
        if has_data(experiment.config):
            sites = experiment.sites
            kinds = Kinds.of(experiment, sites, {site.name: class_things(site.spec) for site in sites}, self.alike)
            check_common(objective.tasks, kinds.common())

    def begin(self, context: RoundContext) -> None:
        """Nothing: which classes sites have in common is known when they have enrolled."""

    def train(self, context: RoundContext) -> None:
        """Every site updates its extractor, its head and, unless they are frozen, its copies of the auxiliary heads."""
        kinds = self.kinds(context)
        known, heads = self._common(context, kinds), self._heads(context)
        commons = {site.name: {COMMON: kinds.places(site.name, known), NUMBER: torch.tensor(len(known))}
                   for site in context.participants if site.name in kinds.names}  # fmt: skip
        frozen = {
            site.name for site in context.participants if self.scheme == INCREMENTAL and site.index >= self.first_sites
        }

        def content(site: Site) -> dict[str, State]:
            start = (
                {START: self._start(context.experiment, site)}
                if self.pretrained and not context.has(TRAINED, site.name)
                else {}
            )
            mark = {FROZEN: {FROZEN: torch.ones(1)}} if site.name in frozen else {}
            return {AUXILIARY_HEADS: heads, COMMON: commons[site.name], **mark, **start} if heads else start

        def expected(site: Site) -> dict[str, RecordSpec]:
            return {} if site.name in frozen or not heads else {AUXILIARY_HEADS: RecordSpec(heads)}

        for reply in context.ask(TRAIN, content, expected, [site for site in context.participants if site.name in commons]):
            self.mark(context, reply.site)
            if expected(reply.site):
                context.put(MEAN_OF, reply.site, reply[AUXILIARY_HEADS])

    def recompute_derived(self, context: RoundContext) -> None:
        """The auxiliary heads: the mean over the sites that trained them last; as they began if none of these is left."""
        super().recompute_derived(context)
        if context.total(MEAN_OF).addends:
            context.save_server_state(HEADS, cast(counted(context).mean(MEAN_OF), context.server_state(HEADS)))
        elif HEADS in context.slots.keeps():
            context.save_server_state(HEADS, self._drawn(context))

    def sent(self, view: View) -> State:
        return view.server_state(HEADS) if HEADS in view.slots.keeps() else {}

    def _start(self, experiment: Experiment, site: Site) -> State:
        """The extractor that a site starts from. UserError for a file that cannot be read or is another network's."""
        path = Path(self.pretrained[site.index % len(self.pretrained)]).expanduser()
        own = {
            name: one
            for name, one in experiment.architecture(site).build().state_dict().items()
            if name.startswith(EXTRACTOR)
        }
        given = read_state(path)
        if odd := next((name for name, one in own.items() if name not in given or given[name].shape != one.shape), ""):
            has = f"{list(given[odd].shape)}" if odd in given else "none"
            raise UserError(
                f"strategy.pretrained: {path}: '{odd}' is {has}, {site.name}'s network takes {list(own[odd].shape)}"
            )
        return {name: given[name].to(one.dtype) for name, one in own.items()}

    def _common(self, context: RoundContext, kinds: Kinds) -> list[str]:
        """The names of the common classes, as they were when the run began. UserError if a task needs some, and none are."""
        if NAMES in context.slots.keeps():
            return decoded(context.server_state(NAMES))
        found = kinds.common()
        check_common(components_of(context.experiment).tasks, found)
        context.save_server_state(NAMES, encoded(found))
        return found

    def _heads(self, context: RoundContext) -> State:
        """The auxiliary heads as they are, or as they begin."""
        if HEADS not in context.slots.keeps():
            context.save_server_state(HEADS, self._drawn(context))
        return context.server_state(HEADS)

    def _drawn(self, view: View) -> State:
        """The auxiliary heads as the seed draws them."""
        architecture, heads = view.architecture(view.sites[0]), State()
        common = len(decoded(view.server_state(NAMES)))
        for name, task in components_of(view.experiment).tasks.items():
            head = head_of(architecture, task.outputs(common))
            initialise(head, torch_generator(view.config.seed, "initialisation", "auxiliary", name))
            heads |= {f"{name}.{key}": tensor.detach() for key, tensor in head.state_dict().items()}
        return representable(heads, view.bits) if heads else {}


def check_pull(pull: float, training: Recipe) -> None:
    """UserError for a pull at which steps of SGD lead ever further away: its curvature 2 * pull is too large for them."""
    if not isinstance(optimizer := training.optimizer, SGD) or training.clip:
        return
    momentum = training.momentum if optimizer.momentum is None else optimizer.momentum
    if pull >= (most := (1 + momentum) / training.rate if training.rate else math.inf):
        told = f"with training.rate={training.rate:g} and training.momentum={momentum:g}"
        raise UserError(f"objective.pull: got {pull:g}; {told} training diverges from {most:.3g} on; 0.1 is usual")


def check_common(tasks: Mapping[str, Auxiliary], found: Sequence[str]) -> None:
    """UserError if a task needs common classes, and there are not two of them."""
    for name, task in tasks.items():
        if task.supervised and len(found) < 2:
            told = f"'{name}' needs classes that all sites have, {_few(found)}"
            raise UserError(
                f"objective.auxiliary: {told}; take [rp], or say in strategy.alike which names stand for one class"
            )


def _few(found: Sequence[str]) -> str:
    return f"and there is one alone ('{plain(found[0])}')" if found else "and there are none"
