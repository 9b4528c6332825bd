"""The metrics at single sites, for the summary: spread over sites, by class, and the tables that reports draw."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from fedloom.clients.evaluation.accuracy import Score
from fedloom.clients.evaluation.metrics import Metrics, Sums
from fedloom.clients.evaluation.metrics.sums import moved_sums

MOST_CLASSES = 100  # of a confusion matrix in the summary
MOST_PAIRS = 4000  # rows of a site's predicted against true numbers


def spread_of_metrics(
    scores: Mapping[str, Score], metrics: Metrics, blocks: Mapping[str, tuple[int, int]]
) -> dict[str, Any]:
    """Summarise what was measured at sites, for `per_site` in summary.json.

    Args:
        scores: Each site's sums, from which its metrics follow.
        metrics: The configured metrics. The spread over sites is that of the first one.
        blocks: By site, its first class and the number of all classes, if sites have heads of different classes.

    Returns:
        The mean, deviation and deciles of the first metric; `classes`: right and all images of each class; `union`: every
        metric for all sites together; `sites`: every metric for each site. A site whose images do not define the first
        metric does not count in the spread.
    """
    values = {name: metrics.values(score.sums) for name, score in scores.items()}
    first = {name: each[metrics.first.name] for name, each in values.items() if metrics.first.name in each}
    rows = {name: _site(scores[name], values[name], metrics) for name in scores}
    total = metrics.added(
        moved_sums(score.sums, *blocks[name]) if name in blocks else score.sums for name, score in scores.items()
    )
    together = {"scores": metrics.values(total), "by_class": _by_class(metrics, total), **_drawn(total), **_never(total)}
    return {**_spread(first, metrics), "classes": _classes(scores), "union": together, "sites": rows}


def _spread(first: Mapping[str, float], metrics: Metrics) -> dict[str, Any]:
    if not first:
        return {"mean": None, "deviation": None, "deciles": [None] * 9, "worst": None, "best": None}
    ordered = sorted(first, key=lambda name: metrics.first.worth(first[name]))
    numbers = np.array(list(first.values()))
    ends = {end: {"site": name, "score": first[name]} for end, name in (("worst", ordered[0]), ("best", ordered[-1]))}
    deciles = [float(decile) for decile in np.quantile(numbers, np.arange(1, 10) / 10)]
    return {"mean": float(numbers.mean()), "deviation": float(numbers.std()), "deciles": deciles, **ends}


def _site(score: Score, values: Mapping[str, float], metrics: Metrics) -> dict[str, Any]:
    classes = {str(number): list(both) for number, both in score.classes.items()}
    return {"score": values.get(metrics.first.name), "images": score.images, "right": score.right, "classes": classes,
            "scores": dict(values), **_drawn(score.sums)}  # fmt: skip


def _classes(scores: Mapping[str, Score]) -> dict[str, list[int]]:
    totals: dict[int, list[int]] = {}
    for score in scores.values():
        for name, (right, images) in score.classes.items():
            before = totals.get(name, [0, 0])
            totals[name] = [before[0] + right, before[1] + images]
    return {str(name): totals[name] for name in sorted(totals)}


def _by_class(metrics: Metrics, sums: Sums) -> dict[str, dict[str, float]]:
    """Return the values by metric and class, without those that the examples do not define."""
    return {name: {str(number): value for number, value in enumerate(values) if value == value}
            for name, values in metrics.by_class(sums).items()}  # fmt: skip


def _never(sums: Sums) -> dict[str, list[int]]:
    """Return the classes or labels that test examples have, but that the network never predicts."""
    if "confusion" in sums:
        true, predicted = sums["confusion"].sum(1), sums["confusion"].sum(0)
    elif "labels" in sums:
        hits, false, _, missed = sums["labels"].T
        true, predicted = hits + missed, hits + false
    else:
        return {}
    return {"never_predicted": ((true > 0) & (predicted == 0)).nonzero().flatten().tolist()}


def _drawn(sums: Sums) -> dict[str, Any]:
    """Return the sums that reports draw as lists, if they are not too large."""
    drawn = {}
    if "confusion" in sums and len(sums["confusion"]) <= MOST_CLASSES:
        drawn["confusion"] = sums["confusion"].tolist()
    if "against" in sums and len(sums["against"]) <= MOST_PAIRS:
        drawn["against"] = sums["against"].tolist()
    return drawn
