"""A measurement's process, `python -m fedloom.sims.benchmarks.engine_run JOB`: a loop, or engine and ServerApp's side."""

import contextlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path

from fedloom.sims.benchmarks.engine_cases import LOOPS, VARIANTS
from fedloom.sims.benchmarks.engine_job import Job, keep, read_job
from fedloom.sims.benchmarks.engine_loop import loop_rounds
from fedloom.sims.benchmarks.engine_server import CLIENTS, ROUNDS
from fedloom.sims.engines.adapter import LocalGrid


def command(job: Job, path: Path) -> list[str]:
    """The command that runs the job."""
    return [sys.executable, "-P", "-m", "fedloom.sims.benchmarks.engine_run", str(path)]


def run(job: Job) -> None:
    """All rounds of the job, in this process."""
    if job.engine in LOOPS:
        with contextlib.closing(loop_rounds(job)) as rounds:
            keep(job, rounds)
        return
    with contextlib.closing(GRIDS[job.engine](job)) as grid:
        keep(job, ROUNDS[job.case.kind](job, grid))


def _inline(job: Job) -> LocalGrid:
    from fedloom.sims.engines.inline import InlineGrid

    module, _, attribute = CLIENTS[job.case.kind].partition(":")
    return InlineGrid(len(job.config().roster), job.folder, getattr(importlib.import_module(module), attribute))


def _ray(job: Job) -> LocalGrid:
    from fedloom.sims.engines import ray

    return ray.start(job.config(), CLIENTS[job.case.kind])


GRIDS: dict[str, Callable[[Job], LocalGrid]] = {"inline": _inline, "ray": _ray, **dict.fromkeys(VARIANTS, _ray)}

if __name__ == "__main__":
    run(read_job(Path(sys.argv[1])))
