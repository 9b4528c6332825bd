"""One case on one engine, in a fresh process, watched from outside: a row of the result."""

import os
import statistics
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedloom.sims.benchmarks import engine_run, engine_stock
from fedloom.sims.benchmarks.engine_cases import Case
from fedloom.sims.benchmarks.engine_job import Job, Measured, read_measured
from fedloom.sims.benchmarks.engine_watch import MARK, Peaks, Watch
from fedloom.sims.report.tables import clean

PERIOD = 0.2
GRACE = 3.0  # seconds for a process to end by itself after its last round
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """What was measured; None where it was not, and `note` says why. Memory in MiB."""

    case: str
    engine: str
    round_s: float | None = None  # the median, without the first round
    tasks_per_s: float | None = None
    startup_s: float | None = None  # from launching the process to the end of round 1
    peak_rss_mb: float | None = None  # of the process with the ServerApp
    round_min_s: float | None = None
    round_max_s: float | None = None
    rounds: int = 0
    workers_rss_mb: float | None = None
    object_store_mb: float | None = None
    private_mb: float | None = None
    note: str = ""


def measure(case: Case, engine: str, rounds: int, limit: float) -> Row:
    """Run the rounds within `limit` seconds; no process of it is left at the end, whatever happens."""
    with tempfile.TemporaryDirectory(prefix="fedloom-bench-") as temporary:
        job = Job(case, engine, rounds, Path(temporary))
        launched = time.time()
        peaks, reason = _watched(job, limit)
        return _row(job, read_measured(job), launched, peaks, reason)


def _watched(job: Job, limit: float) -> tuple[Peaks, str]:
    """Start the job and look at it until it ends; the reason if it did not get through."""
    stock = job.engine == "stock"
    command = COMMANDS.get(job.engine, engine_run.command)(job, job.write())
    watch = Watch(uuid.uuid4().hex)
    environment = {**os.environ, **_data(), **(engine_stock.environment(job) if stock else {}), MARK: watch.mark}
    with (job.folder / "log").open("wb") as log:
        folder = job.folder / "app" if stock else None
        child = subprocess.Popen(
            command, env=environment, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            ended = _wait(child, job, watch, limit, grace=0.0 if stock else GRACE)
        finally:
            watch.stop()
            child.wait()
    return watch.peaks, "" if _complete(job) else _reason(job, limit, ended)


def _wait(child: subprocess.Popen[bytes], job: Job, watch: Watch, limit: float, grace: float) -> bool:
    """Sample until the process ends (True), or its rounds are done and the grace is over, or time is up."""
    deadline, done = time.monotonic() + limit, False
    while child.poll() is None:
        watch.sample()
        if not done and _complete(job):
            done, deadline = True, time.monotonic() + grace
        if time.monotonic() >= deadline:
            return False
        time.sleep(PERIOD)
    return True


def _row(job: Job, measured: Measured, launched: float, peaks: Peaks, reason: str) -> Row:
    spoiled = f"{len(measured.spoiled)} rounds did not count ({clean(measured.spoiled[-1])})" if measured.spoiled else ""
    note = "; ".join(filter(None, [reason, spoiled]))
    row = Row(job.case.name, job.engine, rounds=len(measured.seconds), note=note)
    if not measured.seconds:
        return row
    later = measured.seconds[1:]
    if later:
        middle = statistics.median(later)
        row = replace(row, round_s=middle, tasks_per_s=job.case.asked / middle)
        row = replace(row, round_min_s=min(later), round_max_s=max(later))
    private = max(0, peaks.private - measured.private)
    memory = [amount / MIB for amount in (peaks.driver, peaks.workers, peaks.store, private)]
    names = ("peak_rss_mb", "workers_rss_mb", "object_store_mb", "private_mb")
    return replace(row, startup_s=measured.ends[0] - launched, **dict(zip(names, memory, strict=True)))


def _complete(job: Job) -> bool:
    return len(read_measured(job).seconds) >= job.rounds


def _reason(job: Job, limit: float, ended: bool) -> str:
    """Why there are fewer rounds than asked for: time, or the last line that the process wrote."""
    done = f"{len(read_measured(job).seconds)} of {job.rounds} rounds"
    if not ended:
        return f"{done}: stopped after {limit:.0f} s"
    lines = (job.folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
    told = [line for line in lines if "Error" in line] or [line for line in lines if line.strip()] or ["it said nothing"]
    return f"{done}: {clean(told[-1])[:200]}"


def _data() -> dict[str, str]:
    """The data folder as it is seen from here: a process may start elsewhere."""
    folder = Path(os.environ.get("FEDLOOM_DATA") or "data").resolve()
    return {"FEDLOOM_DATA": str(folder)} if folder.is_dir() else {}


COMMANDS: dict[str, Callable[[Job, Path], Any]] = {"stock": engine_stock.command}
