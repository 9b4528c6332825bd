"""The tables of a comparison."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedloom.conf.formatting import rounded
from fedloom.sims.comparison.groups import UNION, Group, value_of
from fedloom.sims.comparison.statistics import CONFIDENCE, Difference, paired
from fedloom.sims.report.spread import Spread, mean_and_spread
from fedloom.sims.report.tables import MAX_DOMAINS, Cell, Table, cut, percent
from fedloom.sims.sweeps.names import text_of

MOST_PAIRED = 6  # rows of which every pair is told; of more, each with the first
ONE_SEED = "One seed: whether a difference is more than chance cannot be judged (--seeds 0,1,2 gives three)"
COSTS = {"bytes_to_sites": 1e6, "bytes_from_sites": 1e6, "seconds": 1.0, "peak_memory": 1e6}  # and what they are shown in
LONGEST = 60  # letters of a value in a table


@dataclass(frozen=True)
class Pair:
    """The difference one - other on the union."""

    one: str
    other: str
    difference: Difference


def domains_of(groups: Sequence[Group]) -> list[str]:
    """The domains that some row was measured on, without the union."""
    names = dict.fromkeys(name for group in groups for entry in group.entries for name in entry.accuracy)
    return [name for name in names if name != UNION]


def accuracy_rows(groups: Sequence[Group]) -> Table:
    """Mean and standard deviation over seeds, in %."""
    columns = domains_of(groups)
    shown = columns[:MAX_DOMAINS] if len(columns) > 1 else []
    rows: list[list[Cell]] = [[group.label, len(group.seeds), *(_score(group, name) for name in [*shown, UNION])]
                              for group in groups]  # fmt: skip
    few = f" The first {MAX_DOMAINS} of {len(columns)} domains are shown." if len(columns) > len(shown) > 0 else ""
    note = f"In %: mean ± standard deviation (of a sample) over the seeds.{few}"
    if len(groups) > 1 and len({seed for group in groups for seed in group.seeds}) == 1:
        note = f"In %. {ONE_SEED}.{few}"
    return Table("Test accuracy", ["", "seeds", *shown, UNION], rows, note)


def _score(group: Group, name: str) -> str:
    scores = group.scores(name)
    return mean_and_spread(list(scores.values())) if scores else "-"


def pairs(groups: Sequence[Group]) -> list[Pair]:
    """Differences on the union of all pairs of rows, of many rows from the first; where they have seeds in common."""
    every = itertools.combinations(groups, 2) if len(groups) <= MOST_PAIRED else ((groups[0], one) for one in groups[1:])
    found = [(other, one, paired(other.scores(), one.scores())) for one, other in every]
    return [Pair(one.label, other.label, difference) for one, other, difference in found if difference is not None]


def difference_table(found: Sequence[Pair]) -> Table:
    """The paired differences with their intervals, in percentage points."""
    rows: list[list[Cell]] = [[f"{pair.one} - {pair.other}", pair.difference.n, _points(pair.difference.mean),
                               _interval(pair.difference)] for pair in found]  # fmt: skip
    note = (f"In percentage points of test accuracy on {UNION}, over the seeds that both rows have. Interval: of "
            f"{CONFIDENCE:.0%} confidence, by Student's t over the pairs (it takes differences as normally distributed); "
            "not corrected for the number of pairs of rows.")  # fmt: skip
    return Table("Paired differences", ["", "seeds", "difference", "interval"], rows, note)


def _points(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:+.2f}"


def _interval(difference: Difference) -> str:
    return "-" if math.isnan(difference.low) else f"{_points(difference.low)} to {_points(difference.high)}"


def cost_table(groups: Sequence[Group]) -> Table:
    """Bytes and seconds of all rounds of a run, and the server's memory."""
    rows: list[list[Cell]] = [
        [group.label, _rounds(group), *(amount(group.cost(what), unit) for what, unit in COSTS.items())] for group in groups
    ]
    note = ("Of all rounds of a run: mean ± standard deviation over runs. Seconds compare where machine, engine and load "
            "are the same; the first round's have the workers' start in them. Peak MB: the most memory that the server held "
            "in a run, its baselines' included; with engine.name=inline the sites are in it.")  # fmt: skip
    return Table("Cost", ["", "rounds", "MB to sites", "MB from sites", "seconds", "peak MB"], rows, note)


def _rounds(group: Group) -> str:
    return ", ".join(map(str, sorted({len(entry.metrics) for entry in group.entries})))


def amount(found: Spread, unit: float) -> str:
    """A cost with its deviation, in a unit, as text."""
    if math.isnan(found.mean):
        return "-"
    mean, deviation = found.mean / unit, found.deviation / unit
    if found.n == 1 or not deviation:
        return rounded(mean, max(4, len(f"{mean:.0f}")))
    around = rounded(deviation, 2)
    places = len(around.partition(".")[2]) if "e" not in around else 0
    return f"{mean:.{places}f} ± {around}"  # the mean as exact as its deviation


def what_differs(groups: Sequence[Group], differing: Sequence[str]) -> Table:
    """Each row's values of the keys that differ among the rows."""
    rows: list[list[Cell]] = [[group.label, *(_values(group, key) for key in differing)] for group in groups]
    return Table("What differs", ["", *differing], rows)


def _values(group: Group, key: str) -> str:
    text = " | ".join(dict.fromkeys(text_of(value_of(entry, key)) for entry in group.entries))
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def runs_table(groups: Sequence[Group]) -> Table:
    """Every run that is in the rows."""
    rows: list[list[Cell]] = [[str(entry.folder), group.label, str(seed), percent(entry.accuracy.get(UNION))]
                              for group in groups for seed, each in group.seeds.items() for entry in each]  # fmt: skip
    kept, note = cut(rows, "runs")
    return Table("Runs", ["run", "row", "seed", UNION], kept, note)
