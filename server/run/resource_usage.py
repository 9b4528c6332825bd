"""The resources of a run, over all its sessions: seconds, and peak memory of the server's process."""

import time
from collections.abc import Mapping
from typing import Any

from fedloom.conf.machine import forget_peak, peak_memory
from fedloom.server.rounds.listener import Listener


class Spent(Listener):
    """Counts the resources of a session since `began` (time.monotonic), and adds those of an earlier summary."""

    def __init__(self, began: float, before: Mapping[str, Any]) -> None:
        resources = before.get("resources")
        self.began, self._before = began, resources if isinstance(resources, Mapping) else {}
        self._begun = False
        forget_peak()  # the peak of an earlier run in this process
        self._seconds, self._start_up = _number(before.get("seconds")), _number(self._before.get("start_up"))

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        """Count the time until the rounds begin as the start-up."""
        if not self._begun:
            self._begun, self._start_up = True, self._start_up + time.monotonic() - self.began

    def entries(self) -> dict[str, Any]:
        """Return the entries for the summary: seconds, start-up seconds, and peak memory in bytes."""
        peak = max(peak_memory(), int(_number(self._before.get("peak_memory"))))
        seconds = self._seconds + time.monotonic() - self.began
        return {"seconds": seconds, "resources": {"start_up": self._start_up, "peak_memory": peak}}


def _number(value: Any) -> float:
    """Return the number, or zero if an edited summary has something else."""
    return float(value) if isinstance(value, int | float) and 0 <= value < float("inf") else 0.0
