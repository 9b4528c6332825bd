"""Programs of a federation: started so that they outlive the terminal, brought back when they end, and stopped exactly."""

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from conf.errors import UserError

LOCK, PID, LOG = "running.lock", "running.pid", "log.txt"
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds before a program that ended is started again
STEADY_SECONDS = 60.0  # after which it counts as having been well
STOP_SECONDS = 10.0
BIN = Path(sys.executable).parent
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # the environment that this program runs in is the one
    "PYTHONUNBUFFERED": "1",
}


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of Flower's programs: ours first on the path, nothing installed, nothing told to anybody."""
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **ENVIRONMENT, "PATH": path, **(more or {})}


def keep_running(folder: Path, words: Callable[[], Sequence[str]], more: Mapping[str, str] | None = None,
                 ready: Callable[[], None] = lambda: None) -> None:  # fmt: skip
    """Run a program from the folder until this process is told to stop (SIGTERM, SIGINT); start it again if it ends.

    `words`: its command line, worked out each time; `ready`: called once after each start. One at a time in a folder:
    UserError if another one is at work there. The program holds the folder's lock, too: if this process is killed and it
    is left behind, `running` and `stop` still know it.
    """
    lock, stopped, failures = _lock(folder), _Stopped(), 0
    try:
        while not stopped:
            began = time.monotonic()
            child = subprocess.Popen(list(words()), cwd=folder, env=environment(more), start_new_session=True,
                                     pass_fds=[lock])  # fmt: skip
            (folder / PID).write_text(f"{os.getpid()} {child.pid}", encoding="ascii")
            try:
                ready()
                while child.poll() is None and not stopped:
                    stopped.wait(0.2)
            finally:
                _end(child.pid, child.poll)
            failures = 0 if time.monotonic() - began > STEADY_SECONDS else failures + 1
            if not stopped:
                pause = PAUSES[min(failures, len(PAUSES)) - 1] if failures else PAUSES[0]
                print(f"{Path(words()[0]).name} ended ({child.returncode}); again in {pause:g} s", flush=True)
                stopped.wait(pause)
    finally:
        (folder / PID).unlink(missing_ok=True)
        os.close(lock)


class _Stopped:
    """Whether this process was told to stop."""

    def __init__(self) -> None:
        self._told = False
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, self._hear)

    def __bool__(self) -> bool:
        return self._told

    def _hear(self, kind: int, frame: object) -> None:
        self._told = True

    def wait(self, seconds: float) -> None:
        """So long, or until told."""
        deadline = time.monotonic() + seconds
        while not self._told and time.monotonic() < deadline:
            time.sleep(min(0.1, seconds))


def launch(folder: Path, *words: str) -> None:
    """Start a `fedloom` command in the background; what it says goes to the folder's log."""
    with (folder / LOG).open("ab") as log:
        subprocess.Popen([sys.executable, "-m", "sims.cli", *words], cwd=folder, env=environment(), stdin=subprocess.DEVNULL,
                         stdout=log, stderr=log, start_new_session=True)  # fmt: skip


def running(folder: Path) -> list[int]:
    """The processes that keep a folder's program running and that it is; none: it does not run."""
    if not (folder / LOCK).exists():
        return []
    try:
        os.close(_lock(folder))
    except UserError:
        try:
            return [int(one) for one in (folder / PID).read_text(encoding="ascii").split() if _lives(int(one))]
        except (OSError, ValueError):
            return []  # it has only just begun
    return []


def stop(folder: Path) -> bool:
    """Stop a folder's program and wait until it is gone; whether there was one. UserError if it does not end."""
    if not (there := running(folder)):
        return False
    os.kill(there[0], signal.SIGTERM)
    deadline = time.monotonic() + 3 * STOP_SECONDS
    while left := running(folder):
        if left != there:  # who kept it running is gone, or was before
            _end(left[-1], lambda: None if _lives(left[-1]) else 0)
        if time.monotonic() > deadline:
            raise UserError(f"{folder}: process {left[0]} does not end; see {folder / LOG}")
        time.sleep(0.1)
    return True


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _lock(folder: Path) -> int:
    """The folder's lock, as an open file: whoever has it at work there holds it. UserError if somebody else does."""
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise UserError(f"{folder}: is at work already; 'fedloom federation status' says as what") from None
    return file


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def _end(group: int, ended: Callable[[], int | None]) -> None:
    """Stop a program and all that it started: told first, then killed."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, kind)
        deadline = time.monotonic() + STOP_SECONDS
        while ended() is None and time.monotonic() < deadline:
            time.sleep(0.05)
