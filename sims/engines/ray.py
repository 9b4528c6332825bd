"""The ray engine: sites run in a pool of Ray actors, on this machine or on a cluster."""

import contextlib
import logging
import math
import os
import signal
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from flwr.app import Message

import clients
import conf
import fusion
import server
import sims
from clients.data.domains import SHIPPED, data_folder
from conf.errors import UserError
from conf.schema import Config, DataConfig, EngineConfig
from conf.sites import roster
from sims.engines.adapter import FIRST_NODE, LocalGrid, failure, store_folder
from sims.engines.pool import Pool
from sims.engines.wire import SharedRecords, pack, unpack

CLIENT_APP = "clients.app:app"
COMBINE = "clients.partial:combine"
WAIT_SECONDS = 0.2
CONNECT_SECONDS = 5.0
WORKER_BYTES = 2**30  # a worker with torch, and a small network's training


class RayGrid(LocalGrid):
    """Packs messages for the pool of workers and unpacks their replies."""

    def __init__(self, sites: int, store: Path, pool: Pool, description: str, own: bool) -> None:
        super().__init__(sites, store)
        self._pool, self._description, self._own = pool, description, own
        self._shared = SharedRecords(ray.put)
        self._messages: dict[str, Message] = {}

    def submit(self, message: Message) -> None:
        key = message.metadata.message_id
        self._messages[key] = message
        self._pool.add(key, message.metadata.dst_node_id - FIRST_NODE, pack(message, self._shared))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
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
        """Let the workers go; and Ray, unless it ran in this process before."""
        try:
            self._pool.close()
        finally:
            ray.shutdown() if self._own else self._pool.kill()

    def describe(self) -> str:
        return self._description


def start(config: Config, app: str = CLIENT_APP) -> RayGrid:
    """Start Ray (or join the cluster at engine.address) and the workers. Raises UserError if Ray cannot start.

    Without an address, a Ray that this process has started before is used, and kept.
    """
    engine, sites, store = config.engine, len(roster(config)), store_folder(config)
    own = not ray.is_initialized()
    workers = _begun(config, sites) if own else _kept(engine, sites)
    options = {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus, "scheduling_strategy": "SPREAD"}
    combine = COMBINE if config.federation.partial_sums else ""
    pool = Pool(workers, (app, combine, engine.vectorise, sites, str(store)), options, engine)
    gpus = f", {engine.num_gpus:g} GPU" if engine.num_gpus else ""
    return RayGrid(sites, store, pool, f"ray: {workers} workers, {engine.num_cpus:g} CPU{gpus} each", own)


def _begun(config: Config, sites: int) -> int:
    """Start Ray or join a cluster; the number of workers."""
    engine = config.engine
    workers = engine.workers or min(sites, workers_for(engine, _this_machine()))
    try:
        with own_signals(), apart():
            _join(engine.address, config.data if engine.ship_data else None) if engine.address else _start(engine, workers)
        if engine.address:
            workers = engine.workers or min(sites, workers_for(engine, ray.cluster_resources()))
    except (OSError, RuntimeError, ConnectionError, ValueError) as error:
        ray.shutdown()
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"Ray did not start ({reason}); engine.name=inline works without it") from None
    return workers


def _kept(engine: EngineConfig, sites: int) -> int:
    """The number of workers in the Ray that runs in this process. Raises UserError if they do not fit."""
    if engine.address:
        raise UserError("engine.address: Ray runs in this process already; leave the address out, or call ray.shutdown()")
    room = workers_for(engine, ray.cluster_resources())
    if engine.workers > room:
        raise UserError(f"engine.workers: got {engine.workers}, the Ray in this process has room for {room}")
    return engine.workers or min(sites, room)


_starting = threading.Event()
os.register_at_fork(after_in_child=lambda: os.setpgrp() if _starting.is_set() else None)


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Give the processes that Ray starts groups of their own: who signals ours (timeout, a shell) means this one alone.

    If Ray's died first, it would take this process with it before anything is put in order.
    """
    _starting.set()
    try:
        yield
    finally:
        _starting.clear()


@contextlib.contextmanager
def own_signals() -> Iterator[None]:
    """Keep this process's handlers of SIGINT and SIGTERM: Ray sets its own, which aborts without cleaning up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


def workers_for(engine: EngineConfig, resources: Mapping[str, float]) -> int:
    """How many workers fit into what there is (CPU, GPU: numbers; memory: bytes), at least one."""
    needs = {"CPU": engine.num_cpus, "GPU": engine.num_gpus, "memory": WORKER_BYTES}
    return max(1, min(int(resources.get(what, 0.0) / need) for what, need in needs.items() if need > 0))


def _this_machine() -> dict[str, float]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return {"CPU": len(os.sched_getaffinity(0)), "GPU": torch.cuda.device_count(), "memory": memory}


def _start(engine: EngineConfig, workers: int) -> None:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    cores = max(len(os.sched_getaffinity(0)), math.ceil(workers * engine.num_cpus))
    ray.init(num_cpus=cores, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)


def _join(address: str, ship: DataConfig | None) -> None:
    """Join a cluster; our code, and the data or where it is, reach its nodes through the runtime environment."""
    _reach(address)
    modules = [str(Path(package.__file__ or "").parent) for package in (conf, fusion, clients, server, sims)]
    data = {"FEDLOOM_DATA": os.environ["FEDLOOM_DATA"]} if "FEDLOOM_DATA" in os.environ else {}
    runtime: dict[str, Any] = {"py_modules": modules, "env_vars": data}
    if ship is not None:  # a worker's working directory is then its node's copy of the folder
        runtime = {"py_modules": modules, "env_vars": {SHIPPED: "."}, "working_dir": str(data_folder(ship))}
    ray.init(address=address, runtime_env=runtime, logging_level=logging.ERROR, log_to_driver=False)


def _reach(address: str) -> None:
    """Try host:port at once: Ray itself would wait for minutes. Raises OSError or ValueError."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address not in ("auto", "local"):
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
