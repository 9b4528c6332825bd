"""What a tracker is: options of a configuration, and the writer that they open once a run has begun."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedloom.conf.registry import Registry
from fedloom.conf.schema import Config
from fedloom.conf.typed import option
from fedloom.sims.tracking.results import Results

MAIN = "main"  # the part of a run that is none of its baselines
FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"


@dataclass(frozen=True)
class Part:
    """A run's own method, one of its baselines, or a network trained again, with its rounds counted from 1.

    `name`: its folder within the run's, such as baselines/fedavg, or MAIN. `id`: another one after each rollback.
    """

    name: str
    id: str
    committed: int  # its last committed round


class Line(ABC):
    """Where a tracker keeps one part. `written`: the last round that it holds."""

    written = 0

    @abstractmethod
    def write(self, record: dict[str, Any]) -> None:
        """Keep a round: its line of metrics.jsonl. Rounds come in order, each once."""

    @abstractmethod
    def close(self, status: str) -> None:
        """Bring all to its place; the part is FINISHED, INTERRUPTED or FAILED."""


class Writer(ABC):
    """A tracker at work on one run, in a thread of its own. Whatever it raises ends it, not the run."""

    def __init__(self, config: Config, sites: int) -> None:
        self.config, self.folder = config, Path(config.run.root) / config.run.name
        self.sites = {site.name for site in config.roster[:sites]}
        self.lines: dict[str, Line] = {}
        self._ids: dict[str, str] = {}
        self._now = MAIN

    @abstractmethod
    def begin(self, part: Part) -> Line:
        """A new line for a part, or the one that an earlier process left, as far as it is written."""

    @abstractmethod
    def results(self, results: Results) -> None:
        """Keep what came out, in place of what came out before."""

    def part(self, part: Part, records: Sequence[dict[str, Any]]) -> None:
        """From now on rounds are those of this part, of which these are committed."""
        if self._ids.get(part.name) != part.id:
            if before := self.lines.pop(part.name, None):
                before.close(INTERRUPTED)
            self.lines[part.name], self._ids[part.name] = self.begin(part), part.id
        self._now = part.name
        for record in records:
            self.round(record)

    def round(self, record: dict[str, Any]) -> None:
        """A round of the present part is committed."""
        line = self.lines[self._now]
        if record["round"] > line.written:
            line.write(record)
            line.written = record["round"]

    def close(self, status: str) -> None:
        """Nothing more comes."""
        for line in self.lines.values():
            line.close(status)


@dataclass(frozen=True)
class Tracker(ABC):
    """A tracker's options. `package`: the module it needs, if any; `extra`: of fedloom, that brings it."""

    package: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    sites: int = option(100, "how many sites have metrics of their own: the first ones", low=0)

    @abstractmethod
    def open(self, config: Config) -> Writer:
        """A writer for a run whose folder is there."""


TRACKERS: Registry[Tracker] = Registry("tracker", Tracker, "fedloom.sims.tracking", {
    "csv_files": "csv", "mlflow": "mlflow", "tensorboard": "tensorboard", "wandb": "wandb",
})  # fmt: skip
