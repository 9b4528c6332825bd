"""Arithmetic at the server: sites train from one network, and their cumulative gradients are combined with coefficients.

A site's contribution is G_i, the exact sum over rounds of (network received - network sent). BatchNorm's statistics are not
sums: for them, G_i is the last value minus theta_0's. The network is theta_0 + sum alpha_i G_i, or with combine=weights sum
alpha_i (theta_0 + G_i). The next round starts from it. Subtracting a site is exact: the rest is, bit for bit, the
combination of the other sites' gradients.
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
from fedloom.server.strategies.coefficients import MAX_COEFFICIENT, NONE, Search, SearchOptions, check_given, note, noted
from fedloom.server.strategies.sequential import Sequential

GRADIENT = "sum"  # the slot


@STRATEGIES.register("arithmetic")
@dataclass(frozen=True)
class ArithmeticStrategy(Strategy):
    """Strategy that adds what sites learned: the network theta_0 + sum alpha_i G_i. Its objective is `local`."""

    default_objective: ClassVar[str] = "local"

    combine: str = option(GRADIENTS, "theta_0 + sum alpha g, or sum alpha theta", choices=(GRADIENTS, WEIGHTS))
    coefficient: float = option(
        0.0,
        "alpha of each site that is not in `coefficients`; 0: 1 / (number of sites)",
        low=-MAX_COEFFICIENT,
        high=MAX_COEFFICIENT,
    )
    coefficients: dict[str, Any] = option({}, "alpha of single sites, by name")
    search: SearchOptions = option(SearchOptions, "how to choose the coefficients on validation examples")

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        return {GRADIENT: Sum()}

    def begin(self, context: RoundContext) -> None:
        context.put_all(GRADIENT, self.initial_contribution(context, "")[GRADIENT])

    def round(self, context: RoundContext) -> None:
        """Send the combination, and add to each G_i the change that the site made. Statistics are replaced."""
        sent = self.network(context)
        theta, start = _theta(context), quantise(sent, context.bits)
        for reply in context.ask(TRAIN, {MEAN: sent}, {SITE: RecordSpec(sent)}):
            end, before = reply.integers[SITE], context.integers(GRADIENT, reply.site.name)
            moved = {name: tensor - theta[name] if is_statistic(name) else before[name] + (tensor - start[name])
                     for name, tensor in end.items()}  # fmt: skip
            context.put(GRADIENT, reply.site, moved, reply.samples)

    def network(self, view: View) -> State:
        """Return the run's combined network. Before any training it is theta_0, whatever the coefficients are."""
        return self.compose(view, self.alphas(view)) if view.round else start_of(view)

    def compose(self, view: View, alphas: Mapping[str, Alpha], how: str = "", start: State | None = None) -> State:
        """Return the float32 network that combines the sites in `alphas` with these coefficients.

        Args:
            view: The slots.
            alphas: The coefficient of each site, by name: one number, or a number for each layer. Other sites do not count.
            how: GRADIENTS or WEIGHTS. Empty: as configured.
            start: Another network theta_n, whose statistics stay. With GRADIENTS the result is theta_n + sum alpha_i g_i
                (arithmetic, Eq. 6), with WEIGHTS theta_n + sum alpha_i theta_i (Eq. 7).

        Raises:
            UserError: A site is unknown.
        """
        view, how = view.subset(list(alphas)), how or self.combine
        other = None if start is None else quantise(start, view.bits)
        base = other if other and how == GRADIENTS else _theta(view)
        if len({repr(alpha) for alpha in alphas.values()}) == 1:  # use the exact sum: read only sites outside it
            combined = evenly(base, next(iter(alphas.values())), view.total(GRADIENT), how)
        else:
            changes = (view.integers(GRADIENT, name) for name in alphas)
            combined = composed(base, list(alphas.values()), changes, how, view.bits)
        if other:
            combined = added(other, combined) if how == WEIGHTS else combined
            combined |= {name: tensor for name, tensor in other.items() if is_statistic(name)}
        return to_state(combined, start_of(view), view.bits)

    def models(self, view: View) -> Models:
        """Return models by name: the run's `composed`, all sites' `mean` (or `half`), `sum`, `fused`, each theta_0 + g_i."""
        names = [site.name for site in view.sites]

        def model(alphas: Mapping[str, Alpha], how: str = GRADIENTS) -> Model:
            return Model(view.architecture(), self.compose(view, alphas, how))

        mean, ones = dict.fromkeys(names, 1.0 / len(names)), dict.fromkeys(names, 1.0)
        makers = {
            "composed": lambda: Model(view.architecture(), self.network(view), facts={"coefficients": self.alphas(view)}),
            "half" if len(names) == 2 else "mean": lambda: model(mean),
            "sum": lambda: model(ones),
            "fused": lambda: model(ones, WEIGHTS),
        }
        return Models(makers | {name: partial(model, {name: 1.0}) for name in names})

    def alphas(self, view: View) -> dict[str, Alpha]:
        """Return the coefficient alpha of every site in the view, by name.

        Alphas are configured, or searched on validation examples after the last round and recorded in the ledger. A view
        without some sites does not search again: the other sites' alphas stay the same.
        """
        if self.search.by == NONE:
            return self.chosen(view)
        full = View(view.setup, view.slots)
        alphas = noted(full, self.search, self.combine) or note(full, self.search, self.combine, self.chosen(full))
        return {site.name: alphas[site.name] for site in view.sites}

    def chosen(self, view: View) -> dict[str, Alpha]:
        """Compute the coefficients of the view's sites, by name: as configured, or by a search on validation examples."""
        homes = {site.name: site for site in view.sites}
        even = self.coefficient or 1.0 / len(homes)
        alphas: dict[str, Alpha] = {name: float(self.coefficients.get(name, even)) for name in homes}
        if self.search.by == NONE:
            return alphas
        ends = {name: self.compose(view, {name: 1.0}, GRADIENTS) for name in homes}
        return Search(view.evaluator, self.search, self.combine, start_of(view), ends, homes).best(alphas)

    def initial_contribution(self, view: View, site: str) -> Mapping[str, State]:
        """Return a cumulative gradient of zeros (int64)."""
        return {GRADIENT: {name: tensor * 0 for name, tensor in _theta(view).items()}}

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        if view.rounds_with(names) < 2:
            return ()  # the others started from theta_0, which is untrained
        reason = "after round 1 they start from networks that include the forgotten sites' gradients"
        return [ResidualInfluence("other sites' gradients", reason)]

    def resolve(self, experiment: Experiment) -> Strategy:
        """Return `Sequential` for the objective's sequential modes."""
        return self if experiment.objective.mode == TOGETHER else Sequential()

    def check(self, experiment: Experiment) -> None:
        sites = [site.name for site in experiment.sites]
        check_given(self.coefficients, sites)
        check_objective(experiment, self, "local")
        experiment.common_architecture()
        if experiment.federation.partial_sums:
            raise UserError("federation.partial_sums: the server needs single sites' gradients; set it to false")
        self.search.check(experiment, len(sites))
        if experiment.engine.vectorise > 1 and counter(experiment):
            raise UserError(
                "engine.vectorise: sites with BatchNorm cannot be trained together; take 1, or network.norm=group"
            )


def start_of(view: View) -> State:
    """Return the start theta_0 as sites receive it: rounded to the units of exact sums."""
    return to_state(_theta(view), view.initial(), view.bits)


def _theta(view: View) -> State:
    return quantise(view.initial(), view.bits)
