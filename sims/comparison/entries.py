"""Read the runs and baselines to compare from their folders."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fedloom.clients.networks.base import NETWORKS
from fedloom.clients.objectives.base import OBJECTIVES
from fedloom.conf.errors import UserError
from fedloom.conf.metrics import Facts
from fedloom.conf.registry import Registry
from fedloom.conf.schema import Config
from fedloom.conf.shorthand import fields_of
from fedloom.server.run_folder.layout import BASELINES, FINISHED, METRICS
from fedloom.server.run_folder.listing import is_run, read_config, runs_in, status
from fedloom.server.run_folder.results_schema import checked_metrics, checked_summary, traffic_of
from fedloom.server.run_folder.scores import headline, metric_of, rounds_of
from fedloom.server.strategies.base import STRATEGIES
from fedloom.sims.report.results import accuracies, has_aggregate, shown, which

NOT_METHOD = ("run", "seed", "baselines", "experiment", "engine")  # sections that do not describe the method
NOT_METHOD_KEYS = ("data.root", "data.download", "evaluation.batch", "evaluation.every", "evaluation.metrics")
DATA = ("data.", "sites", "population")  # keys of the training data
REGISTRIES: Mapping[str, Registry[Any]] = {"network": NETWORKS, "objective": OBJECTIVES, "strategy": STRATEGIES}
DEFAULT = "default"  # the value of a key without a known default that a configuration lacks


@dataclass(frozen=True)
class Entry:
    """A run or one of its baselines, read from its folder.

    Attributes:
        folder: The folder.
        config: Its configuration.
        summary: The content of summary.json.
        metrics: The lines of metrics.jsonl.
        baseline: Whether it is a baseline.
    """

    folder: Path
    config: Config
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    baseline: bool

    @cached_property
    def keys(self) -> dict[str, Any]:
        """The configuration's values that describe data and method, by dotted keys: without folder, engine and seed."""
        return {key: value for key, value in flat(dataclasses.asdict(self.config)).items()
                if key.partition(".")[0] not in NOT_METHOD and key not in NOT_METHOD_KEYS}  # fmt: skip

    @cached_property
    def everything(self) -> dict[str, Any]:
        """All values of the configuration, by dotted keys."""
        return flat(dataclasses.asdict(self.config))

    def value(self, key: str) -> Any:
        """Return the value of a dotted key: the configuration's, else the default of this option, else "default"."""
        if key in self.everything:
            return self.everything[key]
        section, _, option = key.rpartition(".")
        name = self.everything.get(f"{section}.name", "")
        registry = REGISTRIES.get(section)
        if registry is None or not (isinstance(name, str) and registry.shipped(name)):  # others' code is not imported here
            return DEFAULT
        field = fields_of(registry.get(name)).get(option)
        if field is None or field.default is not dataclasses.MISSING:
            return DEFAULT if field is None else field.default
        made = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        return made if isinstance(made, list | dict) else DEFAULT  # a section has its own keys

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """The first metric on test examples by domain and on the union: of the best or else the aggregated network,
        or the mean over the sites' own.
        """
        if has_aggregate(self.summary):
            return shown(self.summary)
        return next(iter(accuracies(self.summary).values()), {})

    @cached_property
    def metric(self) -> Facts:
        """The first metric."""
        return metric_of(self.summary, self.metrics)

    @cached_property
    def tested_on(self) -> dict[str, Any]:
        """The settings that determine the test examples, their classes and the first metric."""
        data, evaluation = self.config.data, self.config.evaluation
        variants = {(spec.domain, spec.rotation, spec.invert, tuple(spec.classes), spec.relabel)
                    for spec in (site.spec for site in self.config.roster)}  # fmt: skip
        own = {"sites": self.everything["sites"]} if evaluation.where == "sites" else {}
        return {"domains": sorted(variants), "data.heads": data.heads, "data.classes": data.classes,
                "data.test_limit": data.test_limit, "evaluation.where": evaluation.where,
                "evaluation.metrics": self.metric.name, **own}  # fmt: skip

    @cached_property
    def curve(self) -> dict[int, float]:
        """The first metric on validation examples of the union by round."""
        scores = {record["round"]: headline(record).get("union") for record in self.metrics}
        return {round: float(score) for round, score in scores.items() if score is not None}

    def bytes(self, direction: int) -> dict[int, int]:
        """Return the bytes of arrays by round: to the sites (`direction` 0) or from them (1)."""
        return {record["round"]: traffic_of(record)[direction] for record in self.metrics}

    @cached_property
    def cost(self) -> dict[str, float]:
        """Bytes to and from sites, and seconds, of all rounds; the server's peak memory in bytes (NaN: unknown)."""
        resources = self.summary.get("resources") or {}
        seconds = sum(float(record.get("seconds") or 0.0) for record in self.metrics)
        return {"bytes_to_sites": sum(self.bytes(0).values()), "bytes_from_sites": sum(self.bytes(1).values()),
                "seconds": seconds, "peak_memory": float(resources.get("peak_memory", math.nan))}  # fmt: skip


def entries_of(paths: Sequence[Path]) -> tuple[list[Entry], list[str]]:
    """Return the runs in these folders with their baselines, each once, and a note for each damaged or unfinished one.

    Raises UserError for a folder without runs.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        runs = list(runs_in(path))
        if not runs:
            raise UserError(f"{path}: contains no run; name folders of runs, or a folder that contains runs")
        for folder in runs:
            folders.setdefault(folder.resolve(), folder)
    unfinished = {path: state for path in folders.values() if (state := status(path)) != FINISHED}
    notes = [
        f"{path}: left out, because it is {state}; finish it with `fedloom resume {path}`"
        for path, state in unfinished.items()
    ]
    members = [member for path in folders.values() if path not in unfinished for member in _members(path)]
    entries, odd = _readable(members)
    kept = [entry for entry in entries if entry.accuracy]
    best = [
        f"{entry.folder}: test values are those of its network {name}" for entry in kept if (name := which(entry.summary))
    ]
    return kept, [*notes, *odd, *_unmeasured_notes(entries), *_incomplete_notes(kept), *best]


def _members(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of a run and of its baselines, and whether it is a baseline."""
    yield path, False
    for inner in sorted((path / BASELINES).glob("*")):
        if is_run(inner):
            yield inner, True


def _readable(members: Sequence[tuple[Path, bool]]) -> tuple[list[Entry], list[str]]:
    """Return the entries of the folders, and a note for each folder with damaged files."""
    entries, odd = [], []
    for path, baseline in members:
        try:
            summary, metrics = checked_summary(path), checked_metrics(path)
            entries.append(Entry(path, read_config(path), summary, list(metrics.values()), baseline))
        except UserError as error:
            odd.append(f"{error}; left out")
    return entries, odd


def _unmeasured_notes(entries: Sequence[Entry]) -> list[str]:
    return [
        f"{entry.folder}: left out, because it has no test {entry.metric.title}" for entry in entries if not entry.accuracy
    ]


def _incomplete_notes(entries: Sequence[Entry]) -> list[str]:
    """Return a note for each entry whose metrics.jsonl lacks rounds."""
    rounds = {entry.folder: (len(entry.metrics), rounds_of(entry.summary)) for entry in entries}
    return [f"{folder}: {METRICS} has {recorded} of {of} rounds; cost and curve cover only these"
            for folder, (recorded, of) in rounds.items() if of is not None and recorded != of]  # fmt: skip


def flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Return the values of nested sections by dotted keys. Lists are values."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        inside = isinstance(value, Mapping) and value
        values |= flat(value, f"{above}{key}.") if inside else {f"{above}{key}": value}
    return values
