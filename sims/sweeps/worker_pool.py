"""Carry out runs in several processes. Each process carries out one run after another.

Each process uses only its part of the machine. It has its own process group, so Ctrl-C reaches only the parent. The parent
then stops them all.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

import torch

from fedloom.conf import machine
from fedloom.conf.loading import to_json
from fedloom.sims.engines.share import Share
from fedloom.sims.progress.listeners import Watcher
from fedloom.sims.sweeps.display import Display
from fedloom.sims.sweeps.events import FAILED, FINISHED, repeat
from fedloom.sims.sweeps.outcome import Outcome, check_again, failed, finished
from fedloom.sims.sweeps.plan import Planned

START = "from fedloom.sims.sweeps.worker_process import main; main()"
GRACE = 15.0  # seconds for an interrupted run to complete its folder and stop Ray
POLL = 0.2
VISIBLE = "CUDA_VISIBLE_DEVICES"
LOST_MESSAGE = (
    "its process ended ({}), possibly for lack of memory; repeat the command to resume after the last committed round"
)


@dataclass(frozen=True)
class Part:
    """A process's part of the machine: the numbers of its cores and GPUs, and its share of the memory."""

    cores: Sequence[int]
    gpus: Sequence[str]
    share: Share


def parts(runs: int, cores: Sequence[int], gpus: Sequence[str]) -> list[Part]:
    """Divide these cores and GPUs among `runs` runs. All are used. Runs share them if there are too few."""
    on_gpu = max(1, -(-runs // max(1, len(gpus))))
    share = Share(runs, on_gpu if gpus else 1)
    return [Part(_dealt(cores, index, runs), _dealt(gpus, index, runs), share) for index in range(runs)]


def _dealt(items: Sequence[Any], index: int, runs: int) -> Sequence[Any]:
    """Return the items for one of so many runs: adjacent ones; all of them for a single run."""
    if len(items) < runs:
        return [items[index % len(items)]] if items else []
    return items[index * len(items) // runs : (index + 1) * len(items) // runs]


def this_machine() -> tuple[list[int], list[str]]:
    """Return the cores and GPUs that this process may use."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    seen = [name for name in os.environ.get(VISIBLE, "").split(",") if name]
    return cores[: machine.cores()], seen or [str(number) for number in range(torch.cuda.device_count())]


class WorkerProcess:
    """One process and its current run.

    `on_stdout` receives each line of its stdout, and None at the end; `on_stderr` each line of its stderr.
    """

    def __init__(
        self,
        part: Part,
        on_stdout: Callable[["WorkerProcess", str | None], None],
        on_stderr: Callable[["WorkerProcess", str], None],
    ) -> None:
        self.part = part
        self.task: Planned | None = None
        self.listener: Watcher | None = None
        arguments = [str(part.share.runs), str(part.share.on_gpu), ",".join(map(str, part.cores))]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", START, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=_environment(part),
            start_new_session=True,
        )
        for stream, callback in ((self._process.stdout, on_stdout), (self._process.stderr, on_stderr)):
            threading.Thread(target=self._read_lines, args=[stream, callback], daemon=True).start()

    def _read_lines(self, stream: Any, callback: Callable[["WorkerProcess", Any], None]) -> None:
        for line in stream:
            callback(self, line)
        if stream is self._process.stdout:
            callback(self, None)

    def give(self, task: Planned, listener: Watcher) -> None:
        """Start a run in the process. `listener` receives its events."""
        self.task, self.listener = task, listener
        self._send(to_json(task.config, tracking=True) + "\n")

    def _send(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the end of its output reports that
            self._process.stdin.write(text)
            self._process.stdin.flush()

    def let_go(self) -> None:
        """Tell the process that no more runs follow."""
        assert self._process.stdin is not None
        self.task = None
        self._process.stdin.close()

    def stop(self) -> None:
        """Interrupt the process, if it still runs."""
        if self._process.poll() is None:
            self._process.terminate()

    def wait(self, until: float) -> None:
        """Wait until the process has ended. Kill it at the time `until`."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process and its process group."""
        with contextlib.suppress(ProcessLookupError):
            if hasattr(os, "killpg"):
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.wait()

    def ending(self) -> str:
        """Return how the process ended: a signal's name or an exit code."""
        code = self._process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _environment(part: Part) -> dict[str, str]:
    """Return this process's environment, with its import folders and the GPUs of `part`."""
    folders = os.pathsep.join(os.path.abspath(path) for path in sys.path)
    gpus = {VISIBLE: ",".join(part.gpus)} if part.gpus and part.share.runs > 1 else {}
    return {**os.environ, **gpus, "PYTHONPATH": folders}


class WorkerPool:
    """A pool of processes. `run` carries out all tasks; when it returns or raises, all processes have ended."""

    def __init__(self, number: int, display: Display) -> None:
        self._parts, self._display = parts(number, *this_machine()), display
        self._events: SimpleQueue[tuple[WorkerProcess, str | None]] = SimpleQueue()
        self._workers: list[WorkerProcess] = []
        self._waiting: deque[Planned] = deque()
        self._outcomes: dict[str, Outcome] = {}

    def run(self, tasks: Sequence[Planned]) -> dict[str, Outcome]:
        """Carry out the tasks. Return the outcome of each by its name."""
        self._waiting.extend(tasks)
        try:
            for part in self._parts[: len(tasks)]:
                self._open(part)
            while len(self._outcomes) < len(tasks):
                try:
                    self._handle(*self._events.get(timeout=POLL))
                except Empty:
                    continue
        finally:
            self._end()
        return self._outcomes

    def _open(self, part: Part) -> None:
        worker = WorkerProcess(part, lambda worker, line: self._events.put((worker, line)), self._say)
        self._workers.append(worker)
        self._next(worker)

    def _next(self, worker: WorkerProcess) -> None:
        while self._waiting:
            task = check_again(planned := self._waiting.popleft())
            if isinstance(task, Planned):
                worker.give(task, self._display.begin(task.name))
                return
            self._settle(task, planned)
        worker.let_go()

    def _handle(self, worker: WorkerProcess, line: str | None) -> None:
        """Handle a line from a process. None: the process has ended."""
        task = worker.task
        if task is None or worker.listener is None:
            return
        if line is None:
            self._settle(failed(task, LOST_MESSAGE.format(worker.ending())), task)
            worker.task = None
            if self._waiting:
                self._open(worker.part)
            return
        event = json.loads(line)
        if event[0] not in (FINISHED, FAILED):
            repeat(event, worker.listener)
            return
        self._settle(finished(task) if event[0] == FINISHED else failed(task, event[1]), task)
        self._next(worker)

    def _settle(self, outcome: Outcome, task: Planned) -> None:
        self._outcomes[task.name] = outcome
        self._display.end(task.name, outcome)

    def _say(self, worker: WorkerProcess, line: str) -> None:
        self._display.say(worker.task.name if worker.task else "", line)

    def _end(self) -> None:
        """Stop all processes. Those with a run are interrupted and get some time to complete their folders."""
        for worker in self._workers:
            if worker.task is not None:
                worker.stop()
        until = time.monotonic() + GRACE
        try:
            for worker in self._workers:
                worker.wait(until)
        except KeyboardInterrupt:  # a second Ctrl-C
            for worker in self._workers:
                worker.kill()
            raise
