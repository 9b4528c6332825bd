"""What a run takes of the machine, over all its sessions: seconds, and the memory of the server's process."""

import time
from collections.abc import Mapping
from typing import Any

from fedloom.conf.machine import forget_peak, peak_memory
from fedloom.server.rounds.listener import Listener


class Spent(Listener):
    """Of a session that began at `began` (time.monotonic), behind those that a summary tells of. Hears when it starts."""

    def __init__(self, began: float, before: Mapping[str, Any]) -> None:
        resources = before.get("resources")
        self.began, self._before = began, resources if isinstance(resources, Mapping) else {}
        self._begun = False
        forget_peak()  # of a run before it in this process
        self._seconds, self._start_up = _number(before.get("seconds")), _number(self._before.get("start_up"))

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        """The rounds begin: what came before was the start-up."""
        if not self._begun:
            self._begun, self._start_up = True, self._start_up + time.monotonic() - self.began

    def told(self) -> dict[str, Any]:
        """For the summary: seconds; of these the start-up's; bytes of memory that a session's process held at most."""
        peak = max(peak_memory(), int(_number(self._before.get("peak_memory"))))
        seconds = self._seconds + time.monotonic() - self.began
        return {"seconds": seconds, "resources": {"start_up": self._start_up, "peak_memory": peak}}


def _number(given: Any) -> float:
    """Zero for what an edited summary says instead."""
    return float(given) if isinstance(given, int | float) and 0 <= given < float("inf") else 0.0
