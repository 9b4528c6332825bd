"""The pool of Ray actors: who gets what when, and what happens if one of them dies.

A thread of its own receives and dispatches, so that workers never wait for whoever polls. When a worker dies, the messages
it held are tried again one by one, each alone on a worker: only the message that was running when a worker died alone with
it is to blame, and it fails after `ATTEMPTS` such deaths; a neighbour never does.
"""

import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from sims.engines.chunks import ChunkPolicy
from sims.engines.wire import size
from sims.engines.worker import Worker

ATTEMPTS = 2
POLL_SECONDS = 0.1

Outcome = tuple[Any, ...] | str  # packed reply, or the reason why there is none


@dataclass(frozen=True)
class Job:
    """A packed message for the site at a place."""

    key: str
    site: int
    parts: tuple[Any, ...]


@dataclass
class Call:
    """A chunk under way at a worker. `alone`: a suspect, and nothing else is at that worker."""

    worker: int
    jobs: list[Job]
    alone: bool
    begin: float = field(default_factory=time.monotonic)


class Pool:
    """`workers` actors made once and kept. Thread-safe: add, dispatch and take are called by the grid's user."""

    def __init__(self, workers: int, arguments: tuple[Any, ...], options: dict[str, Any], task_timeout: float) -> None:
        actor: Any = ray.remote(Worker)
        self._actors = [actor.options(max_restarts=-1, **options).remote(*arguments) for _ in range(workers)]
        self._options, self._task_timeout = options, task_timeout
        self._policy = ChunkPolicy(workers)
        self._queue: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._deaths: Counter[str] = Counter()
        self._calls: dict[Any, Call] = {}
        self._done: dict[str, Outcome] = {}
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._receive_for_ever, name="fedloom-pool", daemon=True)
        self._thread.start()

    def add(self, key: str, site: int, parts: tuple[Any, ...]) -> None:
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
            if not any(key in self._done for key in wanted):
                self._changed.wait(timeout)
            return [(key, self._done.pop(key)) for key in list(self._done) if key in wanted]

    def close(self) -> None:
        """Stop receiving."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._thread.join(timeout=2.0)

    def describe(self) -> str:
        """The pool in a few words."""
        each = ", ".join(f"{name} {amount:g}" for name, amount in self._options.items() if amount)
        return f"ray: {len(self._actors)} workers ({each} each)"

    def _dispatch(self) -> None:
        load = Counter(call.worker for call in self._calls.values())
        while self._suspects:
            free = [worker for worker in range(len(self._actors)) if not load[worker]]
            if not free:
                break
            load[free[0]] += self._policy.depth()  # nothing else goes there
            self._call(free[0], [self._suspects.popleft()], alone=True)
        for depth in range(self._policy.depth()):
            for worker in range(len(self._actors)):
                if self._queue and load[worker] == depth and not self._guarded(worker):
                    wanted = self._policy.size(len(self._queue), size(self._queue[0].parts))
                    jobs = [self._queue.popleft() for _ in range(min(wanted, len(self._queue)))]
                    load[worker] += 1
                    self._call(worker, jobs, alone=False)

    def _guarded(self, worker: int) -> bool:
        return any(call.alone and call.worker == worker for call in self._calls.values())

    def _call(self, worker: int, jobs: list[Job], alone: bool) -> None:
        reference = self._actors[worker].run.remote([(job.site, job.parts) for job in jobs])
        self._calls[reference] = Call(worker, jobs, alone)

    def _receive_for_ever(self) -> None:
        while True:
            with self._changed:
                if not self._open:
                    return
                waiting = list(self._calls)
                if not waiting:
                    self._changed.wait(POLL_SECONDS)
                    continue
            ready, _ = ray.wait(waiting, num_returns=1, timeout=POLL_SECONDS)
            outcomes = [(reference, self._result(reference)) for reference in ready]
            with self._changed:
                for reference, outcome in outcomes:
                    self._settle(self._calls.pop(reference), outcome)
                self._stop_late()
                self._dispatch()
                self._changed.notify_all()

    @staticmethod
    def _result(reference: Any) -> tuple[float, list[tuple[Any, ...]]] | RayError:
        try:
            return ray.get(reference)
        except RayError as error:
            return error

    def _settle(self, call: Call, outcome: tuple[float, list[tuple[Any, ...]]] | RayError) -> None:
        if isinstance(outcome, RayError):
            self._blame(call, outcome)
            return
        seconds, replies = outcome
        self._policy.learn(seconds, len(replies))
        self._done.update((job.key, reply) for job, reply in zip(call.jobs, replies, strict=True))

    def _blame(self, call: Call, error: RayError) -> None:
        late = self._task_timeout and time.monotonic() - call.begin > self._task_timeout
        for job in call.jobs:
            self._deaths[job.key] += call.alone
            if self._deaths[job.key] < (1 if late else ATTEMPTS):
                self._suspects.append(job)
                continue
            del self._deaths[job.key]
            limit = f"took longer than engine.task_timeout={self._task_timeout:g} s"
            self._done[job.key] = limit if late else f"killed its worker {ATTEMPTS} times ({_named(error)})"

    def _stop_late(self) -> None:
        """Kill workers whose call has outlasted its time limit; the call then fails as if the worker had died."""
        if not self._task_timeout:
            return
        first: dict[int, Call] = {}
        for call in self._calls.values():
            first.setdefault(call.worker, call)
        for call in first.values():
            if time.monotonic() - call.begin > self._task_timeout * len(call.jobs):
                ray.kill(self._actors[call.worker], no_restart=False)


def _named(error: RayError) -> str:
    return type(error).__name__
