"""Carry out one configuration after another in a process of a sweep. The parent sends each as a line of JSON on stdin.

The process reports events to the parent as lines of JSON. When the parent exits or sends SIGTERM, the run is interrupted
as by Ctrl-C.
"""

import contextlib
import os
import signal
import sys
import threading
from queue import SimpleQueue
from typing import TextIO

from fedloom.conf.loading import from_json
from fedloom.sims.engines.share import Share
from fedloom.sims.process import listen


def main() -> None:
    """Carry out configurations from stdin, then exit. Arguments: parallel runs, runs per GPU, cores (0,1; empty: all)."""
    listen()
    runs, on_gpu, cores = sys.argv[1:]
    _take(cores)
    with contextlib.suppress(KeyboardInterrupt):
        work(_own_line(), Share(int(runs), int(on_gpu)))
    sys.stderr.flush()
    os._exit(0)  # all is saved: a normal exit takes seconds with torch on a busy machine


def work(out: TextIO, share: Share) -> None:
    """Carry out configurations from stdin until stdin ends. Write events to `out`."""
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
    """Put stdin's lines into the queue. At the end of stdin, interrupt the current run and start no other."""
    for line in sys.stdin:
        lines.put(line)
    gone.set()
    lines.put("")
    if busy.is_set():
        os.kill(os.getpid(), signal.SIGTERM)


def _own_line() -> TextIO:
    """Reserve stdout for events, and send everything else that is printed to stderr. Return the stream for events."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _take(cores: str) -> None:
    """Use only these cores, where the system supports it: torch and Ray choose their thread numbers by them."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
