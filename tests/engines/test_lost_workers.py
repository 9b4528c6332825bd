"""Workers that die where nothing can be read of it, hang, stop, or never start; and work that is given up while it runs."""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedloom.conf.errors import FailedError
from fedloom.sims.engines.codec import pack
from fedloom.sims.engines.ray import RayGrid
from tests.engines.messages import SITES, answers, ask, assert_good, by_site, messages, opened, pids

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_ray")]


class Bomb:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> Any:
        return exec, ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)",)


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, one_ray: None) -> Iterator[RayGrid]:
    """Two workers with partial sums, four seconds a message."""
    grid = opened(tmp_path_factory.mktemp("lost"), "engine.task_timeout=4", "federation.partial_sums=true")
    yield grid
    grid.close()


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory, one_ray: None) -> Iterator[RayGrid]:
    """The same, but the pool and its workers seem to be on different machines: no mark can be read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedloom.sims.engines.heartbeat.socket.gethostname", lambda: "elsewhere")
        grid = opened(tmp_path_factory.mktemp("far"), "engine.task_timeout=4")
        yield grid
        grid.close()
    assert socket.gethostname() != "elsewhere"


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory, one_ray: None) -> Iterator[RayGrid]:
    """One worker."""
    grid = opened(tmp_path_factory.mktemp("single"), "engine.workers=1")
    yield grid
    grid.close()


def test_a_message_that_kills_its_worker_while_it_is_unpacked_is_charged_and_no_one_else(grid: RayGrid):
    """Once it was charged to nobody, and sent again for ever."""
    sent = messages({})
    keys = list(grid.push_messages(sent[:5]))
    metadata, error, records = pack(sent[5])
    key = "bomb"
    grid._messages[key] = sent[5]
    grid._pool.add(key, 5, (metadata, error, [*records, ("bomb", Bomb())]))
    keys += [key, *grid.push_messages(sent[6:])]
    found = by_site(answers(grid, keys, 100))
    assert len(found) == SITES
    assert_good(found, {5})
    assert "killed its worker 2 times" in str(found[5].error.reason)


def test_a_message_that_cannot_be_unpacked_fails_alone(grid: RayGrid):
    sent = messages({})
    key, metadata = "odd", pack(sent[0])[0]
    grid._messages[key] = sent[0]
    grid._pool.add(key, 0, (metadata, None, [("x", 5)]))
    keys = [key, *grid.push_messages(sent[1:])]
    found = by_site(answers(grid, keys, 60))
    assert_good(found, {0})
    assert "its message cannot be read (" in str(found[0].error.reason)


@pytest.mark.parametrize(
    ("kind", "reason"), [("raise", "ValueError: this site has no data"), ("kill", "killed its worker 2 times")]
)
def test_errors_of_combine_are_reported_as_such_and_cost_no_worker_and_no_neighbour(grid: RayGrid, kind: str, reason: str):
    before = pids(ask(grid, {}))
    replies = ask(grid, {7: {"combine": kind}})
    assert_good(replies, {7})
    assert reason in str(replies[7].error.reason)
    if kind == "raise":
        assert pids(ask(grid, {})) <= before


@pytest.mark.parametrize(
    ("kind", "reason"), [("kill", "killed its worker 2 times"), ("hang", "took longer than engine.task_timeout=4 s")]
)
def test_faults_on_other_machines_are_charged_to_their_message(far: RayGrid, kind: str, reason: str):
    replies = ask(far, {3: {"kind": kind}})
    assert_good(replies, {3})
    assert reason in str(replies[3].error.reason)
    assert_good(ask(far, {}), set())


def test_a_worker_that_hangs_is_abandoned_and_its_work_done_elsewhere(far: RayGrid, tmp_path: Path):
    begin = time.monotonic()
    assert_good(ask(far, {4: {"kind": "stop_once", "once": str(tmp_path / "stopped")}}), set())
    assert (tmp_path / "stopped").exists()
    assert time.monotonic() - begin < 60


def test_what_is_abandoned_stops_before_the_call_returns_and_does_nothing_later(grid: RayGrid, tmp_path: Path):
    """A site that trained on after its round had ended made a store anew that had been erased."""
    assert_good(ask(grid, {}), set())
    seen = tmp_path / "seen"
    os.mkfifo(f"{seen}.gate")  # what runs ends only when its process is ended, however long the machine halts
    keys = list(grid.push_messages(messages({site: {"kind": "late", "once": str(seen)} for site in range(SITES)})))
    until(lambda: bool(begun(tmp_path)))  # it is running
    with Ticks() as ticks:
        grid.cancel(keys)
    assert ticks.number < 150  # 15 s, without halts
    assert not grid._pool._calls and not grid._pool._queue and not grid._pool._done and not grid._messages
    until(lambda: not begun(tmp_path) & workers())  # the processes that were at it have ended
    with pytest.raises(OSError, match="No such device or address"):  # no one waits there
        os.open(f"{seen}.gate", os.O_WRONLY | os.O_NONBLOCK)
    assert_good(ask(grid, {}), set())
    assert not seen.exists()


def begun(folder: Path) -> set[int]:
    """The processes that have begun what is late."""
    return {int(path.name.rpartition("-")[2]) for path in folder.glob("*.begun-*")}


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds: at most a minute of this process's own time, which does not run while it halts."""
    for _ in range(1200):
        if holds():
            return
        time.sleep(0.05)
    pytest.fail("it did not come to pass within a minute")


