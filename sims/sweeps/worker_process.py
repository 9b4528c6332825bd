"""The process that runs one configuration after another, as its parent hands them over: one line of JSON for each on stdin.

What happens goes to the parent as lines of JSON, too. When the parent is gone, or says so by SIGTERM, the run is
interrupted as by Ctrl-C.
"""

import contextlib
import os
import signal
import sys
import threading
from queue import SimpleQueue
from typing import TextIO

from fedloom.conf.load import from_json
from fedloom.sims.engines.share import Share
from fedloom.sims.process import listen


def main() -> None:
    """Arguments: how many runs go on at once, how many share a GPU, and the cores to take (0,1; empty: all)."""
    listen()
    runs, on_gpu, cores = sys.argv[1:]
    _take(cores)
    with contextlib.suppress(KeyboardInterrupt):
        work(_own_line(), Share(int(runs), int(on_gpu)))
    sys.stderr.flush()
    os._exit(0)  # all is in order: the end of an interpreter with torch in it takes seconds on a busy machine


def work(out: TextIO, share: Share) -> None:
    """Run what comes until no more does."""
    lines, busy, gone = SimpleQueue[str](), threading.Event(), threading.Event()
    threading.Thread(target=_read, args=[lines, busy, gone], daemon=True).start()
    from fedloom.sims.operations.simulate import simulate
    from fedloom.sims.sweeps.events import FAILED, FINISHED, Teller
    from fedloom.sims.sweeps.outcome import attempt

    while line := lines.get():
        config, teller = from_json(line), Teller(out)
        busy.set()
        if gone.is_set():
            return
        reason = attempt(lambda config=config, teller=teller: simulate(config, listener=teller, share=share))
        busy.clear()
        teller.tell(FAILED, reason) if reason else teller.tell(FINISHED)


def _read(lines: "SimpleQueue[str]", busy: threading.Event, gone: threading.Event) -> None:
    """Hand lines on; at the end of them, interrupt what runs, and have nothing more begin."""
    for line in sys.stdin:
        lines.put(line)
    gone.set()
    lines.put("")
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _own_line() -> TextIO:
    """What was stdout, for events alone: whatever else is printed goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _take(cores: str) -> None:
    """Keep to these cores, where the system can: torch and Ray size themselves by them."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
