"""Build the tables of a comparison."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.conf.formatting import rounded
from fedloom.conf.metrics import Facts
from fedloom.sims.comparison.groups import UNION, Group
from fedloom.sims.comparison.statistics import CONFIDENCE, Difference, paired
from fedloom.sims.report.results import MAX_DOMAINS
from fedloom.sims.report.spread import Spread, mean_and_spread
from fedloom.sims.report.tables import Cell, Table, cut
from fedloom.sims.sweeps.names import text_of

MOST_PAIRED = 6  # up to so many rows, every pair is compared; else each row with the first
ONE_SEED = "One seed cannot show whether a difference is more than chance; run several seeds"
OTHER_SEEDS = "The rows have different seeds: compare them by paired differences, over common seeds"
COSTS = {"bytes_to_sites": 1e6, "bytes_from_sites": 1e6, "seconds": 1.0, "peak_memory": 1e6}  # and their units
MAX_VALUE = 60  # characters of a value in a table


@dataclass(frozen=True)
class Pair:
    """The difference of two rows' first metric on test examples, one - other, on the union of all domains."""

    one: str
    other: str
    difference: Difference
    metric: Facts

    def __repr__(self) -> str:
        return f"Pair({self.one} minus {self.other}: {_points(self.difference.mean, self.metric)} {self.metric.title})"


def domains_of(groups: Sequence[Group]) -> list[str]:
    """Return the domains on which at least one row was measured, without the union."""
    names = dict.fromkeys(name for group in groups for entry in group.entries for name in entry.accuracy)
    return [name for name in names if name != UNION]


def accuracy_rows(groups: Sequence[Group]) -> Table:
    """Return a table of each row's first metric on test examples: mean and standard deviation over seeds."""
    metric = groups[0].metric
    unit = "In %" if metric.share else "Plain numbers"
    columns = domains_of(groups)
    shown = columns[:MAX_DOMAINS] if len(columns) > 1 else []
    rows: list[list[Cell]] = [[group.label, len(group.seeds), *(_score(group, name) for name in [*shown, UNION])]
                              for group in groups]  # fmt: skip
    few = f" The first {MAX_DOMAINS} of {len(columns)} domains are shown." if len(columns) > len(shown) > 0 else ""
    note = f"{unit}: mean ± sample standard deviation over the seeds.{few}"
    if len(groups) > 1 and len({seed for group in groups for seed in group.seeds}) == 1:
        note = f"{unit}. {ONE_SEED}.{few}"
    elif len({frozenset(group.seeds) for group in groups}) > 1:
        note += f" {OTHER_SEEDS}."
    return Table(f"Test {metric.title}", ["", "seeds", *shown, UNION], rows, note)


def _score(group: Group, name: str) -> str:
    scores = group.scores(name)
    return mean_and_spread(list(scores.values()), group.metric.share) if scores else "-"


def pairs(groups: Sequence[Group]) -> list[Pair]:
    """Return the differences of all pairs of rows with common seeds; of many rows, only the pairs with the first row."""
    every = itertools.combinations(groups, 2) if len(groups) <= MOST_PAIRED else ((groups[0], one) for one in groups[1:])
    differences = [(other, one, paired(other.scores(), one.scores())) for one, other in every]
    return [
        Pair(one.label, other.label, difference, one.metric)
        for one, other, difference in differences
        if difference is not None
    ]


def difference_table(differences: Sequence[Pair]) -> Table:
    """Return a table of paired differences with their intervals; of shares, in percentage points."""
    metric = differences[0].metric
    rows: list[list[Cell]] = [[f"{pair.one} minus {pair.other}", pair.difference.n, _points(pair.difference.mean, metric),
                               _interval(pair.difference, metric)] for pair in differences]  # fmt: skip
    unit = f"In percentage points of test {metric.title}" if metric.share else f"Test {metric.title}"
    note = (f"{unit} on {UNION}, over the seeds that both rows share. Interval: "
            f"{CONFIDENCE:.0%} confidence, Student's paired t-test (it assumes normally distributed differences), without a "
            "correction for several comparisons.")  # fmt: skip
    if any(math.isnan(pair.difference.low) for pair in differences):
        note += " Without an interval (-): there is one seed, or the difference is the same with every seed."
    return Table("Paired differences", ["", "seeds", "difference", "interval"], rows, note)


def _points(value: float, metric: Facts) -> str:
    return "-" if math.isnan(value) else f"{100 * value:+.2f}" if metric.share else f"{value:+.3g}"


def _interval(difference: Difference, metric: Facts) -> str:
    return "-" if math.isnan(difference.low) else f"{_points(difference.low, metric)} to {_points(difference.high, metric)}"


def cost_table(groups: Sequence[Group]) -> Table:
    """Return a table of each row's traffic and time in all rounds, and of the server's peak memory."""
    rows: list[list[Cell]] = [
        [group.label, _rounds(group), *(amount(group.cost(what), unit) for what, unit in COSTS.items())] for group in groups
    ]
    note = ("Total over all rounds: mean ± standard deviation over runs. Compare seconds only for the same machine, engine "
            "and load: the wall-clock time of the rounds, without the start-up before them. Peak MB: the server's peak "
            "memory, including baselines, with engine.name=inline the sites, and what earlier runs of its process "
            "left.")  # fmt: skip
    return Table("Cost", ["", "rounds", "MB to sites", "MB from sites", "seconds", "peak MB"], rows, note)


def _rounds(group: Group) -> str:
    return ", ".join(map(str, sorted({len(entry.metrics) for entry in group.entries})))


def amount(cost: Spread, unit: float) -> str:
    """Return the mean of a cost and its deviation as text, both divided by `unit`."""
    if math.isnan(cost.mean):
        return "-"
    mean, deviation = cost.mean / unit, cost.deviation / unit
    if cost.n == 1 or not deviation:
        return rounded(mean, max(4, len(f"{mean:.0f}")))
    deviation_text = rounded(deviation, 2)
    decimals = len(deviation_text.partition(".")[2]) if "e" not in deviation_text else 0
    return f"{mean:.{decimals}f} ± {deviation_text}"  # the mean has as many decimals as its deviation


def what_differs(groups: Sequence[Group], differing: Sequence[str]) -> Table:
    """Return a table of each row's values of the `differing` keys; "-": the method does not have this option."""
    rows: list[list[Cell]] = [[group.label, *(_values(group, key) for key in differing)] for group in groups]
    return Table("Differing keys", ["", *differing], rows)


def _values(group: Group, key: str) -> str:
    values = (text_of(entry.everything[key]) if key in entry.everything else "-" for entry in group.entries)
    text = " | ".join(dict.fromkeys(values))
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 1]}…"


def runs_table(groups: Sequence[Group]) -> Table:
    """Return a table of all runs with their rows, seeds and accuracies."""
    rows: list[list[Cell]] = [[str(entry.folder), group.label, str(seed), entry.metric.text(entry.accuracy.get(UNION))]
                              for group in groups for seed, each in group.seeds.items() for entry in each]  # fmt: skip
    kept, note = cut(rows, "runs")
    return Table("Runs", ["run", "row", "seed", UNION], kept, note)
