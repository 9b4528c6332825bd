"""Carry out planned runs: skip finished ones, resume interrupted ones and start the others."""

import dataclasses
import math
import numbers
from collections.abc import Sequence

from fedloom.conf import machine
from fedloom.conf.errors import UserError
from fedloom.server.run_folder.listing import busy
from fedloom.sims.operations.simulate import absolute_paths, refuse, simulate
from fedloom.sims.sweeps.display import Display, display_for
from fedloom.sims.sweeps.outcome import BUSY, KEPT, Outcome, attempt, check_again, failed, finished
from fedloom.sims.sweeps.plan import Planned, placed
from fedloom.sims.sweeps.worker_pool import WorkerPool

AUTO = "auto"
FEW_WORKERS = 2  # workers of a run of engine.name=ray that sets no number
RUN_BYTES = 2 * 2**30  # memory for a run


def ready(planned: Sequence[Planned], *, overwrite: bool = False) -> list[Planned]:
    """Return the runs, marked as done or set to resume or to start, by their folders. Raise UserError if one cannot work."""
    runs = [placed(dataclasses.replace(run, config=absolute_paths(run.config)), overwrite) for run in planned]
    for run in runs:
        if not run.done and (overwrite or not busy(run.folder)):
            _refuse(run)
    return runs


def runs_at_once(parallel: int | str, planned: Sequence[Planned]) -> int:
    """Return how many runs to carry out at the same time. `parallel`: a number from 1, or "auto": as many as fit.

    Raises UserError for other values.
    """
    if parallel != AUTO:
        number = int(parallel) if isinstance(parallel, str) and parallel.isdecimal() else parallel
        if isinstance(number, str | bool) or not isinstance(number, numbers.Integral) or number < 1:
            raise UserError(f"parallel: got {parallel!r}, takes a whole number of at least 1, or {AUTO}")
        return min(int(number), len(planned))
    engines = [run.config.engine for run in planned]
    if any(engine.name == "flower" or engine.address for engine in engines):
        return 1  # they share one federation or cluster
    cores = max(math.ceil((engine.workers or FEW_WORKERS) * engine.num_cpus) if engine.name == "ray" else engine.threads
                for engine in engines)  # fmt: skip
    fitting = min(machine.cores() // max(1, cores), machine.memory() // RUN_BYTES)
    return max(1, min(fitting, len(planned)))


def _refuse(run: Planned) -> None:
    try:
        refuse(run.config)
    except UserError as error:
        raise UserError(f"{error} (the run {run.name})") from None


def carry_out(
    planned: Sequence[Planned], parallel: int = 0, *, quiet: bool = False, json_output: bool = False
) -> list[Outcome]:
    """Carry out the runs, and return their outcomes in the same order.

    `parallel` is the number of processes; each carries out one run at a time. 0: in this process.
    A KeyboardInterrupt stops all runs within seconds. The same sweep resumes them later.
    """
    missing = [run for run in planned if not run.done]
    done = {run.name: finished(run, KEPT) for run in planned if run.done}
    with display_for(quiet, len(planned), len(done), json_output) as display:
        if not quiet:
            display.say("", _opening(len(planned), len(done), parallel))
        done |= _run_all(missing, parallel, display)
        seen = {run.name: check_again(run) for run in missing if done[run.name].status == BUSY}
        done |= {name: outcome for name, outcome in seen.items() if isinstance(outcome, Outcome)}
        done |= _run_all([outcome for outcome in seen.values() if isinstance(outcome, Planned)], parallel, display)
    return [done[run.name] for run in planned]


def _opening(total: int, kept: int, parallel: int) -> str:
    """Return a line that says what the sweep will do."""
    done = f", {kept} of them already finished" if kept else ""
    return f"{total} run{'s' * (total > 1)}{done}, {max(1, min(parallel, total - kept))} at a time"


def _run_all(tasks: Sequence[Planned], parallel: int, display: Display) -> dict[str, Outcome]:
    """Carry out the runs in processes or here. Return the outcome of each by its name."""
    if parallel and tasks:
        return WorkerPool(min(parallel, len(tasks)), display).run(tasks)
    return {task.name: _run_here(task, display) for task in tasks}


def _run_here(task: Planned, display: Display) -> Outcome:
    """Carry out a run in this process."""
    now = check_again(task)
    if isinstance(now, Planned):
        listener = display.begin(now.name)
        reason = attempt(lambda: simulate(now.config, listener=listener))
        outcome = failed(now, reason) if reason else finished(now)
    else:
        outcome = now
    display.end(task.name, outcome)
    return outcome
