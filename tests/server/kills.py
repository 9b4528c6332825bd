"""Runs in processes of their own, killed at moments of our choice."""

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fedloom.conf import Config
from fedloom.conf.errors import UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.connection import Connection
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run_folder.folder import METRICS, SUMMARY
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, files, folder, one_thread, small

CHILDREN = multiprocessing.get_context("forkserver")
CHILDREN.set_forkserver_preload(
    ["fedloom.server.ledger.audit", "tests.server.kills", "sklearn.datasets", "sympy"]
)  # a run imports these late
SITES, ROUNDS = 3, 4


def configured(root: Path, *words: str) -> Config:
    """A run of 4 rounds, which takes about a second."""
    return small(root, f"rounds={ROUNDS}", *words, sites=SITES, samples=20)


def work(config: Config, trap: tuple[str, int] | None = None) -> None:
    """Run, or go on with, all of it; `trap`: at which occurrence of what it is killed."""
    one_thread()
    listener = Recorder()
    if trap is not None:
        TRAPS[trap[0]](_at(trap[1]), listener)
    config = dataclasses.replace(config, run=dataclasses.replace(config.run, resume=True))
    run_experiment(InlineGrid(SITES, store_folder(config)), config, listener)


def begun(config: Config, trap: tuple[str, int] | None = None) -> BaseProcess:
    """A process that does that."""
    process = CHILDREN.Process(target=work, args=(config, trap))
    process.start()
    return process


def die(config: Config, trap: tuple[str, int]) -> None:
    """Run in a process that is killed at the trap."""
    process = begun(config, trap)
    process.join()
    assert process.exitcode == -9


def results(path: Path) -> dict[str, Any]:
    """What a run leaves, but for times: metrics, summary, the ledger's rows, the bits of all states."""
    lines = [json.loads(line) for line in (path / METRICS).read_text().splitlines()]
    with Ledger.open(path, server=False) as ledger:
        rounds = [dataclasses.replace(row, time="") for row in ledger.rounds()]
        latest = ledger.all_latest()
    summary = json.loads((path / SUMMARY).read_text())
    found = _timeless({"summary": summary, **{f"round {line['round']}": line for line in lines}})
    return {**found, "lines": len(lines), "rounds": rounds, "latest": latest, "states": files(path / "states")}


def _timeless(content: Any) -> Any:
    """The same without what a process took: seconds, memory."""
    if not isinstance(content, dict):
        return content
    return {key: _timeless(item) for key, item in content.items() if key not in ("seconds", "resources")}


def last_round(config: Config) -> int | None:
    """The last round that is committed; None without a ledger that can be read."""
    with contextlib.suppress(UserError), Ledger.open(folder(config), server=False) as ledger:
        last = ledger.last_round()
        return last.round if last else -1
    return None


def _at(number: int) -> Callable[[], None]:
    """What kills its own process when it is called for that time."""
    left = [number]

    def count() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    return count


def _before_the_rename(into: str) -> Callable[[Callable[[], None], Recorder], None]:
    def trap(kill: Callable[[], None], _: Recorder) -> None:
        def replace(old: Any, new: Any, *, original: Callable = os.replace) -> None:
            if Path(new).parent.name == into:
                kill()
            original(old, new)

        os.replace = replace  # type: ignore[assignment]

    return trap


def _at_the_commit(before: bool) -> Callable[[Callable[[], None], Recorder], None]:
    def trap(kill: Callable[[], None], _: Recorder) -> None:
        original = Connection.execute

        def execute(self: Connection, sql: str, *values: Any) -> sqlite3.Cursor:
            if sql == "COMMIT" and before:
                kill()
            found = original(self, sql, *values)
            if sql == "COMMIT" and not before:
                kill()
            return found

        Connection.execute = execute  # type: ignore[method-assign]

    return trap


def _before_the_metrics(kill: Callable[[], None], listener: Recorder) -> None:
    listener.round_done = lambda record: kill()


TRAPS: dict[str, Callable[[Callable[[], None], Recorder], None]] = {
    "blob": _before_the_rename("blobs"),
    "states": _before_the_rename("states"),
    "files": _before_the_rename("digits"),
    "before commit": _at_the_commit(before=True),
    "after commit": _at_the_commit(before=False),
    "metrics": _before_the_metrics,
}
