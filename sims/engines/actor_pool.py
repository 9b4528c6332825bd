"""The Ray actors of a pool: started, asked for signs of life, and replaced when they are gone.

An actor gets work only once it has answered: one that has no place in the cluster (its node died) holds nothing up. Ray
itself needs a quarter of a minute to notice a dead node; a worker that says nothing for SILENT_SECONDS is given up before.
"""

import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from fedloom.conf.errors import FailedError
from fedloom.sims.engines.heartbeat import MarkFile, Progress, make
from fedloom.sims.engines.worker import Worker, WorkerSpec

ASK_SECONDS = 1.0
SILENT_SECONDS = 10.0
ABSENT_SECONDS = 120.0
STARTS = 5  # that may fail one after the other


@dataclass(eq=False)
class ActorHandle:
    """One actor. Its number is never given to another one."""

    number: int
    actor: Any
    file: MarkFile
    question: Any  # the one that is out; None: it has answered
    asked: float
    node: str = ""
    ready: bool = False
    near: bool = False  # its mark can be read in the file, at any time
    told: Progress | None = None  # what it last said that it runs

    def mark(self) -> Progress | None:
        """What it runs, as far as that is known."""
        return self.file.read() if self.near else self.told

    def surely(self) -> Progress | None:
        """What it runs at this very moment, or ran when it died; None if that cannot be known."""
        return self.file.read() if self.near else None


class ActorPool:
    """`size` actors, kept up to strength. Not thread-safe: the pool's lock guards it."""

    def __init__(self, recipe: WorkerSpec, size: int, options: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fedloom-marks-", ignore_cleanup_errors=True)
        actor: Any = ray.remote
        self._made = actor(concurrency_groups={"control": 1})(Worker).options(max_restarts=0, **options)
        self._recipe, self._numbers = recipe, itertools.count()
        self._failures, self._present = 0, time.monotonic()
        self.members = [self._start() for _ in range(size)]

    def ready(self) -> list[ActorHandle]:
        """Those that can be given work."""
        return [member for member in self.members if member.ready]

    def questions(self) -> list[Any]:
        """References of the questions that are out."""
        return [member.question for member in self.members if member.question is not None]

    def look(self, wanted: bool) -> list[tuple[ActorHandle, str]]:
        """Hear the answers, ask again; those that are gone, and why. `wanted`: there is work to do.

        Raises FailedError if no worker can be had.
        """
        questions, gone, now = self.questions(), [], time.monotonic()
        answered = set(ray.wait(questions, num_returns=len(questions), timeout=0)[0]) if questions else set()
        for member in self.members:
            if member.question in answered:
                if reason := self._hear(member):
                    gone.append((member, reason))
            elif member.question is None and now - member.asked > ASK_SECONDS:
                member.question, member.asked = member.actor.status.remote(), now
            elif member.ready and now - member.asked > SILENT_SECONDS:
                gone.append((member, f"no sign of life for {SILENT_SECONDS:g} s"))
        if any(member.ready for member in self.members) or not wanted:
            self._present = now
        elif now - self._present > ABSENT_SECONDS:
            raise FailedError(f"no Ray worker could be started for {ABSENT_SECONDS:g} s: the cluster has no place for any "
                              "(engine.num_cpus, engine.num_gpus); what was committed is kept, resume it")  # fmt: skip
        return gone

    def replace(self, member: ActorHandle) -> None:
        """Another one in its place; it itself is ended, wherever it is."""
        self._end(member)
        self._failures += not member.ready
        self.members[self.members.index(member)] = self._start()

    def close(self) -> None:
        """End all of them."""
        for member in self.members if ray.is_initialized() else ():
            self._end(member)
        self._folder.cleanup()

    def _start(self) -> ActorHandle:
        number = next(self._numbers)
        file = make(Path(self._folder.name), number)
        actor = self._made.remote(self._recipe, file)
        return ActorHandle(number, actor, file, actor.status.remote(), time.monotonic())

    def _hear(self, member: ActorHandle) -> str:
        """Take its answer; why it is gone if it has none. Raises FailedError if it cannot work, nor would another."""
        try:
            fault, member.node, member.near, member.told = ray.get(member.question)
        except Exception as error:
            if not member.ready and self._failures + 1 >= STARTS:
                raise FailedError(
                    f"Ray workers die while they start, {STARTS} one after the other ({told(error)})"
                ) from None
            return type(error).__name__
        if fault:
            raise FailedError(f"Ray's workers cannot run the sites: {fault}; engine.name=inline works in this process")
        member.ready, member.question, self._failures = True, None, 0
        return ""

    def _end(self, member: ActorHandle) -> None:
        try:
            ray.kill(member.actor)
        except Exception:  # it is gone already, or so is Ray
            return


def told(error: Exception) -> str:
    """The first line of Ray's long texts."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no reason given'}"
