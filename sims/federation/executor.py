"""What starts a machine's Apps: a ServerApp at the server, a ClientApp at a site, for one kind of task each.

Flower's own writes a task's token on the command line of the App that does it, where every user of the machine may read it;
and it takes tasks of every kind. Here the token goes through a pipe or a socket that this user alone can open.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

DOOR = "clientapp.socket"  # in the node's folder, where its programs run
START_SECONDS, PAUSE_SECONDS = 60.0, 0.05
AGAIN_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0)  # before it is started again
STEADY_SECONDS = 60.0  # after which it counts as having been well
FAILURES = frozenset({500, 502, 503, 504})  # answers after which it asks again


class Executor:
    """A process that does what the Runtime API at an address has to do, as long as this process lives.

    If it ends, it is started again. `secret`: by which it is known there; it goes through a pipe. `apps`: which it runs
    (sims.federation.own_app).
    """

    def __init__(self, address: str, authority: Path, secret: str, kind: str, apps: str, warm: bool = False) -> None:
        self._words = [address, str(authority), kind, str(os.getpid()), apps, "warm" if warm else ""]
        self._secret, self._told = secret.encode(), threading.Event()
        self.child = self._start()
        threading.Thread(target=self._keep, daemon=True).start()

    def terminate(self) -> None:
        """End it for good."""
        self._told.set()
        self.child.terminate()

    def _start(self) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-m", "fedloom.sims.federation.executor", *self._words], stdin=subprocess.PIPE
        )
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError), child.stdin:
            child.stdin.write(self._secret)
        return child

    def _keep(self) -> None:
        pauses = iter(AGAIN_SECONDS)
        while True:
            began = time.monotonic()
            self.child.wait()
            if time.monotonic() - began > STEADY_SECONDS:
                pauses = iter(AGAIN_SECONDS)
            pause = next(pauses, AGAIN_SECONDS[-1])
            if self._told.is_set():
                return
            print(f"what starts Apps ended ({self.child.returncode}); again in {pause:g} s", file=sys.stderr, flush=True)
            if self._told.wait(pause):
                return
            self.child = self._start()


def main(address: str, authority: str, kind: str, parent: str, apps: str, warm: str) -> None:
    """Until the parent ends."""
    secret = sys.stdin.buffer.read()
    from flwr.supercore.constant import TASK_TYPE_TO_COMMAND, TaskType
    from flwr.supercore.retry import http_retry
    from flwr.supercore.superexec import run_superexec
    from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
    from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult
    from flwr.supercore.utils import disable_process_dumping

    from fedloom.server.flower.http_answers import be_wary

    tasks = _Warm(apps) if warm else _Cold(apps)

    class Quiet(SubprocessExecutor):
        """Takes tasks of one kind, and says their tokens to nobody but their Apps."""

        def get_eligible_capacity(self, *_: object, **__: object) -> tuple[set[TaskType], set[str]]:
            return {TaskType(kind)}, set()

        def launch(self, spec: ExecutionSpec) -> LaunchResult:
            words = [TASK_TYPE_TO_COMMAND[spec.task_type], "--runtime-api-address", address, "--token", spec.token]
            words += ["--root-certificates", authority, "--parent-pid", str(os.getpid())]
            try:
                tasks.start(words, subprocess.DEVNULL if spec.suppress_output else None)
            except OSError as error:
                return LaunchResult.failed(str(error))
            return LaunchResult.accepted()

        def reconcile(self) -> None:
            tasks.reap()

    disable_process_dumping(strict=False)
    be_wary()
    http_retry._RETRYABLE_STATUS_CODES = FAILURES  # type: ignore[assignment]
    run_superexec.get_executor = lambda *_, **__: Quiet()  # type: ignore[attr-defined]
    run_superexec.run_superexec(
        address,
        insecure=False,
        root_certificates_path=authority,
        superexec_auth_secret=secret,
        parent_pid=int(parent),
        runtime_dependency_install=False,
    )


class _Cold:
    """A new program for each task."""

    def __init__(self, apps: str) -> None:
        self._apps = apps
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, words: list[str], out: int | None) -> None:
        """Have Flower's command do a task."""
        command = [sys.executable, "-m", "fedloom.sims.federation.task", self._apps]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)
        self._started.append(child)
        with child.stdin or contextlib.nullcontext() as pipe:
            assert pipe is not None
            pipe.write(json.dumps(words).encode())

    def reap(self) -> None:
        """Take note of those that have ended."""
        self._started = [child for child in self._started if child.poll() is None]


class _Warm(_Cold):
    """One program that has imported all that a ClientApp needs, and forks for each task (sims.federation.warm)."""

    def start(self, words: list[str], out: int | None) -> None:
        """Hand the task over, if need be to a program that is started first. OSError if that does not come."""
        with contextlib.suppress(OSError):
            return hand_over(words)
        command = [sys.executable, "-m", "fedloom.sims.federation.warm", str(os.getpid()), self._apps]
        self._started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        deadline = time.monotonic() + START_SECONDS
        while True:
            time.sleep(PAUSE_SECONDS)
            try:
                return hand_over(words)
            except OSError:
                if time.monotonic() > deadline:
                    raise


def hand_over(words: list[str]) -> None:
    """Give the words to the program that waits. OSError if there is none."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(DOOR)
        line.sendall(json.dumps(words).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
