"""Arithmetic at the server: sites train from one network, and their cumulative gradients are combined with coefficients.

A site's contribution is G_i, the sum over rounds of (what it sent back - what it was sent), in exact integers; of
BatchNorm's statistics, which are no sums, the last that it sent (less theta_0's). The network is theta_0 + sum alpha_i G_i,
or with combine=weights sum alpha_i (theta_0 + G_i); in the next round sites start from it.
Taking a site out is exact: what is left is, bit for bit, the combination of the others' gradients.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flwr.app import ArrayRecord

from clients.initial import initial_state
from clients.messages import MEAN, SITE, to_arrays
from clients.objectives.local import BACKWARD, FORWARD, TOGETHER
from conf.errors import UserError, unknown
from conf.schema import Config
from conf.sites import Site, roster
from conf.typed import value
from fusion.arithmetic import GRADIENTS, WEIGHTS, Alpha, composed, evenly, is_statistic, to_state
from fusion.exact import ExactSum, ExactSumError, State, quantise
from server.strategies.base import (
    STRATEGIES,
    Aggregation,
    ReplyError,
    Setup,
    Strategy,
    check_objective,
    check_record,
    counter,
)
from server.strategies.coefficients import LARGEST, NONE, Search, SearchOptions
from server.strategies.sequential import Sequential
from server.strategies.summing import Summing

SEARCHED = "coefficients searched"  # an event of the ledger
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

    def check(self, config: Config) -> None:
        """UserError for a coefficient of an unknown site or that is no number, and for options that do not fit."""
        known = [site.name for site in roster(config)]
        for name, alpha in self.coefficients.items():
            if name not in known:
                raise unknown("strategy.coefficients: site", name, known)
            if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= LARGEST:
                raise UserError(f"strategy.coefficients.{name}: got {alpha!r}, takes a number of at most {LARGEST:g}")
        check_objective(config, "local")
        if config.federation.partial_sums:
            raise UserError("federation.partial_sums: gradients are taken at the server; leave it off")
        self.search.check(config, len(known))
        if config.engine.vectorise > 1 and counter(config):
            raise UserError("engine.vectorise: BatchNorm's statistics cannot be trained as one; take 1, or norm=group")

    def start(self, setup: Setup) -> Aggregation:
        """Begin a run at theta_0."""
        mode = setup.config.objective.get("mode", TOGETHER)
        if mode in (FORWARD, BACKWARD):
            return Sequential(setup, setup.sites if mode == FORWARD else setup.sites[::-1], mode)
        return Arithmetic(self, setup)


class Arithmetic(Summing):
    """theta_0, the sites' cumulative gradients, and the coefficients."""

    def __init__(self, strategy: ArithmeticStrategy, setup: Setup) -> None:
        super().__init__(setup)
        self.strategy = strategy
        self.like = to_state(self.initial, initial_state(self.config), self.bits)  # theta_0, as it is sent
        self.begin_or_resume()

    def begin(self) -> None:
        self.stage_first(alike=True)

    def first(self, name: str) -> State:
        return {name: tensor * 0 for name, tensor in self.initial.items()}

    def restore(self, states: Mapping[str, str]) -> None:
        self.restore_sum(states)

    def stage(self) -> None:
        self._next = self.sum.copy()
        self._alphas: dict[str, Alpha] | None = None
        self._network: State | None = None
        self._sent: State | None = None  # the same, in integers

    def states(self) -> dict[str, State]:
        return {"sum": self.sum.totals}

    def records(self, round: int) -> dict[str, ArrayRecord]:
        return {MEAN: to_arrays(self.aggregate())}

    def base(self, site: Site) -> int:
        return 0

    def fold(self, site: Site, round: int, records: dict[str, State], samples: int) -> None:
        check_record(SITE, records.get(SITE), self.like)
        if self._sent is None:
            self._sent = quantise(self.aggregate(), self.bits)
        old = self.contribution(site.name)
        try:
            new = self._changed_to(quantise(records[SITE], self.bits), old, self._sent)
            self._next.replace(old, new)
        except ExactSumError as error:
            raise ReplyError(str(error)) from None
        self.contributions.stage(site.name, round, new, samples)

    def _changed_to(self, end: State, old: State, sent: State) -> State:
        """A site's gradient with a further round in it; statistics are no sums over rounds, the last ones count."""
        return {
            name: tensor - self.initial[name] if is_statistic(name) else old[name] + (tensor - sent[name])
            for name, tensor in end.items()
        }

    def commit(self, round: int, record: dict[str, Any]) -> None:
        self.sum = self._next
        self.contributions.commit(round, self.states(), self.digest(), record)
        self.stage()

    def aggregate(self) -> State:
        if self._network is None:
            last = self.ledger.last_round()
            trained = last is not None and last.round > 0  # before that there is theta_0, whatever the coefficients
            self._network = self.compose(self.coefficients()) if trained else self.like
        return self._network

    def coefficients(self) -> dict[str, Alpha]:
        """Every member's alpha: given, or found on validation images after the last commit and noted in the ledger."""
        if self._alphas is None:
            searched = self.strategy.search.by != NONE
            self._alphas = self._noted() if searched else {}
            if not self._alphas:
                self._alphas = self.chosen([site.name for site in self.members()])
                if searched and self.ledger.server:
                    self.ledger.note(SEARCHED, {**self._search_key(), "coefficients": self._alphas})
        return self._alphas

    def _noted(self) -> dict[str, Alpha]:
        """The coefficients that this very search found for this very sum; empty if it was not made."""
        notes = [event.body for event in self.ledger.events() if event.kind == SEARCHED]
        return next((note["coefficients"] for note in reversed(notes) if note.items() >= self._search_key().items()), {})

    def _search_key(self) -> dict[str, Any]:
        """What searched coefficients belong to."""
        search = {"combine": self.strategy.combine, **asdict(self.strategy.search)}
        return {"sum": self.digest()["sum"], "sites": [site.name for site in self.members()], "search": search}

    def compose(self, alphas: Mapping[str, Alpha], how: str = "", start: State | None = None) -> State:
        """The network of these sites with these coefficients, and no others; float32.

        `how`: GRADIENTS or WEIGHTS, as configured if empty; `start`: another network than theta_0 that the gradients are
        assigned to, its statistics staying. UserError for an unknown site.
        """
        self.check_names(list(alphas))
        how = how or self.strategy.combine
        base = self.initial if start is None else quantise(start, self.bits)
        different = {repr(alpha) for alpha in alphas.values()}
        if len(different) == 1:  # one exact sum: nothing is read but what is not in it
            found = evenly(base, next(iter(alphas.values())), self._sum_over(list(alphas)), how)
        else:
            changes = (self.contribution(name) for name in alphas)
            found = composed(base, list(alphas.values()), changes, how, self.bits)
        if start is not None:
            found |= {name: tensor for name, tensor in base.items() if is_statistic(name)}
        return to_state(found, self.like, self.bits)

    def _sum_over(self, names: list[str]) -> ExactSum:
        """The sum of these sites' gradients, by whichever way reads fewer of them."""
        others = [site.name for site in self.members() if site.name not in names]
        return self.sum_without(others) if len(others) < len(names) else self.sum_of(names)

    def row(self) -> str:
        return "composed"

    def extra(self) -> dict[str, State]:
        sites = [site.name for site in self.members()]
        found = {}
        for row, (how, alpha) in ROWS.items():
            name = "half" if row == "mean" and len(sites) == 2 else row
            found[name] = self.compose(dict.fromkeys(sites, alpha or 1.0 / len(sites)), how)
        return found

    def site(self, name: str) -> State:
        return self.compose({name: 1.0}, GRADIENTS)

    def only(self, names: Sequence[str]) -> State:
        self.check_names(names)
        return self.compose(self.chosen(list(names)))

    def without(self, names: list[str]) -> State | None:
        """With the others' coefficients as they are: nothing is searched again."""
        rest = [site.name for site in self.members() if site.name not in names]
        if self.strategy.search.by == NONE:
            return self.compose(self.given(rest)) if rest else None
        return self.compose({name: self.coefficients()[name] for name in rest}) if rest else None

    def reversed(self) -> State:
        return self.compose(dict(reversed(self.coefficients().items())))

    def traces(self, names: Sequence[str] = ()) -> dict[str, str]:
        if self.rounds_with(names) < 2:
            return {}  # the others started from theta_0, which has seen no data
        return {"other sites' gradients": "after round 1 they start from networks that held the forgotten sites' gradients"}

    def facts(self) -> dict[str, Any]:
        return {"coefficients": self.coefficients()}

    def given(self, names: Sequence[str]) -> dict[str, Alpha]:
        """The configured coefficients of a network of these sites alone."""
        even = self.strategy.coefficient or 1.0 / len(names)
        return {name: float(self.strategy.coefficients.get(name, even)) for name in names}

    def chosen(self, names: Sequence[str]) -> dict[str, Alpha]:
        """The coefficients of a network of these sites alone: configured, or searched on validation images."""
        if self.strategy.search.by == NONE:
            return self.given(names)
        ends = {name: self.site(name) for name in names}
        homes = {site.name: site for site in self.members()}
        search = Search(self.setup.measuring(), self.strategy.search, self.strategy.combine, self.like, ends, homes)
        return search.best(self.given(names))
