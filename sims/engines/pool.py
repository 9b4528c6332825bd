"""The pool of Ray workers: it distributes messages, and handles workers that die or hang.

A separate thread receives and dispatches, so workers never wait for the caller. When a worker dies, only the message that
was running is charged. It is tried again alone, and fails at the second death. The other messages simply run again. If the
running message is unknown, all messages of the call are tried alone, and only a death alone is charged.
"""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import (
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    TaskCancelledError,
    WorkerCrashedError,
)

from fedloom.conf.errors import FailedError
from fedloom.conf.schema import EngineConfig
from fedloom.sims.engines.actor_pool import ActorHandle, ActorPool, cause_of, first_line, of_disk
from fedloom.sims.engines.chunks import ChunkPolicy
from fedloom.sims.engines.codec import PackedSum, size
from fedloom.sims.engines.heartbeat import SEVERAL
from fedloom.sims.engines.worker import Answers, Packed, Replied, WorkerSpec

ATTEMPTS = 2
POLL_SECONDS = 0.1
START_SECONDS = 30.0  # for the other workers, once one has started
STOP_SECONDS = 5.0  # for a cancelled call to stop, and then for its worker to end
DEATHS = (RayActorError, WorkerCrashedError, NodeDiedError, OutOfMemoryError)


@dataclass(frozen=True)
class Job:
    """A packed message for the site with index `site`. `key`: the message's id."""

    key: str
    site: int
    parts: Packed


@dataclass(frozen=True)
class Outcome:
    """A message's packed reply, or the reason why it is missing, and the partial sums that came with it."""

    reply: Replied
    sums: tuple[PackedSum, ...] = ()


@dataclass
class Call:
    """Messages in progress at a worker.

    Attributes:
        number: The call's number.
        member: The worker.
        jobs: The messages.
        alone: Whether it is a single message, because it may kill the worker.
        unwanted: The keys of cancelled messages.
        begun: The time of the call.
    """

    number: int
    member: ActorHandle
    jobs: list[Job]
    alone: bool
    unwanted: set[str] = field(default_factory=set)
    begun: float = field(default_factory=time.monotonic)


