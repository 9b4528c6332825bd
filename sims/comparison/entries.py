"""Read the runs and baselines to compare from their folders."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from fedloom.conf.errors import UserError
from fedloom.conf.metrics import Facts
from fedloom.conf.schema import Config
from fedloom.server.run_folder.layout import BASELINES, CONFIG, FINISHED, METRICS
from fedloom.server.run_folder.listing import RUNNING, config_fault, is_run, read_config, searched, status
from fedloom.server.run_folder.results_schema import checked_metrics, checked_summary, seconds_of, summary_fault, traffic_of
from fedloom.server.run_folder.scores import headline, metric_of, rounds_of
from fedloom.sims.comparison.options import DEFAULT, unset_options, values_of
from fedloom.sims.report.results import accuracies, has_aggregate, shown, which

NOT_METHOD = ("run", "seed", "baselines", "experiment", "engine", "tracking")  # sections that do not describe the method
NOT_METHOD_KEYS = ("data.root", "data.download", "evaluation.batch", "evaluation.every", "evaluation.metrics")
COSTS = ("bytes_to_sites", "bytes_from_sites", "seconds", "peak_memory")
DATA = ("data.", "sites", "population")  # keys of the training data


@dataclass(frozen=True)
class Entry:
    """A run or one of its baselines, read from its folder.

    Attributes:
        folder: The folder.
        config: Its configuration.
        summary: The content of summary.json.
        metrics: The lines of metrics.jsonl.
        baseline: Whether it is a baseline.
        unset: Options of its classes that only other runs set, with unknown defaults.
    """

    folder: Path
    config: Config
    summary: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    baseline: bool
    unset: Sequence[str] = ()

    def __repr__(self) -> str:
        return f"Entry({str(self.folder)!r})"

    @cached_property
    def keys(self) -> dict[str, Any]:
        """The configuration's values that describe data and method, by dotted keys: without folder, engine and seed."""
        return {key: value for key, value in self.everything.items()
                if key.partition(".")[0] not in NOT_METHOD and key not in NOT_METHOD_KEYS}  # fmt: skip

    @cached_property
    def everything(self) -> dict[str, Any]:
        """All values of the configuration, by dotted keys, with defaults (sims.comparison.options)."""
        metric = self.metric.name
        values = values_of(self.config, [metric, *(name for name in self.summary.get("scores") or {} if name != metric)])
        return values | dict.fromkeys(self.unset, DEFAULT)

    def value(self, key: str) -> Any:
        """Return the value of a dotted key; "default" for an option that the configuration's classes do not have."""
        return self.everything.get(key, DEFAULT)

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
        peak = float((self.summary.get("resources") or {}).get("peak_memory", math.nan))
        sent, received = (sum(self.bytes(direction).values()) for direction in (0, 1))
        costs = (sent, received, seconds_of(self.metrics)) if self.metrics else (math.nan, math.nan, math.nan)
        return dict(zip(COSTS, (*costs, peak), strict=True))


def entries_of(paths: Sequence[Path]) -> tuple[list[Entry], list[str]]:
    """Return the runs in these folders with their baselines, each once, and a note for each damaged or unfinished one.

    Raises UserError for a folder without runs.
    """
    folders: dict[Path, Path] = {}
    faults: dict[Path, str] = {}
    for path in paths:
        if not (found := dict(searched(path))):
            raise UserError(f"{path}: contains no run; name folders of runs, or a folder that contains runs")
        for folder, fault in found.items():
            if fault:
                faults[folder.resolve()] = fault
            else:
                folders.setdefault(folder.resolve(), folder)
    states = {path: status(path) for path in folders.values() if not summary_fault(path)}
    unfinished = {path: state for path, state in states.items() if state != FINISHED}
    notes = [_unfinished_note(path, state) for path, state in unfinished.items()]
    members = [member for path in folders.values() if path not in unfinished for member in _members(path, faults)]
    entries, odd = _readable(members)
    damaged_notes = [f"{fault}; left out" for fault in faults.values()]
    kept = [entry for entry in entries if entry.accuracy]
    return _completed(kept), [*notes, *damaged_notes, *odd, *_unmeasured_notes(entries)]


def _unfinished_note(path: Path, state: str) -> str:
    what = "compare again when it has ended" if state == RUNNING else f"finish it with `fedloom resume {path}`"
    reason = "it failed" if state == "failed" else f"it is {state}"
    return f"{path}: left out, because {reason}; {what}"


def _members(path: Path, faults: dict[Path, str]) -> Iterator[tuple[Path, bool]]:
    """Yield the folder of a run and of its baselines, and whether it is a baseline. Add damaged ones to `faults`."""
    yield path, False
    for inner in sorted((path / BASELINES).glob("*")):
        if is_run(inner):
            yield inner, True
        elif fault := config_fault(inner):
            faults[inner] = fault


def _readable(members: Sequence[tuple[Path, bool]]) -> tuple[list[Entry], list[str]]:
    """Return the entries of the folders, and a note for each folder with damaged files."""
    entries, odd = [], []
    for path, baseline in members:
        try:
            summary, metrics = checked_summary(path), checked_metrics(path)
            entries.append(_checked(Entry(path, read_config(path), summary, list(metrics.values()), baseline)))
        except UserError as error:
            odd.append(f"{error}; left out")
    return entries, odd


def _checked(entry: Entry) -> Entry:
    """Return the entry. Raises UserError for a named section, such as training.optimizer, of a wrong type."""
    try:
        _ = entry.everything
    except UserError as error:
        raise UserError(f"{entry.folder / CONFIG}: {error}") from None
    return entry


def _completed(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries, each with the options that others set for the same classes of the user."""
    unset = unset_options([entry.everything for entry in entries])
    return [replace(entry, unset=keys) if keys else entry for entry, keys in zip(entries, unset, strict=True)]


def _unmeasured_notes(entries: Sequence[Entry]) -> list[str]:
    return [
        f"{entry.folder}: left out, because it has no test {entry.metric.title}" for entry in entries if not entry.accuracy
    ]


def notes_on(entries: Sequence[Entry]) -> list[str]:
    """Return a note for each entry whose metrics.jsonl lacks rounds, or whose test values are not of its last network."""
    rounds = {entry.folder: (len(entry.metrics), rounds_of(entry.summary)) for entry in entries}
    incomplete = [f"{folder}: {METRICS} has {recorded} of {of} rounds; cost and curve cover only these"
                  for folder, (recorded, of) in rounds.items() if of is not None and recorded != of]  # fmt: skip
    best = {entry.folder: which(entry.summary) for entry in entries}
    return [
        *incomplete,
        *(f"{folder}: test values are those of its network {name}" for folder, name in best.items() if name),
    ]
