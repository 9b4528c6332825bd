"""Coefficients of combined networks, chosen on the server's validation examples.

The criterion is the worst domain: the smallest accuracy relative to the best single site that holds the domain. A hundredth
of the mean decides ties.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedloom.clients.data import label
from fedloom.clients.objectives import Experiment
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.progress import step
from fedloom.conf.sites import UNION, Site
from fedloom.conf.typed import option
from fedloom.fusion.arithmetic import GRADIENTS, Alpha, Composer
from fedloom.fusion.search import best_on_grid, check_grid, climb
from fedloom.fusion.state import State
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.rounds.view import View

NONE = "none"
SEARCHED = "coefficients searched"  # the name of an event in the ledger
MAX_COEFFICIENT = 1e4  # largest absolute value of a coefficient
TINY = 1e-12  # avoids a division by an error of 0
GRID = [step / 10 for step in range(11)]


@dataclass(frozen=True)
class SearchOptions:
    """How to choose the coefficients of a combination of networks."""

    by: str = option(
        NONE,
        "none: use the configured ones; grid: try all on a grid; powell: Powell's derivative-free method",
        choices=(NONE, "grid", "powell"),
    )
    steps: list[float] = option(
        [], "grid: the values to try for each coefficient; empty: 0, 0.1, ..., 1", low=-MAX_COEFFICIENT, high=MAX_COEFFICIENT
    )
    layers: bool = option(False, "powell: a coefficient for each layer of each site")
    low: float = option(0.0, "powell: smallest coefficient", low=-MAX_COEFFICIENT, high=MAX_COEFFICIENT)
    high: float = option(1.5, "powell: largest coefficient", low=-MAX_COEFFICIENT, high=MAX_COEFFICIENT)
    evaluations: int = option(300, "powell: about how many combinations to measure", low=1)
    images: int = option(500, "validation examples of a domain to use, at most", low=10)

    def check(self, experiment: Experiment, sites: int) -> None:
        """Raise UserError if the configuration does not allow this search."""
        if self.by != NONE and not experiment.data.validation:
            raise UserError(f"strategy.search.by={self.by} needs validation examples; set data.validation above 0")
        if self.by == "grid":
            check_grid(self.steps or GRID, sites)
        if not self.low < self.high:
            raise UserError(f"strategy.search.low: got {self.low:g}, must be less than strategy.search.high={self.high:g}")


def check_given(coefficients: Mapping[str, Any], sites: Sequence[str]) -> None:
    """Raise UserError if a configured coefficient has an unknown site, is not a number or is too large."""
    for name, alpha in coefficients.items():
        if name not in sites:
            raise unknown("strategy.coefficients: site", name, sites)
        if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_COEFFICIENT:
            raise UserError(f"strategy.coefficients.{name}: got {alpha!r}, takes a number of at most {MAX_COEFFICIENT:g}")


class Search:
    """A search for the best combination of networks with one start. All networks' weights stay in memory.

    Every combination is measured in the same network instance, so nothing is built or read again.
    """

    def __init__(
        self, evaluator: Evaluator, options: SearchOptions, how: str,
        start: State, ends: Mapping[str, State], sites: Mapping[str, Site],
    ) -> None:  # fmt: skip
        """Measure the sites' own networks on their domains.

        Args:
            evaluator: Measures networks on validation examples.
            options: How to search.
            how: GRADIENTS or WEIGHTS.
            start: theta_0, float32.
            ends: The sites' own networks by name, float32.
            sites: The sites by name.
        """
        self.evaluator, self.options, self.names = evaluator, options, list(ends)
        self.measured, self.expected = 0, expected(options, len(ends))
        self.higher = evaluator.metrics.first.higher_is_better
        self.own = self._own(start, ends, sites)
        self.composer = Composer(evaluator.network, start, list(ends.values()), how)

    def best(self, given: Mapping[str, Alpha]) -> dict[str, Alpha]:
        """Return the coefficients that the configured search finds, starting at `given`.

        Raises:
            UserError: The sites' domains have no validation examples.
        """
        if not self.own:
            raise UserError("strategy.search: the sites' domains have no validation examples; take strategy.search.by=none")
        return SEARCHES[self.options.by](self, given)

    def worth(self, alphas: Sequence[Alpha]) -> float:
        """Build and measure the combination with these coefficients, and return its `worth`."""
        step("searching coefficients", min(self.measured, self.expected - 1), self.expected)
        self.measured += 1
        self.composer(alphas)
        return worth(self.evaluator.headline("validation", self.options.images), self.own, self.higher)

    def _own(self, start: State, ends: Mapping[str, State], sites: Mapping[str, Site]) -> dict[str, float]:
        """Return, by domain, the first metric of the best site's own network."""
        own: dict[str, float] = {}
        alone = Composer(self.evaluator.network, start, list(ends.values()), GRADIENTS)
        for index, name in enumerate(ends):
            alone([1.0 if index == k else 0.0 for k in range(len(ends))])
            values = self.evaluator.headline("validation", self.options.images)
            domain = label(sites[name].spec)
            if domain in values:
                own[domain] = self.evaluator.metrics.first.best([values[domain], own.get(domain, values[domain])])
        return own


