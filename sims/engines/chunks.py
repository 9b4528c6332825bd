"""The number of messages in one call of a worker, and the number of calls that wait at a worker."""

from dataclasses import dataclass

MOST_MESSAGES = 100
MOST_BYTES = 16 * 2**20
LEAST_SECONDS = 0.04  # the call itself costs some milliseconds
SECONDS_PER_CALL = 0.5  # the aim for a call: short enough to balance unequal sites
FIRST_CHUNK = 8  # before the duration of tasks is known
LONG_TASK = 0.25  # seconds; with longer tasks, no second call waits at a worker


@dataclass
class ChunkPolicy:
    """Chooses how many messages a call of a worker gets, from the moving average of their duration."""

    workers: int
    least: int = 1  # sites that are trained as one must be in one call
    task_seconds: float | None = None

    def learn(self, seconds: float, messages: int) -> None:
        """Update the average with the seconds and the number of messages of a call."""
        mean = seconds / max(1, messages)
        self.task_seconds = mean if self.task_seconds is None else 0.7 * self.task_seconds + 0.3 * mean

    def size(self, waiting: int, message_bytes: int) -> int:
        """Return the number of messages for the next call. `waiting` are in the queue; the first has `message_bytes`."""
        share = -(-waiting // (2 * self.workers))
        by_bytes = MOST_BYTES // max(1, message_bytes)
        by_time = FIRST_CHUNK if self.task_seconds is None else int(SECONDS_PER_CALL / max(self.task_seconds, 1e-6))
        floor = 1 if self.task_seconds is None else round(LEAST_SECONDS / max(self.task_seconds, 1e-6))
        return max(self.least, min(MOST_MESSAGES, max(share, floor), by_bytes, by_time))

    def depth(self) -> int:
        """Return how many calls a worker has at a time: one runs, a second may wait."""
        return 1 if self.task_seconds is None or self.task_seconds > LONG_TASK else 2
