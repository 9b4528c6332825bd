"""Start the Apps of a machine: ServerApps at the server, ClientApps at a site.

Flower's executor writes a task's token on the App's command line, where every user of the machine can read it. It takes
all kinds of tasks. This one takes one kind, and passes the token through a pipe or a socket that only this user can open.
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

DOOR = "clientapp.socket"  # in the node's folder
START_SECONDS, PAUSE_SECONDS = 60.0, 0.05
AGAIN_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0)  # seconds before a restart
STEADY_SECONDS = 60.0  # after which it counts as healthy
FAILURES = frozenset({500, 502, 503, 504})  # statuses after which it asks again


class Executor:
    """A child process that runs the tasks of the Runtime API at an address; it is restarted if it ends.

    `secret`: authenticates it there; passed through a pipe. `apps`: which Apps it runs (sims.federation.own_app).
    """

    def __init__(self, address: str, authority: Path, secret: str, kind: str, apps: str, warm: bool = False) -> None:
        self._words = [address, str(authority), kind, str(os.getpid()), apps, "warm" if warm else ""]
        self._secret, self._ended = secret.encode(), threading.Event()
        self.child = self._start()
        threading.Thread(target=self._keep, daemon=True).start()

    def terminate(self) -> None:
        """End the process without a restart."""
        self._ended.set()
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
            if self._ended.is_set():
                return
            print(
                f"the executor of Apps ended ({self.child.returncode}); it starts again in {pause:g} s",
                file=sys.stderr,
                flush=True,
            )
            if self._ended.wait(pause):
                return
            self.child = self._start()


def main(address: str, authority: str, kind: str, parent: str, apps: str, warm: str) -> None:
    """Run tasks of one kind, from the Runtime API at an address, until the parent process ends."""
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
        """Takes tasks of one kind, and passes their tokens to their Apps only."""

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
    """Starts a new process for each task."""

    def __init__(self, apps: str) -> None:
        self._apps = apps
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, words: list[str], out: int | None) -> None:
        """Run a task with Flower's command."""
        command = [sys.executable, "-m", "fedloom.sims.federation.task", self._apps]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)
        self._started.append(child)
        with child.stdin or contextlib.nullcontext() as pipe:
            assert pipe is not None
            pipe.write(json.dumps(words).encode())

    def reap(self) -> None:
        """Forget the processes that have ended."""
        self._started = [child for child in self._started if child.poll() is None]


class _Warm(_Cold):
    """Uses one process with all imports of a ClientApp, which forks for each task (sims.federation.warm)."""

    def __init__(self, apps: str) -> None:
        super().__init__(apps)
        self._warm()  # before the first task, which would wait for the imports

    def _warm(self) -> None:
        command = [sys.executable, "-m", "fedloom.sims.federation.warm", str(os.getpid()), self._apps]
        self._started.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))

    def start(self, words: list[str], out: int | None) -> None:
        """Pass a task to the process, which is started again if it has ended. Raises OSError if it does not start."""
        with contextlib.suppress(OSError):
            return hand_over(words)
        self.reap()
        if not self._started:
            self._warm()
        deadline = time.monotonic() + START_SECONDS
        while True:
            time.sleep(PAUSE_SECONDS)
            try:
                return hand_over(words)
            except OSError:
                if time.monotonic() > deadline:
                    raise


def hand_over(words: list[str]) -> None:
    """Send a task's command line to the process that waits for tasks (sims.federation.warm). Raises OSError without it."""
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(DOOR)
        line.sendall(json.dumps(words).encode() + b"\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
