"""Start the programs of a federation so that they outlive the terminal, restart them, and stop exactly these."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from fedloom.conf.errors import UserError
from fedloom.sims.federation.executor import DOOR
from fedloom.sims.federation.proxies import unproxied, usable
from fedloom.sims.progress.output import wants_json, wrapped

LOCK, KEEPER = "running.lock", "keeper.lock"  # keeper and program hold the first, the keeper alone the second
PID, LOG, OLD_LOG = "running.pid", "log.txt", "log.1.txt"
MOST_LOG = 20 << 20  # bytes of a log; earlier lines are in the old one
MOST_LINE = 1 << 14  # bytes of a line in a log of JSON lines
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds before the restart of a program
STEADY_SECONDS = 60.0  # after which a program counts as healthy
STOP_SECONDS = 10.0
TRIES = 5  # for a lock
PRIVATE = 0o077  # umask of programs, so that only this user reads their files
BIN = Path(sys.executable).parent
HOME = "FLWR_HOME"  # the variable with the folder of Flower's files
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # programs use the current environment
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; Flower's default is one
    "PYTHONUNBUFFERED": "1",
}


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables for Flower's programs: our programs first, no installation, no telemetry."""
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    inherited = {name: text for name, text in os.environ.items() if not name.startswith("FLWR_") or name == HOME}
    return {**usable(inherited), **ENVIRONMENT, **unproxied(inherited), "PATH": path, **(more or {})}


def lock_away(folder: Path) -> None:
    """Make a machine's folder, with its keys and sockets, private to this user.

    Raises UserError for a link, and for a folder of another user, who could read and replace its files.
    """
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UserError(f"{folder}: is a link; name its target")
    if status.st_uid != os.geteuid():
        raise UserError(f"{folder}: belongs to user {status.st_uid}, but this is user {os.geteuid()}; run as its owner, "
                        "or name a folder of this user")  # fmt: skip
    folder.chmod(0o700)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket bound to an address of this machine. Raises OSError or socket.gaierror if that fails."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound = socket.socket(addresses[0][0], socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # even just after another server
        bound.bind(addresses[0][4])
    except OSError:
        bound.close()
        raise
    return bound


def keep_running(folder: Path, words: Callable[[], Sequence[str]], more: Mapping[str, str] | None = None) -> None:
    """Run a program in the folder until SIGTERM or SIGINT reaches this process. Restart it if it ends.

    `words`: returns the command line for each start. The output goes to the folder's log and to the terminal. The program
    also holds the folder's lock, so that `running` and `stop` find it even if this process is killed.
    Raises UserError if another program is running in the folder.
    """
    lock, stopped, failures = _lock(folder / LOCK), _StopSignal(), 0
    keeper, output = _lock(folder / KEEPER), _Output(folder / LOG)
    try:
        while not stopped:
            began = time.monotonic()
            child = subprocess.Popen(list(words()), cwd=folder, env=environment(more), start_new_session=True,
                                     pass_fds=[lock], stdout=output.pipe, stderr=output.pipe, umask=PRIVATE)  # fmt: skip
            (folder / PID).write_text(f"{os.getpid()} {child.pid}", encoding="ascii")
            try:
                while child.poll() is None and not stopped:
                    stopped.wait(0.2)
                    bound(folder / LOG)
            finally:
                _end(child.pid, child.poll)
            failures = 0 if time.monotonic() - began > STEADY_SECONDS else failures + 1
            if not stopped:
                pause = PAUSES[min(failures, len(PAUSES)) - 1] if failures else PAUSES[0]
                output.say(f"the program ended ({child.returncode}); it starts again in {pause:g} s")
                stopped.wait(pause)
    finally:
        (folder / PID).unlink(missing_ok=True)
        (folder / DOOR).unlink(missing_ok=True)
        os.close(keeper)
        os.close(lock)


def bound(log: Path) -> None:
    """If a log is longer than MOST_LOG, empty it and replace the old log by a copy. Programs can still write to it."""
    with contextlib.suppress(OSError):  # there is no log yet, or the disk is full
        if log.stat().st_size > MOST_LOG:
            shutil.copyfile(log, log.with_name(OLD_LOG))
            os.truncate(log, 0)


