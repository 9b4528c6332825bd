"""Choose the best values of a sweep by values on validation examples, as means over seeds."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedloom.clients.evaluation.metrics import metrics_of
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.formatting import count
from fedloom.conf.metrics import Facts, facts_of
from fedloom.conf.schema import Config
from fedloom.sims.sweeps.names import label_of
from fedloom.sims.sweeps.outcome import Outcome, validation_of
from fedloom.sims.sweeps.plan import SEED


@dataclass(frozen=True)
class Best:
    """The best values of a sweep: `value` is the mean of the metric over their runs, in `folders`."""

    metric: Facts
    values: Mapping[str, Any]
    value: float
    folders: Sequence[Path]

    def __repr__(self) -> str:
        what = [self.metric.name, self.metric.text(self.value), label_of(self.values), count(len(self.folders), "run")]
        return f"Best({', '.join(filter(None, what))})"

    def line(self) -> str:
        """Return the choice as a line."""
        what = f": {label_of(self.values)}" if self.values else ""
        mean = f"mean of {count(len(self.folders), 'run')}" if len(self.folders) > 1 else str(self.folders[0])
        return f"best by validation {self.metric.title}{what}, {self.metric.text(self.value)} ({mean})"

    def as_json(self) -> dict[str, Any]:
        """Return the choice as plain values."""
        return {"metric": self.metric.name, "values": dict(self.values), "value": self.value,
                "runs": [str(folder) for folder in self.folders]}  # fmt: skip


def check_best(metric: str, config: Config) -> None:
    """Raise UserError if the runs of a sweep will not have validation values of the metric."""
    known = [each.facts.name for each in metrics_of(config).chosen if each.facts.number]
    if metric not in known:
        raise unknown("metric in --best", metric, known)
    if not config.data.validation:
        raise UserError("--best: needs validation examples; set data.validation above 0")


def best_of(outcomes: Sequence[Outcome], metric: str) -> Best:
    """Return the best values among finished runs. Runs that differ only in the seed count with their mean.

    Values with an unfinished run do not count. Without a seed in the sweep, each run counts alone.

    Raises:
        UserError: No run has validation values of the metric.
    """
    facts, groups = facts_of(metric), dict[str, list[Outcome]]()
    for outcome in outcomes:
        values = {key: value for key, value in outcome.values.items() if key != SEED}
        groups.setdefault(json.dumps(values, sort_keys=True), []).append(outcome)
    found: list[Best] = []
    for group in groups.values():
        scores = [None if outcome.missing else validation_of(outcome.folder, outcome.summary, metric) for outcome in group]
        numbers = [score for score in scores if score is not None]
        if len(numbers) == len(group):
            values = {key: value for key, value in group[0].values.items() if key != SEED}
            found.append(Best(facts, values, sum(numbers) / len(numbers), [outcome.folder for outcome in group]))
    if not found:
        raise UserError(f"best: no run has validation values of '{metric}'; list it in evaluation.metrics")
    return max(found, key=lambda each: facts.worth(each.value))
