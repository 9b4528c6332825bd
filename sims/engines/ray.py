"""The ray engine runs sites in a pool of Ray actors, on this machine or on a cluster."""

import logging
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
import torch
from flwr.app import Message

from fedloom.clients.data.domains import SHIPPED, data_folder, known
from fedloom.clients.data.found import function_of
from fedloom.clients.data.own import lookup
from fedloom.clients.data.partition import find_way
from fedloom.clients.networks import NETWORKS
from fedloom.clients.objectives import OBJECTIVES
from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.clients.training.loss import LOSSES, loss_section
from fedloom.clients.training.optimizers import OPTIMIZERS, optimizer_section
from fedloom.clients.training.schedules import SCHEDULES, schedule_section
from fedloom.conf import machine
from fedloom.conf.errors import UserError
from fedloom.conf.package import NAME, copy_package, present_name
from fedloom.conf.plugins import is_reference
from fedloom.conf.progress import under_way
from fedloom.conf.schema import Config, DataConfig, EngineConfig
from fedloom.sims.engines.adapter import FIRST_NODE, LocalGrid, failure, store_folder
from fedloom.sims.engines.codec import SharedRecords, pack, size, sum_size, unpack, unpack_sum
from fedloom.sims.engines.gpu_room import refuse_full, refuse_gpus
from fedloom.sims.engines.local_ray import apart, begin, own_signals
from fedloom.sims.engines.node_stores import Parts, Stores, alive
from fedloom.sims.engines.pool import Pool
from fedloom.sims.engines.reach import reach
from fedloom.sims.engines.share import WHOLE, Share
from fedloom.sims.engines.worker import WorkerSpec

CLIENT_APP = "fedloom.clients.app:app"
COMBINE = "fedloom.clients.protocol.partial_sums:combine"
WAIT_SECONDS = 0.2
WORKER_BYTES = 2**30  # of a worker with torch that trains a small network
_TURN = threading.RLock()  # held by the thread whose run has started the Ray of this process


class RayGrid(LocalGrid):
    """A Grid that packs messages for the pool of Ray workers, and unpacks their replies."""

    def __init__(
        self, sites: int, store: Path, pool: Pool, description: str, own: bool, adds_up: bool, node_store: str = ""
    ) -> None:
        super().__init__(sites, store)
        self._pool, self._description, self._own = pool, description, own
        self.adds_up = adds_up  # whether all workers are on this machine, and can write to the run's folder
        self._shared = SharedRecords(ray.put)
        self._messages: dict[str, Message] = {}
        self._stores = Stores(node_store) if node_store else None
        self._received = 0
        self._sums: dict[str, PartialSum] = {}  # by message: the sum with its reply's contribution

    def begin(self) -> None:
        with under_way("starting workers"):
            self._pool.begin()

    def submit(self, message: Message) -> None:
        key = message.metadata.message_id
        self._messages[key] = message
        self._pool.add(key, message.metadata.dst_node_id - FIRST_NODE, pack(message, self._shared))

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = super().push_messages(messages)
        self._pool.dispatch()
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies, sums = [], {}
        for key, outcome in self._pool.take(set(message_ids), WAIT_SECONDS):
            message, reply = self._messages.pop(key), outcome.reply
            self._received += 0 if isinstance(reply, str) else size(reply)
            replies.append(failure(message, reply) if isinstance(reply, str) else unpack(reply))
            for packed in outcome.sums:
                if key in packed[0].messages:
                    self._received += 0 if id(packed) in sums else sum_size(packed)
                    sums[id(packed)] = self._sums[key] = sums.get(id(packed)) or unpack_sum(packed)
        return replies

    def partial_sum(self, message_id: str) -> PartialSum | None:
        return self._sums.pop(message_id, None)

    def parts(self, run: str) -> Parts | None:
        return Parts(self._stores, run) if self._stores else None

    @property
    def received(self) -> int:
        """The bytes of arrays that workers and nodes have sent."""
        return self._received + (self._stores.received if self._stores else 0)

    def cancel(self, message_ids: Iterable[str]) -> None:
        cancelled = list(message_ids)
        self._pool.cancel(cancelled)
        for key in cancelled:
            self._messages.pop(key, None)
            self._sums.pop(key, None)

    def close(self) -> None:
        """End the workers, and Ray unless it ran in this process before."""
        try:
            self._pool.close()
        finally:
            if self._own:
                _end()

    def describe(self) -> str:
        return self._description


