"""What the tables are made of: runs that are made once, and what is found of each, on disk."""

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
from fedloom.sims.experiments.kept import fingerprint
from fedloom.sims.experiments.study import Study
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


@dataclass(frozen=True)
class ComponentsStudy(Study):
    """A preset's runs, in a folder. `only`: the tasks that are asked for. `overrides`: of every run."""

    overrides: Sequence[str] = ()

    @property
    def size(self) -> Size:
        """Tasks and budgets of the preset."""
        return SIZES[self.preset]

    @property
    def tasks(self) -> Mapping[str, Task]:
        """Those that are asked for, the first one first."""
        return {name: task for name, task in self.size.tasks.items() if not self.only or name in self.only}

    @property
    def first(self) -> str:
        """The task of the tables on details."""
        return next(iter(self.tasks))

    def network(self, task: str) -> dict[str, Any]:
        """The section `network` of a task's runs."""
        return dict(load(EXPERIMENT, _lines({**self.size.settings, **self.size.tasks[task].all})).network)

    def found(self, task: str, settings: Settings, seed: int) -> Found:
        """Of a run of a task with these settings, which win over the task's; from disk if it was made before."""
        keys = {**self.size.settings, **self.size.tasks[task].all, **_turned(settings, self.size.tasks[task].turns)}
        lines = [*_lines(keys), *self.overrides, f"seed={seed}"]
        name = f"{task}-{seed}-{fingerprint(lines)}"

        def line(fields: Mapping[str, Any]) -> str:
            found, shown = Found(**fields), " ".join(f"{key}={value}" for key, value in settings.items() if key != "sites")
            return f"{task}, seed {seed}, {shown}: own {found.own:.1%}, exchanged {found.exchanged:.1%}"

        return Found(**self.once(name, lines, lambda: dataclasses.asdict(self._made(name, lines)), line))

    def each(self, task: str, settings: Settings, seeds: int) -> list[Found]:
        """Of every seed."""
        return [self.found(task, settings, seed) for seed in range(seeds)]

    def upper(self, task: str, seeds: int) -> list[float]:
        """Own-task accuracy of sites that train by themselves, each with a rotation head that nobody else has."""
        settings = {"objective.auxiliary": ["rp"], "objective.pull": 0.0}
        alone = [{**settings, "sites": [site]} for entry in self.size.tasks[task].sites for site in _single(entry)]
        return [statistics.fmean(self.found(task, site, seed).own for site in alone) for seed in range(seeds)]

    def _made(self, name: str, lines: Sequence[str]) -> Found:
        """The run's folder is erased when all is found."""
        run = [f"run.root={self.folder / 'runs'}", f"run.name={name}", "run.overwrite=true", "baselines=[]"]
        config = _watched_last(load(EXPERIMENT, [*lines, *run]))
        with erased_run(config) as (summary, path):
            [matrix] = summary["recombination"].values()
            return Found(matrix["accuracy"], matrix["bytes"], matrix["fedavg_bytes"], **looks(config, path))


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


def _single(entry: Settings) -> list[Settings]:
    """The sites of an entry, each as the only one; those that divide a domain are alike but for chance, one is enough."""
    return [{key: value for key, value in entry.items() if key != "count"}]


def shown(results: Sequence[Found], what: str) -> str:
    """An accuracy in %, mean and standard deviation over seeds; "-" where there is none."""
    values = [getattr(result, what) for result in results]
    return "-" if None in values else mean_and_spread(values)


def way(results: Sequence[Found], upper: Sequence[float], classes: int) -> str:
    """How much of the way from chance to the upper bound the exchanged heads reach, in %."""
    chance = 1.0 / classes
    shares = [(result.exchanged - chance) / (top - chance) if top > chance else math.nan
              for result, top in zip(results, upper, strict=True)]  # fmt: skip
    return mean_and_spread(shares)
