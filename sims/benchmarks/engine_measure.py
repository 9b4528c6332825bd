"""Measure one case on one engine, in a fresh process that is watched from outside: a row of the result."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from fedloom.sims.benchmarks.engine_cases import CLIENTS, Case, Job
from fedloom.sims.benchmarks.measuring import MIB, flower_app
from fedloom.sims.benchmarks.processes import Processes
from fedloom.sims.federation.programs import BIN, environment, free_port
from fedloom.sims.report.tables import clean

PERIOD = 0.2
GRACE = 3.0  # seconds for a process to end by itself after its last round


@dataclass(frozen=True)
class Row:
    """The result of a case on an engine. None: not measured, and `note` says why.

    Attributes:
        case: The case.
        engine: The engine.
        round_s: Seconds of a round: the median, without the first round.
        tasks_per_s: Answered messages in a second.
        startup_s: Seconds from launching the process to the end of round 1.
        peak_rss_mb: Peak memory of the driver (the process with the ServerApp), in MiB.
        round_min_s: Seconds of the fastest round.
        round_max_s: Seconds of the slowest round.
        rounds: The number of measured rounds.
        workers_rss_mb: Memory of the workers, in MiB.
        object_store_mb: Memory of Ray's object store, in MiB.
        private_mb: Growth, after the first round, of the driver's memory that no other process shares, in MiB.
        note: Why a value is missing.
    """

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
    """Run a case in a new process, and return its row. All processes have ended afterwards, also after an error.

    Args:
        case: The case.
        engine: The engine.
        rounds: The number of rounds.
        limit: The most seconds.
    """
    with tempfile.TemporaryDirectory(prefix="fedloom-bench-") as temporary:
        job, launched = Job(case, engine, rounds, Path(temporary)), time.time()
        processes = Processes(is_driver=False)
        reason = _run(job, processes, limit)
        return _row(job, launched, processes.peaks(), reason)


def _run(job: Job, processes: Processes, limit: float) -> str:
    """Run the job until it ends or its time is up; return the reason if rounds are missing."""
    command = [sys.executable, "-P", "-m", "fedloom.sims.benchmarks.engine_run", str(job.write())]
    folder, variables, grace = None, {**os.environ, **_data()}, GRACE
    if job.engine == "stock":
        folder, variables, grace = _stock_app(job), environment({**_data(), **_stock_variables(job)}), 0.0
        options = f"num-supernodes={job.case.sites} client-resources-num-cpus=1"
        command = [str(BIN / "flwr"), "run", str(folder), "--stream", "--federation-config", options]
    with (job.folder / "log").open("wb") as log:
        child = subprocess.Popen(command, env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                 start_new_session=True)  # fmt: skip
        deadline, done = time.monotonic() + limit, False
        try:
            while child.poll() is None and time.monotonic() < deadline:
                processes.sample()
                if not done and len(job.measured()[0]) >= job.rounds:
                    done, deadline = True, time.monotonic() + grace
                time.sleep(PERIOD)
            return _reason(job, limit, ended=child.poll() is not None)
        finally:
            processes.stop()
            child.wait()


def _row(job: Job, launched: float, peaks: Mapping[str, int], reason: str) -> Row:
    rounds, reasons = job.measured()
    spoiled = f"{len(reasons)} rounds did not count ({clean(reasons[-1])})" if reasons else ""
    row = Row(job.case.name, job.engine, rounds=len(rounds), note="; ".join(filter(None, [reason, spoiled])))
    if not rounds:
        return row
    if later := [each["seconds"] for each in rounds[1:]]:
        median = statistics.median(later)
        row = replace(
            row, round_s=median, tasks_per_s=job.case.asked / median, round_min_s=min(later), round_max_s=max(later)
        )
    return replace(row, startup_s=rounds[0]["end"] - launched, peak_rss_mb=peaks["rss"] / MIB,
                   workers_rss_mb=peaks["workers"] / MIB, object_store_mb=peaks["object store"] / MIB,
                   private_mb=max(0, peaks["private"] - rounds[0]["private"]) / MIB)  # fmt: skip


def _reason(job: Job, limit: float, ended: bool) -> str:
    """Why rounds are missing: the time limit, or the last error that the process wrote."""
    done = len(job.measured()[0])
    if done >= job.rounds:
        return ""
    if not ended:
        return f"{done} of {job.rounds} rounds: stopped after {limit:.0f} s"
    lines = (job.folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
    last = [line for line in lines if "Error" in line] or [line for line in lines if line.strip()] or ["no message"]
    return f"{done} of {job.rounds} rounds: {clean(last[-1])[:200]}"


def _data() -> dict[str, str]:
    """The data folder's full path: a process may start in another folder."""
    folder = Path(os.environ.get("FEDLOOM_DATA") or "data").resolve()
    return {"FEDLOOM_DATA": str(folder)} if folder.is_dir() else {}


def _stock_app(job: Job) -> Path:
    components = {"serverapp": "fedloom.sims.benchmarks.engine_run:app", "clientapp": CLIENTS[job.case.kind]}
    return flower_app(job.folder / "app", components, str(job.folder / "job.json"))


def _stock_variables(job: Job) -> dict[str, str]:
    """A Flower home in the job's folder, and free ports."""
    ports = ("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT")
    return {"FLWR_HOME": str(job.folder / "flwr"), **{name: str(free_port()) for name in ports}}
