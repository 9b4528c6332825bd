"""The processes of a soak: how much memory they take early and late, and what is left of them at the end."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from fedloom.sims.benchmarks.engine_watch import MARK, Watch, store_bytes
from fedloom.sims.progress.memory import own_bytes

EARLY, SPAN = 50, 10  # memory after this round is compared with that at the end, each the median of some rounds
LEAST_BYTES = 32 * 2**20  # of less than that, growth is told as a share of it: a store of 2 MB takes pages by the message
END_SECONDS = 20.0
WHAT: tuple[str, ...] = ("driver", "largest worker", "object store")


class Processes:
    """All that this process starts while the watch is open. Ray's workers and its store are known by their command lines."""

    def __init__(self) -> None:
        os.environ[MARK] = f"soak-{os.getpid()}-{time.monotonic_ns()}"
        self._watch = Watch(os.environ[MARK])
        self._taken: list[dict[str, int]] = []  # by round

    def sample(self) -> None:
        """Look once, after each round."""
        now = dict.fromkeys(WHAT, 0)
        for process in self._watch.processes():
            with contextlib.suppress(OSError, IndexError):  # it has just ended
                words = Path(f"/proc/{process}/cmdline").read_bytes()
                if words.startswith(b"ray::Worker"):
                    now["largest worker"] = max(now["largest worker"], own_bytes(process))
                elif b"/raylet/raylet" in words:  # each node has its own store
                    now["object store"] = max(now["object store"], store_bytes(process))
        self._taken.append({**now, "driver": own_bytes(os.getpid())})

    def growth(self) -> dict[str, float] | None:
        """Of each of WHAT, the growth from early to late; None if the run was too short to tell."""
        if len(self._taken) < 2 * EARLY:
            return None
        early, late = self._taken[EARLY - SPAN : EARLY], self._taken[-SPAN:]
        before, after = ({what: _typical(some, what) for what in WHAT} for some in (early, late))
        return {what: (after[what] - before[what]) / max(LEAST_BYTES, before[what]) for what in WHAT}

    def mib(self) -> dict[str, float]:
        """At the end."""
        return {what: _typical(self._taken[-SPAN:], what) / 2**20 for what in WHAT}

    def left(self) -> list[str]:
        """The command lines of what still runs some seconds after everything was closed."""
        deadline = time.monotonic() + END_SECONDS
        while (found := self._watch.processes()) and time.monotonic() < deadline:
            time.sleep(0.2)
        os.environ.pop(MARK, None)
        return [Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()[:100] for process in found]


def _typical(samples: Sequence[dict[str, int]], what: str) -> float:
    return float(median(sample[what] for sample in samples))
