"""Base classes of trackers: the options (Tracker), the writer that they open for a run, and its lines."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedloom.conf.registry import Registry
from fedloom.conf.schema import Config
from fedloom.conf.typed import option
from fedloom.sims.tracking.results import Results

MAIN = "main"  # the part of a run that is not a baseline
FINISHED, INTERRUPTED, FAILED = "finished", "interrupted", "failed"


@dataclass(frozen=True)
class Part:
    """A part of a run whose rounds start at 1: the run's method, a baseline, or a retrained network.

    Attributes:
        name: Its folder within the run's folder, such as baselines/fedavg; MAIN for the run's method.
        id: Its id for the tracker, which changes after each rollback.
        committed: Its last committed round.
    """

    name: str
    id: str
    committed: int  # its last committed round


class Line(ABC):
    """A tracker's record of one `Part` of a run.

    Attributes:
        written: The last round that it contains.
    """

    written = 0

    @abstractmethod
    def write(self, record: dict[str, Any]) -> None:
        """Write a round. `record`: its line of metrics.jsonl. Rounds come in order, each once."""

    @abstractmethod
    def close(self, status: str) -> None:
        """Flush everything, and set the part's status: FINISHED, INTERRUPTED or FAILED."""


class Writer(ABC):
    """A tracker's writer for one run, in its own thread. An error stops the writer, not the run."""

    def __init__(self, config: Config, sites: int) -> None:
        self.config, self.folder = config, Path(config.run.root) / config.run.name
        self.sites = {site.name for site in config.roster[:sites]}
        self.lines: dict[str, Line] = {}
        self._ids: dict[str, str] = {}
        self._now = MAIN

    @abstractmethod
    def begin(self, part: Part) -> Line:
        """Return a `Line` that records this part: a new one, or the one that an earlier process of the run began."""

    @abstractmethod
    def results(self, results: Results) -> None:
        """Write the final results, in place of earlier ones."""

    def part(self, part: Part, records: Sequence[dict[str, Any]]) -> None:
        """Make `part` the current one, and write those of its committed rounds `records` that are missing."""
        if self._ids.get(part.name) != part.id:
            if before := self.lines.pop(part.name, None):
                before.close(INTERRUPTED)
            self.lines[part.name], self._ids[part.name] = self.begin(part), part.id
        self._now = part.name
        for record in records:
            self.round(record)

    def round(self, record: dict[str, Any]) -> None:
        """Write a committed round of the current part, unless its line already contains it."""
        line = self.lines[self._now]
        if record["round"] > line.written:
            line.write(record)
            line.written = record["round"]

    def close(self, status: str) -> None:
        """Close all lines with this status."""
        for line in self.lines.values():
            line.close(status)


@dataclass(frozen=True)
class Tracker(ABC):
    """A tracker's options. `package`: the module that it needs. `extra`: fedloom's extra that installs the package."""

    package: ClassVar[str] = ""
    extra: ClassVar[str] = ""
    sites: int = option(100, "number of sites with their own metrics: the first ones", low=0)

    @abstractmethod
    def open(self, config: Config) -> Writer:
        """Return a writer for a run. The run's folder exists."""


TRACKERS: Registry[Tracker] = Registry("tracker", Tracker, "fedloom.sims.tracking", {
    "csv_files": "csv", "mlflow": "mlflow", "tensorboard": "tensorboard", "wandb": "wandb",
})  # fmt: skip
