"""One measurement as files in a folder of its own: the job that a fresh process is given, and the rounds it has measured."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedloom.clients.storage.states import write_bytes
from fedloom.conf.schema import Config
from fedloom.sims.benchmarks.engine_cases import Case

MOST_SPOILED = 3


@dataclass(frozen=True)
class Job:
    """`rounds` rounds of a case on an engine."""

    case: Case
    engine: str
    rounds: int
    folder: Path

    def write(self) -> Path:
        """Put the job into its folder; returns the file."""
        path = self.folder / "job.json"
        write_bytes(path, json.dumps({**asdict(self), "folder": str(self.folder)}).encode())
        return path

    def config(self) -> Config:
        """The configuration of the case."""
        return self.case.config(self.folder, self.engine)


@dataclass(frozen=True)
class Measured:
    """What the process wrote so far: seconds of each round, when each ended, and private bytes before the first.

    `spoiled`: why rounds did not count, in which a reply failed.
    """

    seconds: tuple[float, ...] = ()
    ends: tuple[float, ...] = ()
    private: int = 0
    spoiled: tuple[str, ...] = ()


def read_job(path: Path) -> Job:
    """The inverse of Job.write."""
    told = json.loads(path.read_text(encoding="utf-8"))
    return Job(Case(**_tuples(told["case"])), told["engine"], told["rounds"], Path(told["folder"]))


def keep(job: Job, rounds: Iterator[float | str]) -> None:
    """Run the job's rounds; what is measured is written after each, so that it outlasts a process that is stopped.

    A round gives its seconds, or why it does not count. Raises RuntimeError at the third that does not.
    """
    measured = Measured(private=private_bytes(os.getpid()))
    for taken in rounds:
        if isinstance(taken, str):
            measured = replace(measured, spoiled=(*measured.spoiled, taken))
        else:
            measured = replace(measured, seconds=(*measured.seconds, taken), ends=(*measured.ends, time.time()))
        write_bytes(job.folder / "measured.json", json.dumps(asdict(measured)).encode())
        if len(measured.spoiled) == MOST_SPOILED:
            raise RuntimeError(taken)
        if len(measured.seconds) == job.rounds:
            return


def read_measured(job: Job) -> Measured:
    """What is there so far; nothing if no round has ended."""
    try:
        told = json.loads((job.folder / "measured.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Measured()
    return Measured(**_tuples(told))


def private_bytes(pid: int) -> int:
    """Memory that belongs to this process alone (what it shares, such as the object store, is not counted)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def _tuples(told: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists as the tuples they were."""
    return {name: tuple(item) if isinstance(item, list) else item for name, item in told.items()}
