"""Layer selection (LASEM, Lee et al. 2021) in a federation: the server holds the shared parameters of layers.

With all sites at once, a shared layer is the mean over the sites. The weights are the sites' images times the probability,
at each site, that the layer is shared (the posterior). With one site after the other (lifelong, as in the paper), a site
continues from the state that the sites before it left. The shared state is then the start plus the sum of the sites'
changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.layer_selection.configurations import LEARNED, every, shown
from fedloom.clients.objectives.layer_selection.layers import Layers
from fedloom.clients.objectives.layer_selection.objective import COMPOSED, LayerSelection
from fedloom.clients.objectives.layer_selection.posterior import TASKS
from fedloom.clients.objectives.layer_selection.session import CHOSEN, COUNTS, MASS, SELECTION
from fedloom.clients.protocol.messages import MEAN, RIGHT, SITE, TOTAL, TRAIN
from fedloom.clients.protocol.reply_checks import ReplyError, can_be
from fedloom.clients.training.learner import step_count
from fedloom.clients.training.loss import loss_section
from fedloom.conf.errors import UserError
from fedloom.conf.schema import TrainingConfig
from fedloom.conf.sites import Site
from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import PerClientSlot, Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import ClientUpdate, RecordSpec
from fedloom.server.rounds.schedules import OneByOne, Participation, Sampling, Schedule
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence, Strategy, check_objective
from fedloom.server.strategies.by_architecture import cast, counted, representable

TOGETHER, LIFELONG = "together", "lifelong"
PARTS, CHANGES, SELECTED, OTHERS = "parts", "changes", "selection", "counts"  # slots
SHARED, PROGRESS = "shared", "progress"  # saved states: the shared parameters; the measurements of every round
KEY = "layer_selection"  # in the summary, by mode
MIN_SCALE_BITS = 24
LEAST_MASS = 2.0**-16  # smaller masses of a layer count as 0: their products with parameters would lose precision


class InTurn(OneByOne):
    """One site after the other, and then from the first again. The turn of a forgotten site stays empty."""

    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        site = self.order[(round - 1) // self.each % len(self.order)]
        return Participation([member for member in members if member.name == site.name], self.site_round(round))


@STRATEGIES.register("layer_selection")
@dataclass(frozen=True)
class LayerSelectionStrategy(Strategy):
    """Strategy that holds the layers' shared parameters. Its objective is `layer_selection`.

    Sites' networks stay at the sites, which measure them with the current shared parameters.
    """

    default_objective: ClassVar[str] = "layer_selection"

    arrival: str = option(TOGETHER, "all sites at once, or one after the other", choices=(TOGETHER, LIFELONG))
    every: int = option(
        1,
        "rounds between measurements of the sites' networks (lifelong: also at each turn's end); 0: only the last round",
        low=0,
    )

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """Return the slots of the configured arrival.

        Together: probabilities x parameters and probabilities, in one sum weighted by images. Lifelong: the sum of changes.
        """
        own = {PARTS: Sum(weighted=True)} if self.arrival == TOGETHER else {CHANGES: Sum()}
        others = {OTHERS: Sum()} if _objective(experiment).prior == TASKS else {}
        return {**own, **others, SELECTED: PerClientSlot()}

    def check(self, experiment: Experiment) -> None:
        check_objective(experiment, self, "layer_selection")
        if (section := loss_section(experiment.config.training)) != loss_section(TrainingConfig()):
            raise UserError(f"training.loss: got {dict(section)}, but layer selection trains by cross-entropy; leave it out")
        if self.arrival == TOGETHER and experiment.federation.scale_bits < MIN_SCALE_BITS:
            problem = f"got {experiment.federation.scale_bits}, but masses down to 2^-16 take at least {MIN_SCALE_BITS}"
            raise UserError(f"federation.scale_bits: {problem}")
        objective, sites = _objective(experiment), experiment.sites
        first = objective.layers_of(experiment.config, sites[0])
        objective.way  # noqa: B018 # checks its options
        objective.fixed(objective.configurations(len(first.groups)))
        for mode in experiment.config.baselines:
            replace(objective, mode=mode).fixed(every(len(first.groups)))
        shapes = _shapes(first.shared(experiment.config, sites[0]))
        for site in sites[1:]:
            other = _shapes(objective.layers_of(experiment.config, site).shared(experiment.config, site))
            if differing := next((name for name in {**shapes, **other} if shapes.get(name) != other.get(name)), ""):
                shape, first_shape = other.get(differing, "none"), shapes.get(differing, "none")
                problem = f"'{differing}' is {shape} at {site.name} and {first_shape} at {sites[0].name}"
                raise UserError(f"network: strategy layer_selection takes the same shared layers at all sites; {problem}")
        if experiment.evaluation.statistics == "running" and any(
            first.has_statistics(experiment.config, site) for site in sites
        ):
            problem = "strategy layer_selection trains BatchNorm with many configurations at once"
            raise UserError(f"evaluation.statistics: got 'running', but {problem}; takes recomputed or batch")

    def warnings(self, experiment: Experiment) -> Sequence[str]:
        """Warn if no round is left to select layers, or if the option `certainty` has no effect."""
        objective, messages = _objective(experiment), list[str]()
        if objective.mode == LEARNED and objective.warm_up >= experiment.rounds:
            messages.append(
                f"objective.warm_up={objective.warm_up} leaves no round of {experiment.rounds} for sites to select layers"
            )
        if objective.certainty < 1.0 and objective.mode == LEARNED and not experiment.config.baselines:
            messages.append(f"objective.certainty={objective.certainty:g} needs a fixed configuration in objective.mode; "
                            "the configuration is learned, so the certainty has no effect")  # fmt: skip
        return messages

    def schedule(self, experiment: Experiment) -> Schedule:
        """Return the schedule: sites together or, if lifelong, all rounds of one site after another's."""
        return InTurn(experiment.sites, experiment.rounds) if self.arrival == LIFELONG else Sampling(experiment.config)

    def begin(self, context: RoundContext) -> None:
        context.save_server_state(SHARED, _start(context))

    def round(self, context: RoundContext) -> None:
        """Send the shared parameters. Store what each site returns, with its posterior for each layer."""
        shared, sites = context.server_state(SHARED), {site.name: site for site in context.sites}
        groups = len(_layers(context).groups)
        like = {MASS: torch.zeros(groups), CHOSEN: torch.zeros(groups)}
        if OTHERS in context.slots.declared:
            like[COUNTS] = torch.zeros(len(_configurations(context)), dtype=torch.int64)
        expected = {SITE: RecordSpec(shared), SELECTION: RecordSpec(like, bounded=False, check=_check_selection)}
        masses: dict[str, Tensor] = {}
        others = {site.name: self._others(context, site) for site in context.participants}  # before any site answers

        def content(site: Site) -> dict[str, State]:
            return {MEAN: shared, **others[site.name]}

        for reply in context.ask(TRAIN, content, expected) if context.participants else ():
            self._put(context, sites[reply.site.name], reply, shared)
            masses[reply.site.name] = reply[SELECTION][MASS]
        self._note(context, {site.name: masses[site.name] for site in context.sites if site.name in context.trained})

    def recompute_derived(self, context: RoundContext) -> None:
        """Recompute the shared state. After a site is forgotten, it follows from the slots alone.

        The measurements of forgotten sites are deleted.
        """
        context.save_server_state(SHARED, self.shared(context, None if context.participants else _start(context)))
        if PROGRESS in context.slots.keeps():
            remaining = torch.zeros(len(context.config.roster), dtype=torch.bool)
            remaining[[site.index for site in context.sites]] = True
            context.save_server_state(
                PROGRESS, {name: _only(table, remaining) for name, table in context.server_state(PROGRESS).items()}
            )

    def shared(self, view: View, before: State | None = None) -> State:
        """Return the shared parameters that follow from the slots of a view.

        A layer that no site shares takes its value from `before`, or by default from the saved state.
        """
        before = before or view.server_state(SHARED)
        if self.arrival == LIFELONG:
            start, total = _start(view), view.total(CHANGES)
            return (
                cast({name: start[name] + change for name, change in total.total().items()}, start)
                if total.addends
                else start
            )
        if not view.total(PARTS).addends:
            return _start(view)
        mean, layers = counted(view).mean(PARTS), _layers(view)
        weights = {name: mean[MASS][layers.group_of(name)] for name in before}
        return cast({name: mean[name] / weights[name] if weights[name] > 0 else before[name] for name in before}, before)

    def models(self, view: View) -> Models:
        """Return no model: the networks are at the sites."""
        return Models({})

    def measured_with(self, view: View) -> Mapping[str, State]:
        """Return the current shared parameters; sites need them to measure their networks."""
        return {MEAN: view.server_state(SHARED)}

    def summary_entries(self, view: View) -> Mapping[str, Any]:
        """Return each site's configuration, its posterior of each group in each round, and its accuracies."""
        if PROGRESS not in view.slots.keeps():
            return {}
        table, layers = view.server_state(PROGRESS), _layers(view)
        sites = [site for site in view.sites if view.has(SELECTED, site.name)]
        chosen = {site.name: view.slots.contributions.floats(site.name, SELECTED)[CHOSEN] for site in sites}
        entries = {
            "groups": [list(group) for group in layers.groups],
            "sites": [site.name for site in sites],
            "configuration": [shown([int(value) for value in chosen[site.name].tolist()]) for site in sites],
            "shared": [[[_number(value) for value in row] for row in table[MASS][:, site.index].tolist()] for site in sites],
            "accuracy": [_accuracies(table, site.index) for site in sites],
            "own": self._own_rounds(view, sites),
            "bytes": sum(tensor.nbytes for tensor in view.server_state(SHARED).values()),
            "fedavg_bytes": sum(tensor.nbytes for tensor in view.initial(site=view.config.roster[0]).values()),
        }
        return {KEY: {_objective(view.experiment).mode: entries}}

    def residue(self, view: View, names: Any = ()) -> tuple[ResidualInfluence, ...]:
        if view.rounds_with(names) < (1 if self.arrival == LIFELONG else 2):
            return ()
        reason = "they were trained from shared parameters that include the forgotten sites"
        measured = "measured with shared parameters that include the forgotten sites; --repair 1 measures again"
        return (
            ResidualInfluence("the other sites' own layers, and their contributions to shared ones", reason),
            ResidualInfluence("accuracies on sites' own tasks", measured),
        )

    def _put(self, context: RoundContext, site: Site, reply: ClientUpdate, shared: State) -> None:
        selection = reply[SELECTION]
        layers = _layers(context)
        if self.arrival == TOGETHER:
            mass = torch.where(selection[MASS] < LEAST_MASS, 0.0, selection[MASS])
            weighted = {name: tensor * mass[layers.group_of(name)] for name, tensor in reply[SITE].items()}
            context.put(PARTS, site, {**weighted, MASS: mass}, reply.samples)
        else:
            before = context.contribution(CHANGES, site.name) if context.has(CHANGES, site.name) else {}
            rounds, length = context.experiment.rounds, self.schedule(context.experiment).length(context.experiment.rounds)
            further = context.number > length  # on request: any such round may be the last
            last = further or context.site_round >= rounds  # unselected layers return to their earlier values
            kept = {name: float(not last or selection[CHOSEN][layers.group_of(name)] > 0) for name in shared}
            changes = {
                name: (tensor - shared[name] + before.get(name, 0.0)) * kept[name] for name, tensor in reply[SITE].items()
            }
            context.put(CHANGES, site, changes)
        if OTHERS in context.slots.declared:
            # The site cannot have counted more mini-batches than this.
            limit = context.number * step_count(reply.samples, context.experiment, reply.site)
            context.put(OTHERS, site, {COUNTS: _at_most(selection[COUNTS], limit).float()})
        context.put(SELECTED, site, {CHOSEN: selection[CHOSEN]})

    def _others(self, context: RoundContext, site: Site) -> dict[str, State]:
        """Return the sum of all other sites' counts, if the prior uses them."""
        if OTHERS not in context.slots.declared:
            return {}
        names = [other.name for other in context.sites if other.name != site.name and context.has(OTHERS, other.name)]
        return {COUNTS: context.subset(names).sum(OTHERS)} if names else {}

    def _note(self, context: RoundContext, masses: Mapping[str, Tensor]) -> None:
        """Add a round to PROGRESS, with the sites' measurements if they are due."""
        size = len(context.config.roster)
        table = torch.full((size, len(_layers(context).groups)), -1.0)
        for site in context.sites:
            table[site.index] = masses.get(site.name, table[site.index])
        right, images = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        length = self.schedule(context.experiment).length(context.config.rounds)
        turn_ends = self.arrival == LIFELONG and context.site_round >= context.config.rounds
        if context.number >= length or (self.every and (turn_ends or context.number % self.every == 0)):
            shared, asked = self.shared(context), [site for site in context.sites if context.has(SELECTED, site.name)]
            for reply in context.ask(COMPOSED, {MEAN: shared}, {}, asked, metrics=[RIGHT, TOTAL], needed=False):
                hits, total = reply.metrics[RIGHT], reply.metrics[TOTAL]
                if can_be(hits, total):
                    right[reply.site.index], images[reply.site.index] = int(hits), int(total)
        new = {MASS: table, RIGHT: right, TOTAL: images}
        before = context.server_state(PROGRESS) if PROGRESS in context.slots.keeps() else {}
        context.save_server_state(
            PROGRESS, {name: torch.cat([before[name], row[None]]) if before else row[None] for name, row in new.items()}
        )

    def _own_rounds(self, view: View, sites: list[Site]) -> list[list[int]]:
        """Return the first and the last round in which each site trained, from 1."""
        trained = view.server_state(PROGRESS)[MASS][..., 0] >= 0
        rounds = [torch.nonzero(trained[:, site.index]).flatten().tolist() for site in sites]
        return [[numbers[0] + 1, numbers[-1] + 1] if numbers else [] for numbers in rounds]


