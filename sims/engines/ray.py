"""The ray engine: sites run in a pool of Ray actors, on this machine or on a cluster."""

import logging
import os
import socket
from pathlib import Path
from typing import Any

import ray
from flwr.app import Message

from conf.errors import UserError
from conf.schema import Config, EngineConfig
from conf.sites import roster
from sims.engines.adapter import FIRST_NODE, LocalGrid, failure, store_folder
from sims.engines.pool import Pool
from sims.engines.wire import SharedRecords, pack, unpack

CLIENT_APP = "clients.app:app"
WAIT_SECONDS = 0.2
CONNECT_SECONDS = 5.0


class RayGrid(LocalGrid):
    """Packs messages for the pool of workers and unpacks their replies."""

    def __init__(self, sites: int, store: Path, pool: Pool) -> None:
        super().__init__(sites, store)
        self._pool = pool
        self._shared = SharedRecords(ray.put)
        self._messages: dict[str, Message] = {}

    def submit(self, message: Message) -> None:
        key = message.metadata.message_id
        self._messages[key] = message
        self._pool.add(key, message.metadata.dst_node_id - FIRST_NODE, pack(message, self._shared))

    def push_messages(self, messages):  # type: ignore[no-untyped-def]  # as in LocalGrid
        ids = super().push_messages(messages)
        self._pool.dispatch()
        return ids

    def collect(self, wanted: set[str]) -> list[Message]:
        replies = []
        for key, outcome in self._pool.take(wanted, WAIT_SECONDS):
            message = self._messages.pop(key)
            replies.append(failure(message, outcome) if isinstance(outcome, str) else unpack(outcome))
        return replies

    def close(self) -> None:
        self._pool.close()
        ray.shutdown()

    def describe(self) -> str:
        return self._pool.describe()


def start(config: Config, app: str = CLIENT_APP) -> RayGrid:
    """Start Ray (or join the cluster at engine.address) and the workers. Raises UserError if Ray cannot start."""
    engine, sites, store = config.engine, len(roster(config)), store_folder(config)
    workers = engine.workers or max(1, min(sites, int(len(os.sched_getaffinity(0)) / max(engine.num_cpus, 1e-9))))
    try:
        _init(engine, workers)
    except (OSError, RuntimeError, ConnectionError, ValueError) as error:
        ray.shutdown()
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"Ray did not start ({reason}); engine.name=inline works without it") from None
    options = {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus}
    return RayGrid(sites, store, Pool(workers, (app, sites, str(store)), options, engine.task_timeout))


def _init(engine: EngineConfig, workers: int) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    if engine.address:
        _reach(engine.address)
        ray.init(address=engine.address, logging_level=logging.ERROR, log_to_driver=False)
        return
    cores = max(len(os.sched_getaffinity(0)), int(workers * engine.num_cpus + 0.999))
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False, "include_dashboard": False}
    ray.init(num_cpus=cores, **quiet)


def _reach(address: str) -> None:
    """Try host:port at once: Ray itself would wait for minutes. Raises OSError or ValueError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address not in ("auto", "local"):
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
