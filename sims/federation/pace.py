"""Shorten the pauses of Flower's node (1.41): three seconds after an answer without an order, half seconds for a reply.

Here the node asks again at once, unless the server answers quickly twice (sims.federation.long_polling), and continues when
a reply comes.
"""

import importlib
import threading
import time
from collections.abc import Callable
from typing import Any

from fedloom.sims.federation.doors import TASK
from fedloom.sims.federation.long_polling import Signals

LEAST_HELD_SECONDS = 1.0  # an answer without an order that took so long was held
FOR_REPLY_SECONDS = 0.5  # Flower's pause until a reply is there; it has no other below the one without an order


class Pace:
    """Replaces the module `time` in Flower's loop. `news`: notified when there is a task for the executor."""

    def __init__(self, news: Signals) -> None:
        self._news, self._replied, self._quick = news, threading.Event(), 0  # quick answers without an order, in a row

    def replied(self, path: str) -> None:
        """Continue Flower's loop, which may wait for what this request of a ClientApp brought."""
        self._replied.set()

    def sleep(self, seconds: float) -> None:
        """Pause at most so long."""
        if seconds <= FOR_REPLY_SECONDS:
            self._replied.wait(seconds)
            self._replied.clear()
        elif self._quick > 1:  # one alone may have been held for news that were gone
            time.sleep(seconds)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def follow(self) -> None:
        """Make Flower's loop in this process keep this pace."""
        module: Any = importlib.import_module("flwr.supernode.start_client_internal")
        module.time, module._pull_and_store_message = self, self._pulled(module._pull_and_store_message)

    def _pulled(self, pull: Callable[..., int | None]) -> Callable[..., int | None]:
        def pulled(**more: Any) -> int | None:
            began = time.monotonic()
            run = pull(**more)
            quick = run is None and time.monotonic() - began < LEAST_HELD_SECONDS
            self._quick = self._quick + 1 if quick else 0
            if run is not None:
                self._news.notify(TASK)
            return run

        return pulled