def _objective(experiment: Experiment) -> LayerSelection:
    objective = experiment.objective
    assert isinstance(objective, LayerSelection)  # `check` ensures this
    return objective


def _layers(view: View) -> Layers:
    return _objective(view.experiment).layers_of(view.experiment.config, view.config.roster[0])


def _configurations(view: View) -> list[Any]:
    return _objective(view.experiment).configurations(len(_layers(view).groups))


def _start(view: View) -> State:
    """Return the initial shared parameters, which the seed draws."""
    return representable(_layers(view).shared(view.experiment.config, view.config.roster[0]), view.bits)


def _shapes(state: State) -> dict[str, str]:
    return {name: " x ".join(map(str, tensor.shape)) for name, tensor in state.items()}


def _check_selection(record: State) -> None:
    """Raise ReplyError if the record is not a posterior, a configuration and counts."""
    mass, chosen = record[MASS], record[CHOSEN]
    if bool(((mass < 0) | (mass > 1)).any()):
        raise ReplyError(f"record '{SELECTION}': '{MASS}' takes probabilities from 0 to 1")
    if not bool(((chosen == 0) | (chosen == 1)).all()):
        raise ReplyError(f"record '{SELECTION}': '{CHOSEN}' takes zeros and ones")
    if COUNTS in record and bool((record[COUNTS] < 0).any()):
        raise ReplyError(f"record '{SELECTION}': '{COUNTS}' takes numbers of at least 0")


def _at_most(counts: Tensor, limit: int) -> Tensor:
    """Return the counts, scaled down if their sum exceeds `most`."""
    share = limit / max(limit, float(counts.double().sum()))
    return counts if share >= 1.0 else (counts.double() * share).floor().long()


def _only(table: Tensor, remaining: Tensor) -> Tensor:
    """Return a table [rounds, sites, ...] without the entries of sites that are not `here`."""
    gone = torch.full((), -1.0 if table.is_floating_point() else 0).to(table.dtype)
    return torch.where(remaining.view(1, -1, *[1] * (table.ndim - 2)), table, gone)


def _accuracies(table: Mapping[str, Tensor], site: int) -> list[float | None]:
    """Return a site's accuracy in each round, or None if it was not measured."""
    pairs = zip(table[RIGHT][:, site].tolist(), table[TOTAL][:, site].tolist(), strict=True)
    return [right / total if total else None for right, total in pairs]


def _number(mass: float) -> float | None:
    return None if mass < 0 else round(mass, 4)
