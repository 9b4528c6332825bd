"""The ray engine: sites run in a pool of Ray actors, on this machine or on a cluster."""

import logging
import os
import socket
from collections import deque
from pathlib import Path
from typing import Any

import ray
from flwr.app import Message
from ray.exceptions import RayError

from conf.errors import UserError
from conf.schema import Config, EngineConfig
from conf.sites import roster
from sims.engines.adapter import LocalGrid, answer, failure, store_folder, take_identity

WAIT_SECONDS = 0.2
CONNECT_SECONDS = 5.0


class Worker:
    """One actor: imports the ClientApp once, then answers messages."""

    def __init__(self) -> None:
        take_identity()
        from clients.app import app

        self.app = app

    def answer(self, message: Message, context: Any) -> Message:
        return answer(self.app, message, context)


class RayGrid(LocalGrid):
    """Messages wait in a queue until a worker is free; each worker has one message at a time."""

    def __init__(self, sites: int, store: Path, workers: int, options: dict[str, Any]) -> None:
        super().__init__(sites, store)
        actor: Any = ray.remote(Worker)
        actor = actor.options(max_restarts=-1, **options)
        self._idle = [actor.remote() for _ in range(workers)]
        self._workers = workers
        self._queue: deque[Message] = deque()
        self._running: dict[Any, tuple[Any, Message]] = {}
        self._done: dict[str, Message] = {}

    def submit(self, message: Message) -> None:
        self._queue.append(message)
        self._dispatch()

    def collect(self, wanted: set[str]) -> list[Message]:
        self._dispatch()
        if self._running:
            ready, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
            ready = ready or ray.wait(list(self._running), timeout=WAIT_SECONDS)[0]
            for reference in ready:
                self._receive(reference)
            self._dispatch()
        return [self._done.pop(key) for key in list(self._done) if key in wanted]

    def close(self) -> None:
        ray.shutdown()

    def describe(self) -> str:
        return f"ray: {self._workers} workers"

    def _dispatch(self) -> None:
        while self._idle and self._queue:
            worker, message = self._idle.pop(), self._queue.popleft()
            self._running[worker.answer.remote(message, self.context(message))] = (worker, message)

    def _receive(self, reference: Any) -> None:
        worker, message = self._running.pop(reference)
        try:
            reply: Any = ray.get(reference)
        except RayError as error:
            reply = failure(message, f"its worker died ({type(error).__name__})")
        self._idle.append(worker)
        self._done[message.metadata.message_id] = reply


def start(config: Config) -> RayGrid:
    """Start Ray (or join the cluster at engine.address) and the workers. Raises UserError if Ray cannot start."""
    engine, sites = config.engine, len(roster(config))
    workers = engine.workers or max(1, min(sites, int(len(os.sched_getaffinity(0)) / max(engine.num_cpus, 1e-9))))
    try:
        _init(engine, workers)
    except (OSError, RuntimeError, ConnectionError, ValueError) as error:
        ray.shutdown()
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"Ray did not start ({reason}); engine.name=inline works without it") from None
    options = {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus}
    return RayGrid(sites, store_folder(config), workers, options)


def _init(engine: EngineConfig, workers: int) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
    if engine.address:
        _reach(engine.address)
        ray.init(address=engine.address, logging_level=logging.ERROR, log_to_driver=False)
        return
    cores = max(len(os.sched_getaffinity(0)), int(workers * engine.num_cpus + 0.999))
    ray.init(num_cpus=cores, **quiet)


def _reach(address: str) -> None:
    """Try host:port at once: Ray itself would wait for minutes. Raises OSError or ValueError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address not in ("auto", "local"):
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