class Pool:
    """Distributes messages to Ray workers and collects the replies. Thread-safe."""

    def __init__(self, recipe: WorkerSpec, workers: int, options: dict[str, Any], engine: EngineConfig) -> None:
        self._crew = ActorPool(recipe, workers, options)
        self._task_timeout = engine.task_timeout
        self._policy = ChunkPolicy(workers, least=engine.vectorise)
        self._numbers = itertools.count()
        self._homes: dict[int, str] | None = (
            {} if recipe.node_store else None
        )  # by site: the node that stores its contributions
        self._queue: deque[Job] = deque()
        self._suspects: deque[Job] = deque()
        self._charges: Counter[str] = Counter()
        self._calls: dict[Any, Call] = {}
        self._done: dict[str, Outcome] = {}
        self._changed = threading.Condition()
        self._open, self._broken, self._beginning = True, "", False
        self._thread = threading.Thread(target=self._receive_for_ever, name="fedloom-pool", daemon=True)
        self._thread.start()

    def add(self, key: str, site: int, parts: Packed) -> None:
        """Queue a packed message with the id `key` for the site with index `site`; `dispatch` sends it."""
        with self._changed:
            self._queue.append(Job(key, site, parts))

    def dispatch(self) -> None:
        """Send waiting messages to free workers."""
        with self._changed:
            self._dispatch()
            self._changed.notify_all()

    def begin(self) -> None:
        """Wait until all workers have started, or one has and START_SECONDS have passed. Raises FailedError if none can."""
        with self._changed:
            self._beginning, until = True, float("inf")
            while not self._broken and len(ready := self._crew.ready()) < len(self._crew.members):
                until = min(until, time.monotonic() + START_SECONDS) if ready else until
                if time.monotonic() > until:
                    break
                self._changed.wait(POLL_SECONDS)
            self._beginning = False
            if self._broken:
                raise FailedError(self._broken)

    def take(self, wanted: set[str], timeout: float) -> list[tuple[str, Outcome]]:
        """Return new (id, outcome) pairs of these messages, after up to `timeout` s. Raises FailedError without workers."""
        with self._changed:
            if not self._broken and self._done.keys().isdisjoint(wanted):
                self._changed.wait_for(lambda: self._broken or not self._done.keys().isdisjoint(wanted), timeout)
            outcomes = [(key, self._done.pop(key)) for key in list(self._done) if key in wanted]
            if self._broken and not outcomes:
                raise FailedError(self._broken)
            return outcomes

    def cancel(self, keys: Iterable[str]) -> None:
        """Cancel messages by their ids. On return, none of them is running: a worker that does not stop is ended."""
        cancelled = set(keys)
        with self._changed:
            self._queue = deque(job for job in self._queue if job.key not in cancelled)
            self._suspects = deque(job for job in self._suspects if job.key not in cancelled)
            for key in cancelled:
                self._done.pop(key, None)
                self._charges.pop(key, None)
            for reference, call in self._calls.items():
                if now := cancelled & {job.key for job in call.jobs}:
                    call.unwanted |= now
                    self._learn_at_most(call)
                    ray.cancel(reference)
            if self._stopped(cancelled):
                return
            for call in self._calls.values():
                if call.unwanted & cancelled:
                    ray.kill(call.member.actor)
            if not self._stopped(cancelled):  # its machine does not answer
                for member in {call.member for call in self._calls.values() if call.unwanted & cancelled}:
                    self._lose(member, "it did not stop")

    def close(self) -> None:
        """Stop receiving and end the workers at once."""
        with self._changed:
            self._open = False
            self._changed.notify_all()
        self._thread.join(timeout=2.0)
        self._crew.close()

    def _stopped(self, cancelled: set[str]) -> bool:
        """Wait until no call with these messages is in progress; return whether that happened."""
        return self._changed.wait_for(
            lambda: bool(self._broken) or not any(call.unwanted & cancelled for call in self._calls.values()), STOP_SECONDS
        )

    def _dispatch(self) -> None:
        load = Counter(call.member.number for call in self._calls.values())
        guarded = {call.member.number for call in self._calls.values() if call.alone}
        ready = self._crew.ready()
        for member in ready:
            spare = len(ready) > 1 or not self._queue  # a suspect could kill the last worker: the others go first
            if self._suspects and not load[member.number] and spare:
                guarded.add(member.number)
                self._call(member, [self._suspects.popleft()], alone=True)
        for depth in range(self._policy.depth()):
            waiting = len(self._queue)  # at one depth, all workers get the same number
            for member in ready:
                if self._queue and load[member.number] == depth and member.number not in guarded:
                    wanted = self._policy.size(waiting, size(self._queue[0].parts))
                    if jobs := self._drawn(member, wanted, {worker.node for worker in ready}):
                        load[member.number] += 1
                        self._call(member, jobs, alone=False)

    def _drawn(self, member: ActorHandle, wanted: int, nodes: set[str]) -> list[Job]:
        """The next jobs for a worker. If nodes store contributions, a site stays at its node while the node has workers."""
        if self._homes is None:
            return [self._queue.popleft() for _ in range(min(wanted, len(self._queue)))]
        homes = self._homes
        mine = [job for job in self._queue if (home := homes.get(job.site)) == member.node or home not in nodes][:wanted]
        taken = {job.key for job in mine}
        self._queue = deque(job for job in self._queue if job.key not in taken)
        return mine

    def _call(self, member: ActorHandle, jobs: list[Job], alone: bool) -> None:
        number = next(self._numbers)
        reference = member.actor.run.remote(number, [(job.site, job.parts) for job in jobs])
        self._calls[reference] = Call(number, member, jobs, alone)

    def _receive_for_ever(self) -> None:
        try:
            while self._open:
                self._receive()
        except Exception as error:  # the caller waits for it, whatever it is
            with self._changed:
                if self._open:
                    self._broken = str(error) if isinstance(error, FailedError) else f"Ray failed ({first_line(error)})"
                self._changed.notify_all()

    def _receive(self) -> None:
        with self._changed:
            if not self._calls:
                self._changed.wait(POLL_SECONDS)
            waiting, questions = list(self._calls), self._crew.questions()
        if not ray.is_initialized():  # otherwise, the next call would start another one
            raise FailedError(
                "Ray was shut down while sites were training. Finished rounds are saved: run `fedloom resume RUN`"
            )
        if waiting:
            ray.wait([*waiting, *questions], num_returns=1, timeout=POLL_SECONDS)
        ready = ray.wait(waiting, num_returns=len(waiting), timeout=0)[0] if waiting else []
        results = [(reference, _result(reference)) for reference in ready]
        with self._changed:
            for reference, result in sorted(results, key=lambda pair: isinstance(pair[1], Exception)):  # successes first
                if reference in self._calls:
                    self._settle(reference, result)
            for member, reason in self._crew.look(bool(self._beginning or self._calls or self._queue or self._suspects)):
                self._lose(member, reason)
            self._stop_late()
            self._dispatch()
            self._changed.notify_all()

    def _settle(self, reference: Any, result: Answers | Exception) -> None:
        call = self._calls[reference]
        if isinstance(result, DEATHS):
            self._lose(call.member, type(result).__name__)
            return
        del self._calls[reference]
        if call.unwanted or isinstance(result, TaskCancelledError):
            self._again(call, call.jobs)
        elif isinstance(result, Answers):
            self._policy.learn(result.seconds)
            if self._homes is not None:
                self._homes |= dict.fromkeys((job.site for job in call.jobs), call.member.node)
            for job, reply in zip(call.jobs, result.replies, strict=True):
                self._finish(job, Outcome(reply, tuple(result.sums)))
        elif line := of_disk(fault := cause_of(result)):
            raise FailedError(line)
        elif len(call.jobs) > 1:  # one of the messages is at fault
            self._again(call, call.jobs, alone=True)
        else:
            self._finish(call.jobs[0], Outcome(first_line(fault)))

    def _lose(self, member: ActorHandle, reason: str, late: bool = False) -> None:
        """Handle a lost worker: charge the message that was running, run the others again, and start another worker."""
        references = sorted((each for each, call in self._calls.items() if call.member is member), key=self._number)
        calls = [self._calls.pop(reference) for reference in references]
        mark = member.exact_mark() or (member.reported if late else None)
        for call in reversed(calls):
            marked = mark is not None and mark.call == call.number
            if marked or (call is calls[0] and mark is None):
                self._charge(call, mark.place if mark is not None and marked else SEVERAL, reason, late)
            else:
                self._again(call, call.jobs)
        self._crew.replace(member)

    def _charge(self, call: Call, place: int, reason: str, late: bool) -> None:
        """Charge the message at index `place` of a lost worker's call; SEVERAL: it is unknown which."""
        place = 0 if len(call.jobs) == 1 else place
        if place < 0:
            self._again(call, call.jobs, alone=True)
            return
        job = call.jobs[place]
        self._again(call, [other for other in call.jobs if other is not job])
        if job.key in call.unwanted:
            return
        self._charges[job.key] += 1
        if late:
            self._finish(job, Outcome(f"took longer than engine.task_timeout={self._task_timeout:g} s"))
        elif self._charges[job.key] >= ATTEMPTS:
            self._finish(job, Outcome(f"killed its worker {ATTEMPTS} times ({reason})"))
        else:
            self._suspects.append(job)

    def _again(self, call: Call, jobs: Iterable[Job], alone: bool = False) -> None:
        """Queue the jobs again, before all others and in their order, without those that were cancelled."""
        wanted = [job for job in jobs if job.key not in call.unwanted]
        (self._suspects if alone else self._queue).extendleft(reversed(wanted))

    def _finish(self, job: Job, outcome: Outcome) -> None:
        self._charges.pop(job.key, None)
        self._done[job.key] = outcome

    def _learn_at_most(self, call: Call) -> None:
        """Learn an upper limit for the messages' duration from a call that is cancelled while it runs."""
        mark = call.member.mark()
        if mark is not None and mark.call == call.number:
            messages = len(call.jobs) if mark.place == SEVERAL else mark.place + 1
            self._policy.learn([(time.monotonic() - call.begun) / messages] * messages)

    def _stop_late(self) -> None:
        """End workers whose current message exceeds its time limit."""
        running = {call.number: call for call in self._calls.values()}
        for member in self._crew.ready() if self._task_timeout else ():
            mark = member.mark()
            call = running.get(mark.call) if mark is not None else None
            if mark is None or call is None:
                continue
            if mark.seconds > self._task_timeout * (len(call.jobs) if mark.place == SEVERAL else 1):
                self._lose(member, "late", late=True)

    def _number(self, reference: Any) -> int:
        return self._calls[reference].number


def _result(reference: Any) -> Answers | Exception:
    try:
        return ray.get(reference)
    except Exception as error:
        return error
