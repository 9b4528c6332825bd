"""A small run, trackers that go wrong, as an outside package would bring them, and readers of what the others wrote."""

import errno
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedloom.conf.schema import Config
from fedloom.sims.tracking.base import Line, Part, Tracker, Writer
from fedloom.sims.tracking.results import Results

ROUNDS = [1, 2, 3]
TREE = {
    "sites": [{"domain": "digits", "samples": 40, "name": "clinic"}, {"domain": "digits", "samples": 40, "invert": True}],
    "rounds": len(ROUNDS),
    "data": {"size": 8, "test_limit": 60},
    "network": {"name": "mlp", "widths": [16]},
    "objective": {"name": "sum_aggregation"},
    "strategy": {"name": "sum_aggregation"},
    "engine": {"name": "inline"},
}


class QuietLine(Line):
    """It keeps nothing."""

    def write(self, record: dict[str, Any]) -> None: ...

    def close(self, status: str) -> None: ...


class FullLine(Line):
    def write(self, record: dict[str, Any]) -> None:
        if record["round"] == 2:
            raise OSError(errno.ENOSPC, "No space left on device", "/full")

    def close(self, status: str) -> None:
        raise AssertionError("a tracker that has failed is left alone")


class HangingLine(FullLine):
    def write(self, record: dict[str, Any]) -> None:
        threading.Event().wait()


class Mute(BaseException):
    """As asyncio.CancelledError no Exception; and has no text."""

    def __str__(self) -> str:
        raise RuntimeError("nor this")


class MuteLine(FullLine):
    def write(self, record: dict[str, Any]) -> None:
        raise Mute


class OddWriter(Writer):
    def __init__(self, config: Config, line: type[Line]) -> None:
        super().__init__(config, 0)
        self.line = line

    def begin(self, part: Part) -> Line:
        return self.line()

    def results(self, results: Results) -> None:
        assert issubclass(self.line, QuietLine), "a tracker that has failed is left alone"


@dataclass(frozen=True)
class Absent(Tracker):
    """Its package may be gone."""

    def open(self, config: Config) -> Writer:
        return OddWriter(config, QuietLine)


class GreedyLine(QuietLine):
    def write(self, record: dict[str, Any]) -> None:
        record.clear()


@dataclass(frozen=True)
class Greedy(Tracker):
    """It empties the records it receives."""

    def open(self, config: Config) -> Writer:
        return OddWriter(config, GreedyLine)


@dataclass(frozen=True)
class Full(Tracker):
    """The disk is full in round 2."""

    def open(self, config: Config) -> Writer:
        return OddWriter(config, FullLine)


@dataclass(frozen=True)
class Hanging(Tracker):
    """It never comes back."""

    def open(self, config: Config) -> Writer:
        return OddWriter(config, HangingLine)


@dataclass(frozen=True)
class Muted(Tracker):
    """It raises what is no Exception."""

    def open(self, config: Config) -> Writer:
        return OddWriter(config, MuteLine)


@dataclass(frozen=True)
class Nowhere(Tracker):
    """The package it says it needs is inside one that is not there."""

    package = "there_is_none.of_it"

    def open(self, config: Config) -> Writer:
        return OddWriter(config, QuietLine)


def read_events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()
