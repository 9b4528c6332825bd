"""The Ray actors of a pool: started, checked for life, and replaced after their death.

An actor gets work only after its first answer. So one that cannot start, as its node died, delays nothing. Ray needs 15
seconds to notice a dead node; the pool replaces a worker that is silent for SILENT_SECONDS.
"""

import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfDiskError

from fedloom.conf.errors import FailedError, of_storage
from fedloom.sims.engines.heartbeat import MarkFile, Progress, make
from fedloom.sims.engines.worker import Worker, WorkerSpec

ASK_SECONDS = 1.0
SILENT_SECONDS = 10.0
ABSENT_SECONDS = 120.0
STARTS = 5  # that fail one after the other end the run


@dataclass(eq=False)
class ActorHandle:
    """A Ray actor of the pool, and its last known state.

    Attributes:
        number: Its number, which no later actor gets.
        actor: Ray's handle.
        file: The mark file, in which the actor writes what it runs.
        question: The call of `status` that is not answered yet; None: the actor has answered.
        asked: The time of the last call.
        node: The id of its node; "": unknown.
        ready: Whether it has started.
        near: Whether this machine can read its mark file.
        reported: The mark in its last answer.
    """

    number: int
    actor: Any
    file: MarkFile
    question: Any  # the call of `status` without an answer yet; None: the actor has answered
    asked: float
    node: str = ""
    ready: bool = False
    near: bool = False  # its mark file can be read from here
    reported: Progress | None = None  # the mark in its last answer

    def mark(self) -> Progress | None:
        """Return the mark: what the actor runs now or, on another host, what it last reported. None: nothing."""
        return self.file.read() if self.near else self.reported

    def exact_mark(self) -> Progress | None:
        """Return what the actor runs now, or ran at its death; None for nothing, or if its mark file cannot be read."""
        return self.file.read() if self.near else None


class ActorPool:
    """Runs `size` Ray actors; `look` detects lost ones. Not thread-safe: the lock of `Pool` guards it."""

    def __init__(self, recipe: WorkerSpec, size: int, options: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fedloom-marks-", ignore_cleanup_errors=True)
        actor: Any = ray.remote
        self._made = actor(concurrency_groups={"control": 1})(Worker).options(max_restarts=0, **options)
        self._recipe, self._numbers = recipe, itertools.count()
        self._failures, self._present = 0, time.monotonic()
        self.members = [self._start() for _ in range(size)]

    def ready(self) -> list[ActorHandle]:
        """Return the actors that have started and can work."""
        return [member for member in self.members if member.ready]

    def questions(self) -> list[Any]:
        """Return the Ray references of all `status` calls without an answer yet."""
        return [member.question for member in self.members if member.question is not None]

    def look(self, wanted: bool) -> list[tuple[ActorHandle, str]]:
        """Ask all actors for a sign of life; return the lost ones with reasons. `wanted`: there is work to do.

        Raises:
            FailedError: No actor can start or run the sites.
        """
        questions, lost, now = self.questions(), [], time.monotonic()
        answered = set(ray.wait(questions, num_returns=len(questions), timeout=0)[0]) if questions else set()
        for member in self.members:
            if member.question in answered:
                if reason := self._hear(member):
                    lost.append((member, reason))
            elif member.question is None and now - member.asked > ASK_SECONDS:
                member.question, member.asked = member.actor.status.remote(), now
            elif member.ready and now - member.asked > SILENT_SECONDS:
                lost.append((member, f"no sign of life for {SILENT_SECONDS:g} s"))
        if any(member.ready for member in self.members) or not wanted:
            self._present = now
        elif now - self._present > ABSENT_SECONDS:
            raise FailedError(f"no Ray worker could start for {ABSENT_SECONDS:g} s: the cluster has no free resources "
                              "(engine.num_cpus, engine.num_gpus). Finished rounds are saved: run "
                              "`fedloom resume RUN`")  # fmt: skip
        return lost

    def replace(self, member: ActorHandle) -> None:
        """End an actor and start another one instead."""
        self._end(member)
        self._failures += not member.ready
        self.members[self.members.index(member)] = self._start()

    def close(self) -> None:
        """End all actors."""
        for member in self.members if ray.is_initialized() else ():
            self._end(member)
        self._folder.cleanup()

    def _start(self) -> ActorHandle:
        number = next(self._numbers)
        file = make(Path(self._folder.name), number)
        actor = self._made.remote(self._recipe, file)
        return ActorHandle(number, actor, file, actor.status.remote(), time.monotonic())

    def _hear(self, member: ActorHandle) -> str:
        """Read an actor's answer; return why it is lost, or "". Raises FailedError if no other actor could work either."""
        try:
            fault, member.node, member.near, member.reported = ray.get(member.question)
        except Exception as error:
            if not member.ready and self._failures + 1 >= STARTS:
                raise FailedError(f"{STARTS} Ray workers in succession died while starting ({first_line(error)})") from None
            return type(error).__name__
        if fault:
            raise FailedError(
                f"Ray's workers cannot run the sites: {fault}. Or run them in this process: engine.name=inline"
            )
        member.ready, member.question, self._failures = True, None, 0
        return ""

    def _end(self, member: ActorHandle) -> None:
        try:
            ray.kill(member.actor)
        except Exception:  # the actor or Ray has already ended
            return


def first_line(error: Exception) -> str:
    """Return an error's class and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason'}"


def cause_of(error: Exception) -> Exception:
    """Return the exception that a worker raised, or the error itself if Ray raised it."""
    cause: Any = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def of_disk(error: Exception) -> str:
    """Return a line about a full or failing disk of this machine, or of Ray's objects; empty for other errors."""
    if isinstance(error, OutOfDiskError):
        return f"the disk of Ray's objects is full ({first_line(error)}); free some space, then resume"
    return of_storage(error)
