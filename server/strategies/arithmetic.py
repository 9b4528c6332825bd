"""Arithmetic at the server: sites train from one network, and their cumulative gradients are combined with coefficients.

A site's contribution is G_i, the sum over rounds of (what it sent back - what it was sent), in exact integers; of
BatchNorm's statistics, which are no sums, the last that it sent (less theta_0's). The network is theta_0 + sum alpha_i G_i,
or with combine=weights sum alpha_i (theta_0 + G_i); in the next round sites start from it.
Taking a site out is exact: what is left is, bit for bit, the combination of the others' gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from clients.messages import MEAN, SITE, TRAIN
from clients.networks import Model, common_architecture
from clients.objectives import objective_of
from clients.objectives.local import TOGETHER
from conf.errors import UserError, unknown
from conf.schema import Config
from conf.sites import roster
from conf.typed import value
from fusion.arithmetic import GRADIENTS, WEIGHTS, Alpha, composed, evenly, is_statistic, to_state
from fusion.exact import State, quantise
from server.ledger.slots import Slot, Sum
from server.rounds.run import Expected, Run
from server.rounds.view import Models, View
from server.strategies.base import STRATEGIES, Residue, Strategy, check_objective, counter
from server.strategies.coefficients import LARGEST, NONE, Search, SearchOptions, note, noted
from server.strategies.sequential import Sequential

GRADIENT = "sum"  # the slot
ROWS = {"mean": (GRADIENTS, 0.0), "sum": (GRADIENTS, 1.0), "fused": (WEIGHTS, 1.0)}  # always measured; 0: 1 / sites


@STRATEGIES.register("arithmetic")
@dataclass(frozen=True)
class ArithmeticStrategy(Strategy):
    """Options of the server's side; the objective is `local`."""

    combine: str = value(GRADIENTS, "theta_0 + sum alpha g, or sum alpha theta", choices=(GRADIENTS, WEIGHTS))
    coefficient: float = value(
        0.0, "alpha of the sites that `coefficients` leaves out; 0: 1 / sites", low=-LARGEST, high=LARGEST
    )
    coefficients: dict[str, Any] = value({}, "a site's name: its alpha")
    search: SearchOptions = value(SearchOptions, "choose the coefficients on validation images")

    def at_work(self, config: Config) -> Strategy:
        """Its baselines train one network at one site after the other."""
        return self if objective_of(config).mode == TOGETHER else Sequential()

    def slots(self, config: Config) -> Mapping[str, Slot]:
        """The sites' cumulative gradients."""
        return {GRADIENT: Sum()}

    def check(self, config: Config) -> None:
        """UserError for a coefficient of an unknown site or that is no number, and for options that do not fit."""
        known = [site.name for site in roster(config)]
        for name, alpha in self.coefficients.items():
            if name not in known:
                raise unknown("strategy.coefficients: site", name, known)
            if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= LARGEST:
                raise UserError(f"strategy.coefficients.{name}: got {alpha!r}, takes a number of at most {LARGEST:g}")
        check_objective(config, "local")
        common_architecture(config)
        if config.federation.partial_sums:
            raise UserError("federation.partial_sums: gradients are taken at the server; leave it off")
        self.search.check(config, len(known))
        if config.engine.vectorise > 1 and counter(config):
            raise UserError("engine.vectorise: BatchNorm's statistics cannot be trained as one; take 1, or norm=group")

    def begin(self, run: Run) -> None:
        """Nobody has a gradient yet."""
        run.put_all(GRADIENT, self.first(run, "")[GRADIENT])

    def round(self, run: Run) -> None:
        """Send the combination; add to each G_i how far the site went from it."""
        sent = self.network(run)
        start, initial = quantise(sent, run.bits), _theta(run)
        for reply in run.ask(TRAIN, {MEAN: sent}, {SITE: Expected(sent)}):
            old = run.integers(GRADIENT, reply.site.name)
            run.put(GRADIENT, reply.site, _moved(initial, start, reply.integers[SITE], old), reply.samples)

    def models(self, view: View) -> Models:
        """The combination; the mean (of two: half), the sum and the fusion of all; each site's own theta_0 + g_i."""
        names = [site.name for site in view.sites]
        mean = "half" if len(names) == 2 else "mean"
        found = {"composed": partial(self._composed, view)}
        for row, (how, alpha) in ROWS.items():
            alphas = dict.fromkeys(names, alpha or 1.0 / len(names))
            found[mean if row == "mean" else row] = partial(self._model, view, alphas, how)
        return Models(found | {name: partial(self._model, view, {name: 1.0}, GRADIENTS) for name in names})

    def first(self, view: View, site: str) -> Mapping[str, State]:
        """A gradient of zero, int64."""
        return {GRADIENT: {name: tensor * 0 for name, tensor in _theta(view).items()}}

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[Residue]:
        """After round 1, the other sites' gradients."""
        if view.rounds_with(names) < 2:
            return ()  # the others started from theta_0, which has seen no data
        why = "after round 1 they start from networks that held the forgotten sites' gradients"
        return [Residue("other sites' gradients", why)]

    def network(self, view: View) -> State:
        """The combination that the run uses; theta_0, whatever the coefficients, before anything was trained."""
        return self.compose(view, self.alphas(view)) if view.round else start_of(view)

    def compose(self, view: View, alphas: Mapping[str, Alpha], how: str = "", start: State | None = None) -> State:
        """The network of these sites with these coefficients, and no others; float32.

        `how`: GRADIENTS or WEIGHTS, as configured if empty; `start`: another network than theta_0 that the gradients are
        assigned to, its statistics staying. UserError for an unknown site.
        """
        view, how = view.subset(list(alphas)), how or self.combine
        base = _theta(view) if start is None else quantise(start, view.bits)
        different = {repr(alpha) for alpha in alphas.values()}
        if len(different) == 1:  # one exact sum: nothing is read but what is not in it
            found = evenly(base, next(iter(alphas.values())), view.total(GRADIENT), how)
        else:
            changes = (view.integers(GRADIENT, name) for name in alphas)
            found = composed(base, list(alphas.values()), changes, how, view.bits)
        if start is not None:
            found |= {name: tensor for name, tensor in base.items() if is_statistic(name)}
        return to_state(found, start_of(view), view.bits)

    def alphas(self, view: View) -> dict[str, Alpha]:
        """Every site's alpha: given, or found on validation images after the last round and noted in the ledger.

        Without some sites, the others' stay as they are: nothing is searched again.
        """
        names = [site.name for site in view.sites]
        if self.search.by == NONE:
            return self.given(names)
        whole = View(view.setup, view.slots)
        found = noted(whole, self.search, self.combine) or note(whole, self.search, self.combine, self.chosen(whole))
        return {name: found[name] for name in names}

    def given(self, names: Sequence[str]) -> dict[str, Alpha]:
        """The configured coefficients of a network of these sites alone."""
        even = self.coefficient or 1.0 / len(names)
        return {name: float(self.coefficients.get(name, even)) for name in names}

    def chosen(self, view: View) -> dict[str, Alpha]:
        """The coefficients of a network of these sites alone: configured, or searched on validation images."""
        names = [site.name for site in view.sites]
        if self.search.by == NONE:
            return self.given(names)
        ends = {name: self.compose(view, {name: 1.0}, GRADIENTS) for name in names}
        homes = {site.name: site for site in view.sites}
        search = Search(view.evaluator, self.search, self.combine, start_of(view), ends, homes)
        return search.best(self.given(names))

    def _composed(self, view: View) -> Model:
        alphas = self.alphas(view)
        return Model(view.architecture(), self.network(view), facts={"coefficients": alphas})

    def _model(self, view: View, alphas: Mapping[str, Alpha], how: str) -> Model:
        return Model(view.architecture(), self.compose(view, alphas, how))


def start_of(view: View) -> State:
    """theta_0, as it is sent."""
    return to_state(_theta(view), view.initial(), view.bits)


def _theta(view: View) -> State:
    return quantise(view.initial(), view.bits)


def _moved(initial: State, sent: State, end: State, old: State) -> State:
    """A site's gradient with a further round in it; statistics are no sums over rounds, the last ones count."""
    return {
        name: tensor - initial[name] if is_statistic(name) else old[name] + (tensor - sent[name])
        for name, tensor in end.items()
    }
