"""Arithmetic at the server: sites train from one network, and their cumulative gradients are combined with coefficients.

A site's contribution is G_i, the sum over rounds of (what it sent back - what it was sent), in exact integers; of
BatchNorm's statistics, which are no sums, the last that it sent (less theta_0's). The network is theta_0 + sum alpha_i G_i,
or with combine=weights sum alpha_i (theta_0 + G_i); in the next round sites start from it.
Taking a site out is exact: what is left is, bit for bit, the combination of the others' gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from fedloom.clients.networks import Model
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.local import TOGETHER
from fedloom.clients.protocol.messages import MEAN, SITE, TRAIN
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option
from fedloom.fusion.arithmetic import GRADIENTS, WEIGHTS, Alpha, added, composed, evenly, is_statistic, to_state
from fedloom.fusion.exact import quantise
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence, Strategy, check_objective, counter
from fedloom.server.strategies.coefficients import LARGEST, NONE, Search, SearchOptions, check_given, note, noted
from fedloom.server.strategies.sequential import Sequential

GRADIENT = "sum"  # the slot


@STRATEGIES.register("arithmetic")
@dataclass(frozen=True)
class ArithmeticStrategy(Strategy):
    """theta_0 + sum alpha_i G_i: what sites have learned, added with coefficients. The objective is `local`."""

    default_objective: ClassVar[str] = "local"

    combine: str = option(GRADIENTS, "theta_0 + sum alpha g, or sum alpha theta", choices=(GRADIENTS, WEIGHTS))
    coefficient: float = option(
        0.0, "alpha of the sites that `coefficients` leaves out; 0: 1 / sites", low=-LARGEST, high=LARGEST
    )
    coefficients: dict[str, Any] = option({}, "a site's name: its alpha")
    search: SearchOptions = option(SearchOptions, "choose the coefficients on validation images")

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """The sites' cumulative gradients."""
        return {GRADIENT: Sum()}

    def begin(self, context: RoundContext) -> None:
        """Nobody has a gradient yet."""
        context.put_all(GRADIENT, self.initial_contribution(context, "")[GRADIENT])

    def round(self, context: RoundContext) -> None:
        """Send the combination; add to each G_i how far the site went from it; of statistics, the last ones count."""
        sent = self.network(context)
        theta, start = _theta(context), quantise(sent, context.bits)
        for reply in context.ask(TRAIN, {MEAN: sent}, {SITE: RecordSpec(sent)}):
            end, before = reply.integers[SITE], context.integers(GRADIENT, reply.site.name)
            moved = {name: tensor - theta[name] if is_statistic(name) else before[name] + (tensor - start[name])
                     for name, tensor in end.items()}  # fmt: skip
            context.put(GRADIENT, reply.site, moved, reply.samples)

    def network(self, view: View) -> State:
        """The combination that the run uses; theta_0, whatever the coefficients, before anything was trained."""
        return self.compose(view, self.alphas(view)) if view.round else start_of(view)

    def compose(self, view: View, alphas: Mapping[str, Alpha], how: str = "", start: State | None = None) -> State:
        """The network of these sites with these coefficients, and no others; float32.

        `how`: GRADIENTS or WEIGHTS, as configured if empty. `start`: another network theta_n, whose statistics stay: with
        GRADIENTS theta_n + sum alpha_i g_i (arithmetic, Eq. 6), with WEIGHTS theta_n + sum alpha_i theta_i (Eq. 7).
        UserError for an unknown site.
        """
        view, how = view.subset(list(alphas)), how or self.combine
        other = None if start is None else quantise(start, view.bits)
        base = other if other and how == GRADIENTS else _theta(view)
        if len({repr(alpha) for alpha in alphas.values()}) == 1:  # one exact sum: nothing is read but what is not in it
            found = evenly(base, next(iter(alphas.values())), view.total(GRADIENT), how)
        else:
            changes = (view.integers(GRADIENT, name) for name in alphas)
            found = composed(base, list(alphas.values()), changes, how, view.bits)
        if other:
            found = added(other, found) if how == WEIGHTS else found
            found |= {name: tensor for name, tensor in other.items() if is_statistic(name)}
        return to_state(found, start_of(view), view.bits)

    def models(self, view: View) -> Models:
        """The combination; the mean (of two: half), the sum and the fusion of all; each site's own theta_0 + g_i."""
        names = [site.name for site in view.sites]

        def model(alphas: Mapping[str, Alpha], how: str = GRADIENTS) -> Model:
            return Model(view.architecture(), self.compose(view, alphas, how))

        mean, ones = dict.fromkeys(names, 1.0 / len(names)), dict.fromkeys(names, 1.0)
        found = {
            "composed": lambda: Model(view.architecture(), self.network(view), facts={"coefficients": self.alphas(view)}),
            "half" if len(names) == 2 else "mean": lambda: model(mean),
            "sum": lambda: model(ones),
            "fused": lambda: model(ones, WEIGHTS),
        }
        return Models(found | {name: partial(model, {name: 1.0}) for name in names})

    def alphas(self, view: View) -> dict[str, Alpha]:
        """Every site's alpha: given, or found on validation images after the last round and noted in the ledger.

        Without some sites, the others' stay as they are: nothing is searched again.
        """
        if self.search.by == NONE:
            return self.chosen(view)
        whole = View(view.setup, view.slots)
        found = noted(whole, self.search, self.combine) or note(whole, self.search, self.combine, self.chosen(whole))
        return {site.name: found[site.name] for site in view.sites}

    def chosen(self, view: View) -> dict[str, Alpha]:
        """The coefficients of a network of these sites alone: configured, or searched on validation images."""
        homes = {site.name: site for site in view.sites}
        even = self.coefficient or 1.0 / len(homes)
        given: dict[str, Alpha] = {name: float(self.coefficients.get(name, even)) for name in homes}
        if self.search.by == NONE:
            return given
        ends = {name: self.compose(view, {name: 1.0}, GRADIENTS) for name in homes}
        return Search(view.evaluator, self.search, self.combine, start_of(view), ends, homes).best(given)

    def initial_contribution(self, view: View, site: str) -> Mapping[str, State]:
        """A gradient of zero, int64."""
        return {GRADIENT: {name: tensor * 0 for name, tensor in _theta(view).items()}}

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        """After round 1, the other sites' gradients."""
        if view.rounds_with(names) < 2:
            return ()  # the others started from theta_0, which has seen no data
        why = "after round 1 they start from networks that held the forgotten sites' gradients"
        return [ResidualInfluence("other sites' gradients", why)]

    def resolve(self, experiment: Experiment) -> Strategy:
        """Its baselines train one network at one site after the other."""
        return self if experiment.objective.mode == TOGETHER else Sequential()

    def check(self, experiment: Experiment) -> None:
        """UserError for a coefficient of an unknown site or that is no number, and for options that do not fit."""
        sites = [site.name for site in experiment.sites]
        check_given(self.coefficients, sites)
        check_objective(experiment, "local")
        experiment.common_architecture()
        if experiment.federation.partial_sums:
            raise UserError("federation.partial_sums: gradients are taken at the server; leave it off")
        self.search.check(experiment, len(sites))
        if experiment.engine.vectorise > 1 and counter(experiment):
            raise UserError("engine.vectorise: BatchNorm's statistics cannot be trained as one; take 1, or norm=group")


def start_of(view: View) -> State:
    """theta_0, as it is sent."""
    return to_state(_theta(view), view.initial(), view.bits)


def _theta(view: View) -> State:
    return quantise(view.initial(), view.bits)