def expected(options: SearchOptions, sites: int) -> int:
    """Return about how many combinations a search over this number of sites measures."""
    return len(options.steps or GRID) ** sites if options.by == "grid" else options.evaluations


def worth(values: Mapping[str, float], own: Mapping[str, float], higher: bool = True) -> float:
    """Return the smallest of the ratios values / `own` over the domains, plus a hundredth of their mean.

    `own`: the best single site's value. `higher`: whether larger values are better; else the ratios are `own` / values.
    `union`, and domains without a value or on which `own` is at most 0, do not count.
    """
    pairs = [(values[domain], best) for domain, best in own.items() if domain != UNION and best > 0 and domain in values]
    relative = [value / best if higher else best / max(value, TINY) for value, best in pairs]
    return min(relative) + 0.01 * statistics.fmean(relative) if relative else 0.0


def _grid(search: Search, given: Mapping[str, Alpha]) -> dict[str, Alpha]:
    best = best_on_grid(search.worth, search.options.steps or GRID, len(search.names))
    return dict(zip(search.names, best, strict=True))


def _powell(search: Search, given: Mapping[str, Alpha]) -> dict[str, Alpha]:
    layers, number = search.composer.layers if search.options.layers else [], len(search.names)

    def alphas(point: Sequence[float]) -> list[Alpha]:
        if not layers:
            return list(point)
        rows = [point[k * len(layers) : (k + 1) * len(layers)] for k in range(number)]
        return [dict(zip(layers, row, strict=True)) for row in rows]

    options = search.options
    start = [float(alpha) for alpha in given.values() for _ in layers or [""]]  # type: ignore[arg-type]  # numbers
    best = climb(lambda point: search.worth(alphas(point)), start, options.low, options.high, options.evaluations)
    return dict(zip(search.names, alphas(best), strict=True))


SEARCHES = {"grid": _grid, "powell": _powell}


def noted(view: View, options: SearchOptions, how: str) -> dict[str, Alpha]:
    """Return the result of the ledger's newest search if it had these options, sites and sums; else {}."""
    last = view.ledger.newest(SEARCHED)
    return last.body["coefficients"] if last and last.body.items() >= _key(view, options, how).items() else {}


def note(view: View, options: SearchOptions, how: str, coefficients: dict[str, Alpha]) -> dict[str, Alpha]:
    """Record a search's coefficients in the ledger, so that the same search is not repeated.

    Args:
        view: The slots whose sums were searched.
        options: The options of the search.
        how: How changes are combined.
        coefficients: The coefficients.

    Returns:
        The coefficients.
    """
    view.note(SEARCHED, {**_key(view, options, how), "coefficients": coefficients})
    return coefficients


def _key(view: View, options: SearchOptions, how: str) -> dict[str, Any]:
    """Return what identifies a search: the sums, the sites and the options."""
    sites = [site.name for site in view.sites]
    return {**view.slots.digest(), "sites": sites, "search": {"combine": how, **asdict(options)}}
