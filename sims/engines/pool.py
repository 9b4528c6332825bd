"""The pool of Ray actors: who gets what when, and what happens if one of them dies or hangs.

A thread of its own receives and dispatches, so that workers never wait for whoever polls. When a worker dies, only the
message that was running is charged; it is tried again alone, and fails at the second time. Its neighbours are simply
run again. Where nobody can tell which message was running, all of them are tried alone, and only dying alone is charged.
"""

import itertools
import tempfile
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from conf.schema import EngineConfig
from sims.engines.chunks import ChunkPolicy
from sims.engines.marks import Mark, make
from sims.engines.wire import size
from sims.engines.worker import Worker

ATTEMPTS = 2
POLL_SECONDS = 0.1

Packed = tuple[Any, ...]
Outcome = Packed | str  # a packed reply, or the reason why there is none


@dataclass(frozen=True)
class Job:
    """A packed message for the site at a place."""

    key: str
    site: int
    parts: Packed


@dataclass
class Call:
    """A chunk under way at a worker. `alone`: a suspect, and nothing else is at that worker."""

    number: int
    worker: int
    jobs: list[Job]
    alone: bool
    late: bool = False
    begin: float = field(default_factory=time.monotonic)


class Pool:
    """`workers` actors, made once and kept. Thread-safe: add, dispatch and take are called by the grid's user."""

    def __init__(self, workers: int, arguments: tuple[Any, ...], options: dict[str, Any], engine: EngineConfig) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fedloom-marks-", ignore_cleanup_errors=True)
        self._marks = [make(Path(self._folder.name), number) for number in range(workers)]
        actor: Any = ray.remote(Worker)
        made = actor.options(max_restarts=-1, **options)
        self._actors = [made.remote(*arguments, mark) for mark in self._marks]
        self._task_timeout = engine.task_timeout
        self._policy = ChunkPolicy(workers, least=engine.vectorise)
        self._numbers = itertools.count()
        self._queue: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._charges: Counter[str] = Counter()
        self._calls: dict[Any, Call] = {}
        self._done: dict[str, Outcome] = {}
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._receive_for_ever, name="fedloom-pool", daemon=True)
        self._thread.start()

    def add(self, key: str, site: int, parts: Packed) -> None:
        """Queue a packed message; `dispatch` sends it on its way."""
        with self._changed:
            self._queue.append(Job(key, site, parts))

    def dispatch(self) -> None:
        """Give waiting messages to workers that have room."""
        with self._changed:
            self._dispatch()
            self._changed.notify_all()

    def take(self, wanted: set[str], timeout: float) -> list[tuple[str, Outcome]]:
        """Outcomes of these messages, each once; waits up to `timeout` seconds for the first."""
        with self._changed:
            if self._done.keys().isdisjoint(wanted):
                self._changed.wait_for(lambda: not self._done.keys().isdisjoint(wanted), timeout)
            return [(key, self._done.pop(key)) for key in list(self._done) if key in wanted]

    def close(self) -> None:
        """Stop receiving; calls under way are abandoned."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._thread.join(timeout=2.0)
        self._folder.cleanup()

    def kill(self) -> None:
        """End the workers, whatever they are at."""
        for actor in self._actors:
            ray.kill(actor)

    def _dispatch(self) -> None:
        load = Counter(call.worker for call in self._calls.values())
        guarded = {call.worker for call in self._calls.values() if call.alone}
        for worker in range(len(self._actors)):
            if self._suspects and not load[worker]:
                guarded.add(worker)
                self._call(worker, [self._suspects.popleft()], alone=True)
        for depth in range(self._policy.depth()):
            waiting = len(self._queue)  # of one level, all workers get the same
            for worker in range(len(self._actors)):
                if self._queue and load[worker] == depth and worker not in guarded:
                    wanted = self._policy.size(waiting, size(self._queue[0].parts))
                    jobs = [self._queue.popleft() for _ in range(min(wanted, len(self._queue)))]
                    load[worker] += 1
                    self._call(worker, jobs, alone=False)

    def _call(self, worker: int, jobs: list[Job], alone: bool) -> None:
        number = next(self._numbers)
        reference = self._actors[worker].run.remote(number, [(job.site, job.parts) for job in jobs])
        self._calls[reference] = Call(number, worker, jobs, alone)

    def _receive_for_ever(self) -> None:
        while True:
            with self._changed:
                waiting = list(self._calls)
                if not waiting and self._open:
                    self._changed.wait(POLL_SECONDS)
                if not self._open:
                    return
            if not waiting:
                continue
            ready, _ = ray.wait(waiting, num_returns=1, timeout=POLL_SECONDS)
            results = [(reference, _result(reference)) for reference in ready]
            with self._changed:
                for reference, result in results:
                    self._settle(self._calls.pop(reference), result)
                self._stop_late()
                self._dispatch()
                self._changed.notify_all()

    def _settle(self, call: Call, result: tuple[float, list[Packed]] | RayError) -> None:
        if isinstance(result, RayError):
            self._recover(call, result)
            return
        seconds, replies = result
        self._policy.learn(seconds, len(replies))
        for job, reply in zip(call.jobs, replies, strict=True):
            self._charges.pop(job.key, None)
            self._done[job.key] = reply

    def _recover(self, call: Call, error: RayError) -> None:
        """A worker died with this call: charge who was running, run the others again."""
        mark = self._mark(call.worker)
        for place, job in enumerate(call.jobs):
            running = call.alone if mark is None else (mark.call, mark.place) == (call.number, place)
            if not running:
                (self._queue if mark is not None else self._suspects).appendleft(job)
                continue
            self._charges[job.key] += 1
            if call.late:
                self._done[job.key] = f"took longer than engine.task_timeout={self._task_timeout:g} s"
            elif self._charges[job.key] < ATTEMPTS:
                self._suspects.append(job)
            else:
                self._done[job.key] = f"killed its worker {ATTEMPTS} times ({type(error).__name__})"
            if job.key in self._done:
                del self._charges[job.key]

    def _stop_late(self) -> None:
        """Kill workers whose present message has outlasted its time; the call then fails as if the worker had died."""
        for call in self._calls.values() if self._task_timeout else ():
            mark = self._mark(call.worker)
            if mark is None and not call.alone:
                continue
            running = mark is None or mark.call == call.number
            seconds = time.monotonic() - call.begin if mark is None else mark.seconds
            if running and seconds > self._task_timeout and not call.late:
                call.late = True
                ray.kill(self._actors[call.worker], no_restart=False)

    def _mark(self, worker: int) -> Mark | None:
        return self._marks[worker].read()


def _result(reference: Any) -> tuple[float, list[Packed]] | RayError:
    try:
        return ray.get(reference)
    except RayError as error:
        return error
