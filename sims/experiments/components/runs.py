"""The federated runs of the tables. Each is made once, measured, and erased."""

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedloom.conf import load
from fedloom.conf.schema import Config
from fedloom.sims.experiments.components.feature_correlation import looks
from fedloom.sims.experiments.components.sizes import SIZES, Settings, Size, Task
from fedloom.sims.experiments.study import Study, fingerprint
from fedloom.sims.operations.scratch_run import erased_run
from fedloom.sims.report.spread import mean_and_spread

EXPERIMENT = "components"
ANOTHER = "mlp"  # with another network, the options of the first one are dropped
UPPER = "upper bound (own, with a rotation head of its own)"


@dataclass(frozen=True)
class Measurements:
    """The measurements of a run: `accuracy` [extractor's site, head's site], and the `bytes` that a site sends in a round.

    `own` and `exchanged` are its means on and off the diagonal. `correlation` is of the channels of two extractors,
    `permuted` in the best order. `missing` and `missing_exchanged` are accuracies on classes that sites lack, with their own
    and with other sites' heads; None if no site lacks a class.
    """

    accuracy: Sequence[Sequence[float]]
    bytes: int
    fedavg_bytes: int
    correlation: Sequence[float]
    permuted: float
    missing: float | None = None
    missing_exchanged: float | None = None

    @property
    def own(self) -> float:
        """The mean accuracy with the sites' own heads."""
        return statistics.fmean(row[index] for index, row in enumerate(self.accuracy))

    @property
    def exchanged(self) -> float:
        """The mean accuracy with other sites' heads; NaN for a run of one site."""
        cells = [cell for index, row in enumerate(self.accuracy) for other, cell in enumerate(row) if other != index]
        return statistics.fmean(cells) if cells else math.nan


def size_of(study: Study) -> Size:
    """Return the tasks and budgets of the preset."""
    return SIZES[study.preset]


def tasks_of(study: Study) -> Mapping[str, Task]:
    """Return the selected tasks."""
    return {name: task for name, task in size_of(study).tasks.items() if not study.only or name in study.only}


def first_task(study: Study) -> tuple[str, Task]:
    """Return the name and the task that the tables on details use."""
    return next(iter(tasks_of(study).items()))


def network_of(study: Study, task: str) -> dict[str, Any]:
    """Return the section `network` of a task's runs."""
    size = size_of(study)
    return dict(load(EXPERIMENT, _lines({**size.settings, **size.tasks[task].all})).network)


def measured(study: Study, task: str, settings: Settings, seed: int) -> Measurements:
    """Return the measurements of a run of a task with these settings, which replace the task's."""
    size = size_of(study)
    keys = {**size.settings, **size.tasks[task].all, **_turned(settings, size.tasks[task].turns)}
    lines = [*_lines(keys), *study.overrides, f"seed={seed}"]
    name = f"{task}-{seed}-{fingerprint(lines)}"
    label = f"{task}, seed {seed}, {' '.join(f'{key}={value}' for key, value in settings.items() if key != 'sites')}"

    def make() -> dict[str, Any]:
        run = [f"run.root={study.folder / 'runs'}", f"run.name={name}", "run.overwrite=true", "baselines=[]"]
        config = _watched_last(load(EXPERIMENT, [*lines, *run]))
        with erased_run(config) as (summary, path):
            [matrix] = summary["recombination"].values()
            return {**{key: matrix[key] for key in ("accuracy", "bytes", "fedavg_bytes")}, **looks(config, path)}

    return Measurements(**study.once(name, lines, make, label))


def each(study: Study, task: str, settings: Settings) -> list[Measurements]:
    """Return the measurements of every seed."""
    return study.each_seed(lambda seed: measured(study, task, settings, seed))


def upper_bound(study: Study, task: str) -> list[float]:
    """Return the own-task accuracy of sites that train alone, each with its own rotation head."""
    settings = {"objective.auxiliary": ["rp"], "objective.pull": 0.0}
    sites = [{key: value for key, value in site.items() if key != "count"} for site in size_of(study).tasks[task].sites]
    runs = [each(study, task, {**settings, "sites": [site]}) for site in sites]
    return [statistics.fmean(run.own for run in of_seed) for of_seed in zip(*runs, strict=True)]


def _lines(settings: Settings) -> list[str]:
    """Return settings as overrides, whole sections before their keys. Another network replaces the experiment's."""
    lines = [f"{key}={json.dumps(settings[key])}" for key in sorted(settings)]
    return [f"network.name={ANOTHER}", *lines] if "network" in settings else lines


def _turned(settings: Settings, turns: str) -> dict[str, Any]:
    """Return the settings, with as many rotations of each image as the task has."""
    key = "objective.auxiliary"
    if turns == "one" or key not in settings:
        return dict(settings)
    return {**settings, key: [{"name": "rp", "turns": turns} if task == "rp" else task for task in settings[key]]}


def _watched_last(config: Config) -> Config:
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, every=2 * config.rounds))


def shown(results: Sequence[Measurements], *fields: str) -> list[str]:
    """Return the mean and standard deviation over seeds of some fields, in %; "-" for None."""
    values = [[getattr(result, field) for result in results] for field in fields]
    return ["-" if None in accuracies else mean_and_spread(accuracies) for accuracies in values]


def way(results: Sequence[Measurements], upper: Sequence[float], classes: int) -> str:
    """Return how much of the way from chance to the upper bound exchanged heads reach, in %."""
    chance = 1.0 / classes
    shares = [(result.exchanged - chance) / (top - chance) if top > chance else math.nan
              for result, top in zip(results, upper, strict=True)]  # fmt: skip
    return mean_and_spread(shares)
