"""The number of messages in one call of a worker, and the number of calls that wait at a worker."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

MOST_MESSAGES = 100
MOST_BYTES = 16 * 2**20
LEAST_SECONDS = 0.04  # the call itself costs some milliseconds
SECONDS_PER_CALL = 0.5  # the aim for a call: short enough to balance unequal sites
FIRST_CHUNK = 8  # before the duration of tasks is known
LONG_TASK = 0.25  # seconds; with longer tasks, no second call waits at a worker
LEAST_BATCHES = 1.25  # below, second calls cost more than they balance
RECENT = 0.3  # the weight of the last call in the moving averages


@dataclass
class ChunkPolicy:
    """Chooses how many messages a call of a worker gets, from the moving averages of their duration and its variance.

    Sites that take equally long are shared out in one call for each worker, unequal ones in several calls of falling size:
    the rule of factoring for its first batch (Hummel, Schonberg and Flynn, "Factoring: a method for scheduling parallel
    loops", 1992).
    """

    workers: int
    least: int = 1  # sites that are trained as one must be in one call
    task_seconds: float | None = None
    _variance: float = 0.0

    def learn(self, seconds: Sequence[float]) -> None:
        """Update the averages with the duration of each message of a call, in seconds."""
        if not seconds:
            return
        mean = sum(seconds) / len(seconds)
        if self.task_seconds is None:
            self.task_seconds, self._variance = mean, mean**2  # nothing is known of the variance yet
        self.task_seconds += RECENT * (mean - self.task_seconds)
        squares = sum((each - self.task_seconds) ** 2 for each in seconds) / len(seconds)
        self._variance += RECENT * (squares - self._variance)

    def size(self, waiting: int, message_bytes: int) -> int:
        """Return the number of messages for the next call. `waiting` are in the queue; the first has `message_bytes`."""
        share = math.ceil(waiting / (self.workers * self._batches(waiting)))
        by_bytes = MOST_BYTES // max(1, message_bytes)
        by_time = FIRST_CHUNK if self.task_seconds is None else int(SECONDS_PER_CALL / max(self.task_seconds, 1e-6))
        floor = 1 if self.task_seconds is None else round(LEAST_SECONDS / max(self.task_seconds, 1e-6))
        return max(self.least, min(MOST_MESSAGES, max(share, floor), by_bytes, by_time))

    def _batches(self, waiting: int) -> float:
        """Return how often the next calls of all workers together go into the queue: 1 if all take equally long."""
        if not self.task_seconds:
            return 2.0
        spread = math.sqrt(self._variance) / self.task_seconds * self.workers / (2 * math.sqrt(max(1, waiting)))
        batches = 1 + spread**2 + spread * math.sqrt(spread**2 + 2)
        return batches if batches > LEAST_BATCHES else 1.0

    def depth(self) -> int:
        """Return how many calls a worker has at a time: one runs, a second may wait."""
        return 1 if self.task_seconds is None or self.task_seconds > LONG_TASK else 2
