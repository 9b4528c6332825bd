"""Compatible components (Gygli et al. 2021): sites share small auxiliary heads, and have their own extractors and task
heads.

Sites that train with the same auxiliary heads learn features that fit these heads, and also each other's task heads (Sec.
3). In the joint scheme, the auxiliary heads of a round are the mean over the sites (Sec. 3.4). In the incremental scheme,
later sites receive the first sites' auxiliary heads, which are then frozen.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from fedloom.clients.data import class_meanings
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
from fedloom.server.strategies.components.classes import NAMES, SiteClasses, decoded, encoded
from fedloom.server.strategies.components.fedgh import FedGH
from fedloom.server.strategies.components.partial import PartialAveraging
from fedloom.server.strategies.components.recombination import TRAINED, Recombining, components_of

JOINT, INCREMENTAL = "joint", "incremental"
HEADS = "heads"  # the saved auxiliary heads, which sites receive
MEAN_OF = "auxiliary"  # slot


@dataclass(frozen=True)
class Arrival(Schedule):
    """The first sites train in the first half of the rounds, the others in the second. A site counts its rounds from 1."""

    config: Config
    first_sites: int

    def length(self, rounds: int) -> int:
        return 2 * rounds

    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        late = round > self.config.rounds
        sites = [site for site in members if (site.index >= self.first_sites) == late]
        return Sampling(self.config).participation(self.site_round(round), sites)

    def site_round(self, round: int) -> int:
        return round - self.config.rounds if round > self.config.rounds else round


@STRATEGIES.register("head_transfer")
@dataclass(frozen=True)
class HeadTransfer(Recombining):
    """A mean of auxiliary heads, and a store of the components that sites publish. The objective is `components`.

    The objective's other modes are other ways to share parts of networks.
    """

    default_objective: ClassVar[str] = "components"

    scheme: str = option(
        JOINT,
        "joint: all sites at once; incremental: the first sites, then the others with frozen auxiliary heads",
        choices=(JOINT, INCREMENTAL),
    )
    pretrained: list[str] = option([], "files of trained networks; sites start from their extractors, assigned in turn")
    first_sites: int = option(1, "incremental: number of sites that come first, in the roster's order", low=1)

    def resolve(self, experiment: Experiment) -> Strategy:
        """Return the strategy for the objective's mode."""
        objective = components_of(experiment)
        if objective.mode == COMPATIBLE:
            return self
        kind = FedGH if objective.sharing.prototypes else PartialAveraging
        return kind(every=self.every, alike=self.alike)

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """Return the unweighted sum of the sites' auxiliary heads, and the slots of published components."""
        return {MEAN_OF: Sum(), **super().slots(experiment)}

    def schedule(self, experiment: Experiment) -> Schedule:
        return Arrival(experiment.config, self.first_sites) if self.scheme == INCREMENTAL else Sampling(experiment.config)

    def check(self, experiment: Experiment) -> None:
        if (other := self.resolve(experiment)) is not self:
            other.check(experiment)
        else:
            super().check(experiment)
            self._check_heads(experiment)

    def _check_heads(self, experiment: Experiment) -> None:
        objective = components_of(experiment)
        if self.scheme == INCREMENTAL and self.first_sites >= (count := len(experiment.sites)):
            raise UserError(
                f"strategy.first_sites: got {self.first_sites}, takes a number below {count}, the number of sites"
            )
        if objective.same_start and len({experiment.architecture(site) for site in experiment.sites}) > 1:
            raise UserError("objective.same_start: takes one network for all sites, but theirs differ; set it to false")
        for site in experiment.sites if self.pretrained else ():
            self._start(experiment, site)
        for form in {experiment.architecture(site).form for site in experiment.sites}:
            for task in objective.tasks.values():
                task.check(form)
        check_pull(objective.pull, experiment.training)
        if has_data(experiment.config):
            sites = experiment.sites
            classes = SiteClasses.from_reports(
                experiment, sites, {site.name: class_meanings(site.spec) for site in sites}, self.alike
            )
            check_common(objective.tasks, classes.common())

    def begin(self, context: RoundContext) -> None:
        """Save nothing: the common classes are known only after the sites enrol."""

    def train(self, context: RoundContext) -> None:
        """Train every site's extractor and head and, unless frozen, its copies of the auxiliary heads."""
        classes = self.site_classes(context)
        known, heads = self._common(context, classes), self._heads(context)
        commons = {site.name: {COMMON: classes.places(site.name, known), NUMBER: torch.tensor(len(known))}
                   for site in context.participants if site.name in classes.names}  # fmt: skip
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
        """Set the auxiliary heads to the mean over the sites that last trained them.

        If no such site remains, the heads return to their initial values.
        """
        super().recompute_derived(context)
        if context.total(MEAN_OF).addends:
            context.save_server_state(HEADS, cast(counted(context).mean(MEAN_OF), context.server_state(HEADS)))
        elif HEADS in context.slots.keeps():
            context.save_server_state(HEADS, self._drawn(context))

    def sent(self, view: View) -> State:
        return view.server_state(HEADS) if HEADS in view.slots.keeps() else {}

    def _start(self, experiment: Experiment, site: Site) -> State:
        """Return the extractor from which a site starts. Raise UserError if the file does not fit its network."""
        path = Path(self.pretrained[site.index % len(self.pretrained)]).expanduser()
        own = {
            name: tensor
            for name, tensor in experiment.architecture(site).build().state_dict().items()
            if name.startswith(EXTRACTOR)
        }
        state = read_state(path)
        if wrong := next(
            (name for name, tensor in own.items() if name not in state or state[name].shape != tensor.shape), ""
        ):
            has = f"{list(state[wrong].shape)}" if wrong in state else "none"
            takes = f"{site.name}'s network takes {list(own[wrong].shape)}"
            raise UserError(f"strategy.pretrained: {path}: '{wrong}' is {has}, but {takes}")
        return {name: state[name].to(tensor.dtype) for name, tensor in own.items()}

    def _common(self, context: RoundContext, classes: SiteClasses) -> list[str]:
        """Return the names of the common classes at the run's start. Raise UserError if a task needs more of them."""
        if NAMES in context.slots.keeps():
            return decoded(context.server_state(NAMES))
        common = classes.common()
        check_common(components_of(context.experiment).tasks, common)
        context.save_server_state(NAMES, encoded(common))
        return common

    def _heads(self, context: RoundContext) -> State:
        """Return the saved auxiliary heads, or save the initial ones."""
        if HEADS not in context.slots.keeps():
            context.save_server_state(HEADS, self._drawn(context))
        return context.server_state(HEADS)

    def _drawn(self, view: View) -> State:
        """Return the initial auxiliary heads, which the seed draws."""
        architecture, heads = view.architecture(view.sites[0]), State()
        common = len(decoded(view.server_state(NAMES)))
        for name, task in components_of(view.experiment).tasks.items():
            head = head_of(architecture, task.outputs(common))
            initialise(head, torch_generator(view.config.seed, "initialisation", "auxiliary", name))
            heads |= {f"{name}.{key}": tensor.detach() for key, tensor in head.state_dict().items()}
        return representable(heads, view.bits) if heads else {}


def check_pull(pull: float, training: Recipe) -> None:
    """Raise UserError if objective.pull is so large (its curvature is 2 * pull) that SGD diverges."""
    if not isinstance(optimizer := training.optimizer, SGD) or training.clip:
        return
    momentum = training.momentum if optimizer.momentum is None else optimizer.momentum
    if pull >= (limit := (1 + momentum) / training.rate if training.rate else math.inf):
        steps = f"with training.rate={training.rate:g} and training.momentum={momentum:g}"
        raise UserError(f"objective.pull: got {pull:g}; {steps} training diverges from {limit:.3g} on; 0.1 is usual")


def check_common(tasks: Mapping[str, Auxiliary], common: Sequence[str]) -> None:
    """Raise UserError if an auxiliary task needs common classes, and there are fewer than two."""
    for name, task in tasks.items():
        if task.supervised and len(common) < 2:
            problem = f"'{name}' needs at least two classes that all sites have, {_common_text(common)}"
            raise UserError(f"objective.auxiliary: {problem}; take [rp], or list the names of one class in `strategy.alike`")


def _common_text(common: Sequence[str]) -> str:
    return f"but they share only '{plain(common[0])}'" if common else "but they share none"