class _Output:
    """Copies a program's output to log and terminal. `pipe`: to write to; None if nothing needs to be copied."""

    def __init__(self, log: Path) -> None:
        self.pipe: int | None = None
        copy, both = self._as_json if wants_json() else self._copy, True
        with contextlib.suppress(OSError):  # a process may have no terminal
            both = not os.path.samestat(os.fstat(1), log.stat())
        if both or wants_json():
            reader, self.pipe = os.pipe()
            threading.Thread(target=copy, args=[reader, log, both], daemon=True).start()

    def say(self, line: str) -> None:
        """Write a line of this process to the output."""
        if self.pipe is None:
            print(line, flush=True)
        else:
            os.write(self.pipe, f"{line}\n".encode())

    @staticmethod
    def _copy(reader: int, log: Path, both: bool) -> None:
        with log.open("ab", buffering=0) as file:
            while piece := os.read(reader, 1 << 16):
                _write(file, piece, both)

    @staticmethod
    def _as_json(reader: int, log: Path, both: bool) -> None:
        with log.open("ab", buffering=0) as file, open(reader, "rb") as lines:
            while line := lines.readline(MOST_LINE):
                if text := wrapped(line.decode(errors="replace"), machine=log.resolve().parent.name):
                    _write(file, f"{text}\n".encode(), both)


def _write(file: IO[bytes], content: bytes, both: bool) -> None:
    """Write to the log and, with `both`, to the terminal. The program continues if the disk is full or the terminal gone."""
    with contextlib.suppress(OSError):
        file.write(content)
    if both:
        with contextlib.suppress(OSError):
            os.write(1, content)


class _StopSignal:
    """Whether SIGTERM or SIGINT has reached this process."""

    def __init__(self) -> None:
        self._received = False
        for kind in (signal.SIGTERM, signal.SIGINT):
            signal.signal(kind, self._hear)

    def __bool__(self) -> bool:
        return self._received

    def _hear(self, kind: int, frame: object) -> None:
        self._received = True

    def wait(self, seconds: float) -> None:
        """Wait for a time, or until a signal."""
        deadline = time.monotonic() + seconds
        while not self._received and time.monotonic() < deadline:
            time.sleep(min(0.1, seconds))


def launch(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """Start a `fedloom` command in the background, with its output in the folder's log. Return its process."""
    with (folder / LOG).open("ab") as log:
        return subprocess.Popen([sys.executable, "-m", "fedloom.sims.cli", *words], cwd=folder, env=environment(),
                                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)  # fmt: skip


@dataclass(frozen=True)
class Running:
    """A folder's process ids: of the keeper, which restarts the program (0: it was killed), and of the program."""

    keeper: int = 0
    program: int = 0

    def __bool__(self) -> bool:
        return bool(self.keeper or self.program)


def running(folder: Path) -> Running:
    """Return the processes that run in a machine's folder; the result is false without any."""
    if not _held(folder / LOCK):
        return Running()
    try:
        keeper, program = map(int, (folder / PID).read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return Running()  # it is starting or ending
    return Running(keeper if _held(folder / KEEPER) else 0, program)


def stop(folder: Path) -> bool:
    """Stop the program of a machine's folder; return whether one was running. Raises UserError if it does not end."""
    if not (found := running(folder)):
        return False
    if found.keeper:
        os.kill(found.keeper, signal.SIGTERM)
    deadline = time.monotonic() + 3 * STOP_SECONDS
    while left := running(folder):
        if not left.keeper:
            _end(left.program, lambda: None if _held(folder / LOCK) else 0)
        if time.monotonic() > deadline:
            raise UserError(f"{folder}: process {left.keeper or left.program} does not end; see {folder / LOG}")
        time.sleep(0.1)
    (folder / DOOR).unlink(missing_ok=True)
    return True


def free_port() -> int:
    """Return the number of a free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _lock(path: Path) -> int:
    """Return the open file of a lock. Raises UserError if another process holds it."""
    for _ in range(TRIES):  # another process may hold it for a moment, to look
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            os.close(file)
            time.sleep(0.05)
    commands = f"'fedloom federation status {path.parent}' shows the process, 'down' stops it"
    raise UserError(f"{path.parent}: is running already; {commands}")


def _held(path: Path) -> bool:
    """Return whether a process holds a lock."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _end(group: int, ended: Callable[[], int | None]) -> None:
    """Stop a process group with SIGTERM, then with SIGKILL."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, kind)
        deadline = time.monotonic() + STOP_SECONDS
        while ended() is None and time.monotonic() < deadline:
            time.sleep(0.05)