class Ticks:
    """Counts tenths of a second in which this process runs: a halt, however long, is one."""

    def __enter__(self) -> "Ticks":
        self.number, self._end = 0, threading.Event()
        self._thread = threading.Thread(target=self._count)
        self._thread.start()
        return self

    def _count(self) -> None:
        while not self._end.wait(0.1):
            self.number += 1

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()


def test_a_chunk_that_is_abandoned_ends_after_its_present_message_and_keeps_its_worker(grid: RayGrid):
    before = pids(ask(grid, {}))  # of this grid: others' may still be ending
    keys = list(grid.push_messages(messages({site: {"kind": "slow"} for site in range(SITES)})))
    time.sleep(0.7)
    begin = time.monotonic()
    grid.cancel(keys)
    assert time.monotonic() - begin < 3
    assert list(grid.pull_messages(keys)) == []
    assert_good(ask(grid, {}), set())
    assert before and before <= workers()


def test_what_was_abandoned_because_it_took_too_long_goes_in_smaller_chunks_next_time(single: RayGrid):
    """Once nothing was learnt from calls that were cancelled: sites that had become slow never answered in time again."""
    for _ in range(5):
        assert_good(ask(single, {}), set())  # so that all go into one chunk
    slow = messages({site: {"kind": "slow"} for site in range(SITES)})
    keys = list(single.push_messages(slow))
    assert answers(single, keys, 3) == []
    single.cancel(keys)
    keys = list(single.push_messages(messages({site: {"kind": "slow"} for site in range(SITES)})))
    assert answers(single, keys, 3)
    single.cancel(keys)


def test_whatever_goes_wrong_in_the_pool_is_heard_by_whoever_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    grid = opened(tmp_path, "engine.workers=1")
    try:
        monkeypatch.setattr(grid._pool._policy, "learn", lambda *_: 1 / 0)
        with pytest.raises(FailedError, match=r"Ray failed \(ZeroDivisionError: division by zero\)"):
            grid.send_and_receive(messages({}), timeout=60)
    finally:
        grid.close()


def test_a_message_that_kills_the_only_worker_is_tried_again_after_all_others(single: RayGrid):
    """Once it came first, and two deaths in a row could cost a whole round its replies."""
    keys = list(single.push_messages(messages({0: {"kind": "kill"}})))
    replies = answers(single, keys, 100)
    assert_good(by_site(replies), {0})
    assert len(replies) == SITES
    assert [reply.has_error() for reply in replies].index(True) == SITES - 1


def test_workers_that_cannot_import_what_they_need_say_so_at_once(tmp_path: Path):
    grid = opened(tmp_path, "engine.workers=1", app="tests.engines.faulty:no_such_app")
    try:
        with pytest.raises(FailedError, match=r"Ray's workers cannot run the sites: AttributeError: .*no_such_app"):
            grid.send_and_receive(messages({}), timeout=60)
    finally:
        grid.close()


def listening(pid: int) -> set[str]:
    """The addresses, in hexadecimal, at which a process listens (Linux); none if it has just ended."""
    try:
        tables = [Path(f"/proc/{pid}/net/{table}").read_text() for table in ("tcp", "tcp6")]
    except OSError:
        return set()
    sockets = set()
    with contextlib.suppress(OSError):
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(link))
    found = set()
    for table in tables:
        for line in table.splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                found.add(words[1].rpartition(":")[0])
    return found


def descendants(pid: int) -> set[int]:
    """A process and all that came of it."""
    parents = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def workers() -> set[int]:
    """The Ray workers of this process that live."""
    found = set()
    for pid in descendants(os.getpid()):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::Worker"):
                found.add(pid)
    return found


def test_a_ray_that_we_start_listens_on_this_machine_alone(grid: RayGrid):
    assert_good(ask(grid, {}), set())
    addresses = set().union(*(listening(pid) for pid in descendants(os.getpid())))
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert addresses and addresses <= loopback
