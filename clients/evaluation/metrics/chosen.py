"""The metrics that a configuration chooses: their sums for some examples, and the values of these sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fedloom.clients.data import class_count, domain_specs, num_classes, task_of
from fedloom.conf.errors import UserError
from fedloom.conf.metrics import ACCURACY, CLASS, KNOWN, REGRESSION, Facts, named_metrics
from fedloom.conf.schema import Config
from fedloom.conf.sites import UNION

if TYPE_CHECKING:
    from fedloom.clients.evaluation.metrics.sums import Statistic
    from fedloom.clients.evaluation.metrics.values import Formula

Sums = Mapping[str, Tensor]  # by the name of a statistic
Scores = dict[str, dict[str, float]]  # values by metric, the first configured one first, and domain
SCORES = "scores"  # key of records: the values by metric and domain
SITES = "sites"  # value of evaluation.where


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric: its facts, and how it follows from sums. `own`: the formula and statistic of a metric of the user's."""

    facts: Facts
    kind: str
    own: tuple[Formula, Statistic] | None = None

    @property
    def formula(self) -> Formula:
        """How the metric follows from sums."""
        from fedloom.clients.evaluation.metrics.values import FORMULAS  # imported only where it is used

        return self.own[0] if self.own else FORMULAS[self.kind][self.facts.name]


@dataclass(frozen=True, eq=False)
class Metrics:
    """The metrics for one kind of targets.

    `hidden`: measured for files, but not configured. `totals`: only with sums that have nothing about single classes or
    scores.
    """

    kind: str
    chosen: tuple[Metric, ...]
    hidden: tuple[Metric, ...] = ()
    totals: bool = False

    @property
    def statistics(self) -> list[Statistic]:
        """The sums that the metrics need, and those that reports draw."""
        from fedloom.clients.evaluation.metrics.sums import STATISTICS  # imported only where it is used

        every = (*self.hidden, *self.chosen)
        needs = dict.fromkeys(name for each in every if not each.own for name in each.formula.needs)
        names = [*needs, *(["against"] if self.kind == REGRESSION else [])]
        found = [*(STATISTICS[name] for name in names), *(each.own[1] for each in every if each.own)]
        return [each for each in found if each.totals or not self.totals]

    @property
    def first(self) -> Facts:
        """The metric that curves, tables, searches and certificates show."""
        return self.chosen[0].facts

    @property
    def only_accuracy(self) -> bool:
        """Whether accuracy of classes is the only metric."""
        return self.kind == CLASS and [each.facts.name for each in self.chosen] == [ACCURACY]

    def sums(self, scores: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Return the sums over some examples: the network's raw outputs, and the targets, on the CPU."""
        return {each.name: each.of(scores, targets) for each in self.statistics}

    def added(self, parts: Iterable[Sums]) -> dict[str, Tensor]:
        """Return the sum of sums, of the statistics that all of them have."""
        first, *others = list(parts) or [{}]
        total = dict(first)
        for part in others:
            total = {each.name: each.add(total[each.name], part[each.name]) for each in self.statistics
                     if each.name in total and each.name in part}  # fmt: skip
        return total

    def values(self, sums: Sums) -> dict[str, float]:
        """Return the metrics' values by name, without those that the sums do not define."""
        known = {each.facts.name: each.formula.value(sums) for each in (*self.chosen, *self.hidden)
                 if each.formula.value and all(name in sums for name in each.formula.needs)}  # fmt: skip
        return {name: value for name, value in known.items() if math.isfinite(value)}

    def by_class(self, sums: Sums) -> dict[str, list[float]]:
        """Return the values by class or label, of the metrics that have them."""
        return {each.facts.name: each.formula.by_class(sums) for each in self.chosen
                if each.formula.by_class and all(name in sums for name in each.formula.needs)}  # fmt: skip

    def entries(self, scores: Scores) -> dict[str, Scores | dict[str, float]]:
        """Return what a record has of a network: `accuracy` of classes and, if other metrics are configured, `scores`."""
        configured = {name: scores[name] for name in (each.facts.name for each in self.chosen) if name in scores}
        accuracy: dict[str, dict[str, float]] = {ACCURACY: scores.get(ACCURACY, {})} if self.kind == CLASS else {}
        return {**accuracy, **({} if self.only_accuracy else {SCORES: configured})}

    def table(self, parts: Mapping[str, Sums], blocks: Mapping[str, tuple[int, int]]) -> Scores:
        """Return each metric's values by domain, and `union`: over all domains together.

        Args:
            parts: The sums by domain.
            blocks: By domain, the first of its classes and the number of all classes, if heads differ (`blocks_of`).
        """
        from fedloom.clients.evaluation.metrics.sums import moved_sums  # imported only where it is used

        moved = [moved_sums(sums, *blocks[name]) if name in blocks else sums for name, sums in parts.items()]
        rows = {**{name: self.values(sums) for name, sums in parts.items()}, UNION: self.values(self.added(moved))}
        names = [each.facts.name for each in (*self.chosen, *self.hidden) if each.facts.number]
        return {name: {domain: row[name] for domain, row in rows.items() if name in row} for name in names} if parts else {}


def metrics_of(config: Config, own: bool = True) -> Metrics:
    """Return the configuration's metrics.

    Args:
        config: The configuration.
        own: Whether to include the user's metrics, and so import them. A real site does not import what a server names.

    Raises:
        UserError: As `named_metrics` does, and for metrics that sites cannot sum.
    """
    kind = task_of(config)
    chosen = list[Metric]()
    for named in named_metrics(config.evaluation.metrics, kind):
        if not named.own:
            chosen.append(Metric(KNOWN[named.name], kind))
            continue
        if not own:
            continue
        _check_own(config, named.where, named.reference)
        from fedloom.clients.evaluation.metrics.own import own_metric  # imported only where it is used

        facts, formula, statistic = own_metric(named, kind, num_classes(config))
        if config.evaluation.where == SITES and not statistic.adds:
            fault = f"{named.where}: '{named.reference}' has states that do not add up over sites"
            raise UserError(f'{fault}; use dist_reduce_fx="sum" for all of them, or set evaluation.where=server')
        chosen.append(Metric(facts, kind, (formula, statistic)))
    hidden = [Metric(KNOWN[ACCURACY], kind)] if kind == CLASS else []
    hidden = [each for each in hidden if each.facts not in [one.facts for one in chosen]]
    return Metrics(kind, tuple(chosen), tuple(hidden))


def _check_own(config: Config, where: str, reference: str) -> None:
    """Raise UserError if a metric of the user's cannot be measured in this configuration."""
    if config.data.heads != "shared":
        raise UserError(f"{where}: '{reference}' needs one head for all domains; set data.heads=shared, or remove it")
    if config.evaluation.where == SITES and config.engine.name == "flower":
        fault = f"{where}: '{reference}' is not a metric of this project, and a site does not import what a server names"
        raise UserError(f"{fault}; remove it, or set evaluation.where=server")


def blocks_of(config: Config) -> dict[str, tuple[int, int]]:
    """Return by domain the first of its classes and the number of all classes, so that heads stay apart in the union.

    Empty if all domains share their classes.
    """
    if config.data.heads == "shared":
        return {}
    counts = {name: class_count(spec) for name, spec in domain_specs(config).items()}
    firsts = {name: sum(list(counts.values())[:index]) for index, name in enumerate(counts)}
    return {name: (first, sum(counts.values())) for name, first in firsts.items()}
