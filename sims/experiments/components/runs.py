"""The federated runs that the tables are made of: each is made once, measured, and erased."""

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
ANOTHER = "mlp"  # options go with a network of another name
UPPER = "upper bound (own, with a rotation head of its own)"


@dataclass(frozen=True)
class Found:
    """What is found of a run. `accuracy` [extractor's site, head's site]; `bytes` that a site sends in a round.

    `own`, `exchanged`: its means on and off the diagonal. `correlation`: of both extractors' channels, and
    `permuted`: in the best order. `missing`, `missing_exchanged`: on classes that sites lack, with their own heads and with
    the other's; None where they lack none.
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
        return statistics.fmean(row[index] for index, row in enumerate(self.accuracy))

    @property
    def exchanged(self) -> float:
        """NaN of a run of one site."""
        cells = [cell for index, row in enumerate(self.accuracy) for other, cell in enumerate(row) if other != index]
        return statistics.fmean(cells) if cells else math.nan


def size_of(study: Study) -> Size:
    """Tasks and budgets of the preset."""
    return SIZES[study.preset]


def tasks_of(study: Study) -> Mapping[str, Task]:
    """The tasks that are asked for, the first one first."""
    return {name: task for name, task in size_of(study).tasks.items() if not study.only or name in study.only}


def first_task(study: Study) -> tuple[str, Task]:
    """The task of the tables on details, with its name."""
    return next(iter(tasks_of(study).items()))


def network_of(study: Study, task: str) -> dict[str, Any]:
    """The section `network` of a task's runs."""
    size = size_of(study)
    return dict(load(EXPERIMENT, _lines({**size.settings, **size.tasks[task].all})).network)


def found(study: Study, task: str, settings: Settings, seed: int) -> Found:
    """Of a run of a task with these settings, which win over the task's."""
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

    return Found(**study.once(name, lines, make, label))


def each(study: Study, task: str, settings: Settings) -> list[Found]:
    """Of every seed."""
    return study.each_seed(lambda seed: found(study, task, settings, seed))


def upper_bound(study: Study, task: str) -> list[float]:
    """Own-task accuracy of sites that train by themselves, each with a rotation head that nobody else has."""
    settings = {"objective.auxiliary": ["rp"], "objective.pull": 0.0}
    sites = [{key: value for key, value in site.items() if key != "count"} for site in size_of(study).tasks[task].sites]
    runs = [each(study, task, {**settings, "sites": [site]}) for site in sites]
    return [statistics.fmean(run.own for run in of_seed) for of_seed in zip(*runs, strict=True)]


def _lines(settings: Settings) -> list[str]:
    """As overrides; a whole section before its keys. Of the experiment's network nothing is left where there is another."""
    lines = [f"{key}={json.dumps(settings[key])}" for key in sorted(settings)]
    return [f"network.name={ANOTHER}", *lines] if "network" in settings else lines


def _turned(settings: Settings, turns: str) -> dict[str, Any]:
    """The settings, with as many turns of each image as a task asks for."""
    key = "objective.auxiliary"
    if turns == "one" or key not in settings:
        return dict(settings)
    return {**settings, key: [{"name": "rp", "turns": turns} if task == "rp" else task for task in settings[key]]}


def _watched_last(config: Config) -> Config:
    """The same, accuracies being measured at the end alone."""
    return dataclasses.replace(config, evaluation=dataclasses.replace(config.evaluation, every=2 * config.rounds))


def shown(results: Sequence[Found], *fields: str) -> list[str]:
    """Accuracies in %, mean and standard deviation over seeds; "-" where there is none."""
    values = [[getattr(result, field) for result in results] for field in fields]
    return ["-" if None in accuracies else mean_and_spread(accuracies) for accuracies in values]


def way(results: Sequence[Found], upper: Sequence[float], classes: int) -> str:
    """How much of the way from chance to the upper bound the exchanged heads reach, in %."""
    chance = 1.0 / classes
    shares = [(result.exchanged - chance) / (top - chance) if top > chance else math.nan
              for result, top in zip(results, upper, strict=True)]  # fmt: skip
    return mean_and_spread(shares)
