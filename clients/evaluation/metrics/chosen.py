"""The metrics that a configuration chooses: their sums for some examples, and the values of these sums."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedloom.clients.data import class_count, domain_specs, num_classes, task_of
from fedloom.clients.evaluation.metrics.own import own_metric
from fedloom.clients.evaluation.metrics.sums import STATISTICS, Statistic, Sums, in_blocks, joined
from fedloom.clients.evaluation.metrics.values import FORMULAS, Formula
from fedloom.conf.errors import UserError
from fedloom.conf.metrics import ACCURACY, CLASS, KNOWN, REGRESSION, Facts, named_metrics
from fedloom.conf.schema import Config
from fedloom.conf.sites import UNION

Scores = dict[str, dict[str, float]]  # values by metric, the first configured one first, and domain
SCORES = "scores"  # key of records: the values by metric and domain
SITES = "sites"  # value of evaluation.where


@dataclass(frozen=True, eq=False)
class Metric:
    """A metric: its facts, and how it follows from sums. `own`: it is the user's."""

    facts: Facts
    formula: Formula
    own: bool = False


@dataclass(frozen=True, eq=False)
class Metrics:
    """The metrics for one kind of targets. `hidden`: measured for files, but not configured."""

    kind: str
    chosen: tuple[Metric, ...]
    statistics: tuple[Statistic, ...]
    hidden: tuple[Metric, ...] = ()

    @property
    def first(self) -> Facts:
        """The metric that curves, tables, searches and certificates show."""
        return self.chosen[0].facts

    @property
    def only_accuracy(self) -> bool:
        """Whether accuracy of classes is the only metric."""
        return self.kind == CLASS and [each.facts.name for each in self.chosen] == [ACCURACY]

    @property
    def of_totals(self) -> "Metrics":
        """The metrics with only the sums that have nothing about single classes or scores."""
        return replace(self, statistics=tuple(each for each in self.statistics if each.totals))

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
    chosen, statistics = list[Metric](), dict[str, Statistic]()
    for named in named_metrics(config.evaluation.metrics, kind):
        if not named.own:
            chosen.append(Metric(KNOWN[named.name], FORMULAS[kind][named.name]))
            continue
        if not own:
            continue
        _check_own(config, named.where, named.reference)
        facts, formula, statistic = own_metric(named, kind, num_classes(config))
        if config.evaluation.where == SITES and statistic.add is joined:
            fault = f"{named.where}: '{named.reference}' has states that do not add up over sites"
            raise UserError(f'{fault}; use dist_reduce_fx="sum" for all of them, or set evaluation.where=server')
        chosen.append(Metric(facts, formula, own=True))
        statistics[statistic.name] = statistic
    hidden = [Metric(KNOWN[ACCURACY], FORMULAS[kind][ACCURACY])] if kind == CLASS else []
    hidden = [each for each in hidden if each.facts not in [one.facts for one in chosen]]
    needs = dict.fromkeys(name for each in (*hidden, *chosen) for name in each.formula.needs if name in STATISTICS)
    pictures = ["against"] if kind == REGRESSION else []
    shipped = {name: STATISTICS[name] for name in (*needs, *pictures)}
    return Metrics(kind, tuple(chosen), (*shipped.values(), *statistics.values()), tuple(hidden))


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


def moved_sums(sums: Sums, first: int, outputs: int) -> dict[str, Tensor]:
    """Return sums with their classes at `first` and on, among `outputs` classes."""
    return {name: in_blocks(name, tensor, first, outputs) for name, tensor in sums.items()}


def weighted(sums: Sums, share: float) -> dict[str, Tensor]:
    """Return sums with all examples counted as `share` of one."""
    if share == 1.0:
        return dict(sums)
    result = {}
    for name, tensor in sums.items():
        keyed = name in STATISTICS and STATISTICS[name].sparse
        scale = torch.full(tensor.shape[-1:], share, dtype=torch.float64)
        scale[0] = 1.0 if keyed else share
        result[name] = tensor.double() * scale
    return result
