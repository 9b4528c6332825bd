"""Read the first metric from records of metrics.jsonl and summaries.

The default metric is accuracy: a record has `accuracy` by domain, a summary by network and domain. With other metrics, both
also have `scores` by metric, the first configured one first, and the summary has the facts of the first one in `metric`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedloom.conf.metrics import ACCURACY, Facts, facts_of

SCORES, METRIC = "scores", "metric"


def _first(record: Mapping[str, Any]) -> str:
    """Return the name of the first metric: the one that `metric` names, as canonical JSON sorts the others; "": accuracy."""
    scores, stored = record.get(SCORES) or {}, (record.get(METRIC) or {}).get("name")
    return str(stored) if stored in scores else next(iter(scores), "")


def headline(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first metric's values in a record by domain, in a summary by network and domain; empty if not measured."""
    name = _first(record)
    return (record[SCORES][name] if name else record.get(ACCURACY)) or {}


def as_headline(record: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return entries of a record that have `values` as its first metric's."""
    return {SCORES: {name: values}} if (name := _first(record)) else {ACCURACY: values}


def first_metric(record: Mapping[str, Any]) -> Facts:
    """Return the first metric of a record or a summary."""
    facts = facts_of(_first(record) or ACCURACY)
    stored = record.get(METRIC) or {}
    if stored.get("name") != facts.name:
        return facts
    return replace(facts, higher_is_better=bool(stored.get("higher_is_better", True)), share=bool(stored.get("share")))


def metric_of(summary: Mapping[str, Any], records: Any = ()) -> Facts:
    """Return the first metric of a run, from its summary or, before it is measured, from its records."""
    if summary.get(SCORES):
        return first_metric(summary)
    return next((first_metric(record) for record in records if record.get(SCORES)), facts_of(ACCURACY))


def value_in(record: Mapping[str, Any], metric: str) -> float | None:
    """Return a metric's value of a round on the validation examples of all domains; None if it was not measured."""
    table = (record.get(SCORES) or {}).get(metric) or (record.get(ACCURACY) if metric == ACCURACY else {})
    return (table or {}).get("union")


def rounds_of(summary: Mapping[str, Any]) -> int | None:
    """Return the number of rounds after which a run ends: those of its configuration, or fewer if it stopped early."""
    return (summary.get("stopped") or {}).get("round", summary.get("rounds"))


def spot(entry: Mapping[str, Any]) -> float | None:
    """Return the first metric's value of a site in a summary's `per_site`; None if it has none."""
    return entry["score"] if "score" in entry else entry.get(ACCURACY)
