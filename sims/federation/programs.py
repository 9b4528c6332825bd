"""Programs of a federation: started so that they outlive the terminal, brought back when they end, and stopped exactly."""

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

from fedloom.conf.errors import UserError
from fedloom.sims.federation.executor import DOOR
from fedloom.sims.federation.proxies import unproxied, usable

LOCK, KEEPER = "running.lock", "keeper.lock"  # the first is held by keeper and program, the second by the keeper alone
PID, LOG, OLD_LOG = "running.pid", "log.txt", "log.1.txt"
MOST_LOG = 20 << 20  # bytes of a log; what came before is in the old one
PAUSES = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)  # seconds before a program that ended is started again
STEADY_SECONDS = 60.0  # after which it counts as having been well
STOP_SECONDS = 10.0
TRIES = 5  # to have a lock
PRIVATE = 0o077  # umask of programs: what they write is for this user alone
BIN = Path(sys.executable).parent
HOME = "FLWR_HOME"  # where Flower keeps its own files
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # the environment that this program runs in is the one
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",  # seconds; Flower's own looks once a second for what to start
    "PYTHONUNBUFFERED": "1",
}


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """That of Flower's programs: ours first on the path, nothing installed, nothing told to anybody, no ports but ours."""
    path = f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    kept = {name: text for name, text in os.environ.items() if not name.startswith("FLWR_") or name == HOME}
    return {**usable(kept), **ENVIRONMENT, **unproxied(kept), "PATH": path, **(more or {})}


def lock_away(folder: Path) -> None:
    """Let no other user of this machine into the folder of a machine of a federation: keys and sockets are in there.

    UserError for a link, and for a folder of another user, who could read and replace what is in it.
    """
    here = folder.lstat()
    if stat.S_ISLNK(here.st_mode):
        raise UserError(f"{folder}: is a link; name the folder that it leads to")
    if here.st_uid != os.geteuid():
        raise UserError(f"{folder}: belongs to user {here.st_uid}, and this is user {os.geteuid()}; run this as its owner, "
                        "or name a folder of this user")  # fmt: skip
    folder.chmod(0o700)


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address of this machine. OSError, socket.gaierror if there cannot be one."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    made = socket.socket(found[0][0], socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of a server that has just ended
        made.bind(found[0][4])
    except OSError:
        made.close()
        raise
    return made


def keep_running(folder: Path, words: Callable[[], Sequence[str]], more: Mapping[str, str] | None = None) -> None:
    """Run a program from the folder until this process is told to stop (SIGTERM, SIGINT); start it again if it ends.

    `words`: its command line, worked out each time. What it says goes to the folder's log, and to the terminal. One at a
    time in a folder: UserError if another one is at work there. The program holds the folder's lock, too: if this process
    is killed and it is left behind, `running` and `stop` still know it.
    """
    lock, stopped, failures = _lock(folder / LOCK), _Stopped(), 0
    keeper, said = _lock(folder / KEEPER), _Said(folder / LOG)
    try:
        while not stopped:
            began = time.monotonic()
            child = subprocess.Popen(list(words()), cwd=folder, env=environment(more), start_new_session=True,
                                     pass_fds=[lock], stdout=said.pipe, stderr=said.pipe, umask=PRIVATE)  # fmt: skip
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
                said.say(f"the program ended ({child.returncode}); again in {pause:g} s")
                stopped.wait(pause)
    finally:
        (folder / PID).unlink(missing_ok=True)
        (folder / DOOR).unlink(missing_ok=True)
        os.close(keeper)
        os.close(lock)


def bound(log: Path) -> None:
    """Move what a log says to the old one, in place of what was there, once it is long; those who write to it go on."""
    with contextlib.suppress(OSError):  # nothing has been said yet, or the disk is full: the program goes on
        if log.stat().st_size > MOST_LOG:
            shutil.copyfile(log, log.with_name(OLD_LOG))
            os.truncate(log, 0)


class _Said:
    """Where a program's words go: `pipe` of it (None: as this process's own, which is the log already)."""

    def __init__(self, log: Path) -> None:
        self.pipe: int | None = None
        with contextlib.suppress(OSError):  # a process may have no terminal
            if os.path.samestat(os.fstat(1), log.stat()):
                return
        heard, self.pipe = os.pipe()
        threading.Thread(target=self._copy, args=[heard, log], daemon=True).start()

    def say(self, line: str) -> None:
        """A line of this process, among the program's."""
        if self.pipe is None:
            print(line, flush=True)
        else:
            os.write(self.pipe, f"{line}\n".encode())

    @staticmethod
    def _copy(heard: int, log: Path) -> None:
        with log.open("ab", buffering=0) as file:
            while piece := os.read(heard, 1 << 16):
                with contextlib.suppress(OSError):  # a disk that is full, a terminal that is gone: the program goes on
                    file.write(piece)
                with contextlib.suppress(OSError):
                    os.write(1, piece)


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
        subprocess.Popen([sys.executable, "-m", "fedloom.sims.cli", *words], cwd=folder, env=environment(),
                         stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)  # fmt: skip


@dataclass(frozen=True)
class Running:
    """Processes of a folder: the one that keeps its program running (0: it was killed), and the program's; 0, 0: none."""

    keeper: int = 0
    program: int = 0

    def __bool__(self) -> bool:
        return bool(self.keeper or self.program)


def running(folder: Path) -> Running:
    """What is at work in a folder."""
    if not _held(folder / LOCK):
        return Running()
    try:
        keeper, program = map(int, (folder / PID).read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return Running()  # it has only just begun, or is about to end
    return Running(keeper if _held(folder / KEEPER) else 0, program)


def stop(folder: Path) -> bool:
    """Stop a folder's program and wait until it is gone; whether there was one. UserError if it does not end."""
    if not (there := running(folder)):
        return False
    if there.keeper:
        os.kill(there.keeper, signal.SIGTERM)
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
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _lock(path: Path) -> int:
    """A lock, as an open file. UserError if somebody else holds it."""
    for _ in range(TRIES):  # somebody may only be looking
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except OSError:
            os.close(file)
            time.sleep(0.05)
    told = f"'fedloom federation status {path.parent}' says as what, 'down' stops it"
    raise UserError(f"{path.parent}: is at work already; {told}")


def _held(path: Path) -> bool:
    """Whether somebody holds a lock."""
    if not path.exists():
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def _end(group: int, ended: Callable[[], int | None]) -> None:
    """Stop a program and all that it started: told first, then killed."""
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, kind)
        deadline = time.monotonic() + STOP_SECONDS
        while ended() is None and time.monotonic() < deadline:
            time.sleep(0.05)