def start(config: Config, app: str = CLIENT_APP, combine: str = COMBINE, share: Share = WHOLE) -> RayGrid:
    """Start Ray, or join the cluster at engine.address, start the workers, and return their Grid.

    Without an address, a Ray that already runs in this process is used, and not ended. A Ray of another thread's run is
    not used: `start` waits until that run has ended.

    Args:
        app, combine: "module:attribute" of the ClientApp, and of the function that adds up partial sums.
        share: The run's part of the machine or cluster.

    Raises:
        UserError: Ray cannot start, or has no room for a worker.
    """
    engine, sites, store, plugins = config.engine, len(config.roster), store_folder(config), plugins_of(config)
    refuse_gpus(engine)
    own = _begins()
    try:
        workers = _begun(config, sites, share) if own else _kept(engine, sites)
        with under_way("waiting for free CPUs and GPUs"):
            refuse_full(engine)
        options = {"num_cpus": engine.num_cpus, "num_gpus": engine.num_gpus, "scheduling_strategy": "SPREAD"}
        joined, node_store = "" if config.federation.partial_sums is False else combine, config.federation.node_store
        recipe = WorkerSpec(app, joined, engine.vectorise, sites, str(store), plugins, own_paths(), node_store)
        pool = Pool(recipe, workers, options, engine)
    except BaseException:
        if own:
            _end()
        raise
    gpus = f", {engine.num_gpus:g} GPU" if engine.num_gpus else ""
    description = f"ray: {workers} workers, {engine.num_cpus:g} CPU{gpus} each{_where(engine)}"
    return RayGrid(sites, store, pool, description, own, own and not engine.address, node_store)


def _begins() -> bool:
    """Return whether this run starts the Ray of this process; then `_end` ends it. Wait for a run of another thread."""
    if not _TURN.acquire(blocking=False):
        with under_way("waiting for this program's other run on Ray"):
            _TURN.acquire()
    if ray.is_initialized():
        _TURN.release()
        return False
    return True


def _end() -> None:
    try:
        ray.shutdown()
    finally:
        _TURN.release()


def _where(engine: EngineConfig) -> str:
    """The workers' cluster as the end of the description; empty on this machine."""
    nodes = len(alive()) if engine.address else 0
    return f", on a cluster of {nodes} node{'s' * (nodes > 1)}" if nodes else ""


def plugins_of(config: Config) -> tuple[str, ...]:
    """Return the modules outside this project that sites need; workers import them.

    Raises:
        UserError: Something is registered in a script, which workers cannot import.
    """
    foreign = {what: module for what, module in _modules(config) if module.partition(".")[0] != NAME}
    for what, module in foreign.items():
        if module == "__main__":
            raise UserError(f"{what}: is registered in the script itself, which Ray's workers cannot import; "
                            "move it into a module, or use engine.name=inline")  # fmt: skip
    return tuple(sorted(set(foreign.values())))


