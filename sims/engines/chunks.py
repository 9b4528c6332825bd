"""How many messages go into one call of a worker, and how many calls a worker is given ahead."""

from dataclasses import dataclass

MOST_MESSAGES = 100
MOST_BYTES = 16 * 2**20
LEAST_SECONDS = 0.04  # a call itself costs some milliseconds
SECONDS_PER_CALL = 0.5  # a call lasts about that long, so that unequal sites still balance
FIRST_CHUNK = 8  # while nothing is known of the tasks
LONG_TASK = 0.25  # seconds; workers get no second call ahead of such tasks


@dataclass
class ChunkPolicy:
    """Learns the tasks' duration (a moving average) and proposes chunk sizes."""

    workers: int
    least: int = 1  # sites that are trained as one stay together
    task_seconds: float | None = None

    def learn(self, seconds: float, messages: int) -> None:
        """A call of so many messages took so long."""
        mean = seconds / max(1, messages)
        self.task_seconds = mean if self.task_seconds is None else 0.7 * self.task_seconds + 0.3 * mean

    def size(self, waiting: int, message_bytes: int) -> int:
        """Messages for the next call, `waiting` in the queue, the first of them of `message_bytes`."""
        share = -(-waiting // (2 * self.workers))
        by_bytes = MOST_BYTES // max(1, message_bytes)
        by_time = FIRST_CHUNK if self.task_seconds is None else int(SECONDS_PER_CALL / max(self.task_seconds, 1e-6))
        floor = 1 if self.task_seconds is None else round(LEAST_SECONDS / max(self.task_seconds, 1e-6))
        return max(self.least, min(MOST_MESSAGES, max(share, floor), by_bytes, by_time))

    def depth(self) -> int:
        """Calls in flight for each worker."""
        return 1 if self.task_seconds is None or self.task_seconds > LONG_TASK else 2