def _modules(config: Config) -> Iterator[tuple[str, str]]:
    """The parts that the configuration names, each with its module: networks, objective, domains and others."""
    specs = [site.spec for site in config.roster]
    sections = [config.network, *(spec.network for spec in specs)]
    names = {
        ("network", NETWORKS.find): {section.get("name") for section in sections},
        ("objective", OBJECTIVES.find): {config.objective.get("name")},
        ("optimizer", OPTIMIZERS.find): {optimizer_section(config.training)["name"]},
        ("schedule", SCHEDULES.find): {schedule_section(config.training)["name"]},
        ("loss", LOSSES.find): {loss_section(config.training)["name"]},
        ("domain", lookup): {spec.domain for spec in specs if not known(spec.domain)},
        ("partitioner", find_way): {spec.partition.name for spec in specs},
    }
    for (kind, find), used in names.items():
        for name in sorted(name for name in used if name):
            module = (
                present_name(name.partition(":")[0])
                if is_reference(function_of(name))
                else getattr(find(name), "__module__", "")
            )
            yield f"{kind} '{name}'", module or ""


def own_paths() -> tuple[str, ...]:
    """Return the folders from which this process imports, such as the working directory, without Python's own."""
    folders = dict.fromkeys(os.path.abspath(path) for path in sys.path)
    python = tuple({os.path.join(os.path.realpath(base), "") for base in (sys.prefix, sys.base_prefix)})
    return tuple(path for path in folders if os.path.isdir(path) and not os.path.realpath(path).startswith(python))


def _begun(config: Config, sites: int, share: Share) -> int:
    """Start Ray or join a cluster; return the number of workers."""
    engine = config.engine
    address = _reached(engine.address) if engine.address else ""
    workers = min(sites, engine.workers or workers_for(engine, share.of_machine(_this_machine())))
    try:
        with under_way("joining the cluster" if address else "starting Ray"):
            _join(address, config.data if engine.ship_data else None) if address else begin(workers, engine.num_cpus)
        if address:
            workers = min(sites, engine.workers or workers_for(engine, share.of_cluster(ray.cluster_resources())))
    except Exception as error:  # Ray raises a bare Exception on a machine that is too busy
        problem = f"engine.address: the Ray at {address} cannot be joined" if address else "Ray did not start"
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"{problem} ({reason}). engine.name=inline works without Ray") from None
    return workers


def _reached(address: str) -> str:
    with under_way(f"asking the cluster at {address}"):
        return reach(address)


def _kept(engine: EngineConfig, sites: int) -> int:
    """Return the number of workers for the Ray that already runs in this process. Raises UserError if they do not fit."""
    if engine.address:
        raise UserError("engine.address: Ray runs in this process already; leave the address out, or call ray.shutdown()")
    room = workers_for(engine, ray.cluster_resources())
    if engine.workers > room:
        raise UserError(f"engine.workers: got {engine.workers}, the Ray in this process has room for {room}")
    return min(sites, engine.workers or room)


def workers_for(engine: EngineConfig, resources: Mapping[str, float]) -> int:
    """Return how many workers fit into the resources (CPU, GPU: numbers; memory: bytes), at least one."""
    needs = {"CPU": engine.num_cpus, "GPU": engine.num_gpus, "memory": WORKER_BYTES}
    return max(1, min(int(resources.get(name, 0.0) / need) for name, need in needs.items() if need > 0))


def _this_machine() -> dict[str, float]:
    return {"CPU": machine.cores(), "GPU": torch.cuda.device_count(), "memory": machine.free_memory()}


def _join(address: str, ship: DataConfig | None) -> None:
    """Join a cluster. The runtime environment sends its nodes this package, and the data or the data folder's path."""
    data = {"FEDLOOM_DATA": os.environ["FEDLOOM_DATA"]} if "FEDLOOM_DATA" in os.environ else {}
    runtime: dict[str, Any] = {"env_vars": data}
    if ship is not None:  # a worker's working directory is its node's copy of the folder
        runtime = {"env_vars": {SHIPPED: "."}, "working_dir": str(data_folder(ship))}
    with tempfile.TemporaryDirectory() as folder:
        runtime["py_modules"] = [str(copy_package(Path(folder)))]
        with own_signals(), apart():
            ray.init(address=address, runtime_env=runtime, logging_level=logging.ERROR, log_to_driver=False)
