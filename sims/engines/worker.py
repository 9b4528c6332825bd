"""The Ray actor: it imports the ClientApp once, then answers chunks of messages."""

import functools
import importlib
import os
import sys
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from flwr.app import Context, Error, Message
from ray.exceptions import LocalRayletDiedError, RaySystemError

from fedloom.clients.privacy.guard import STORAGE, failed
from fedloom.clients.protocol.messages import TRAIN
from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.conf import machine
from fedloom.conf.errors import UserError, of_storage
from fedloom.sims.engines.adapter import answer, site_context, take_identity
from fedloom.sims.engines.codec import PackedArrays, PackedSum, Shared, pack, pack_sum, unpack
from fedloom.sims.engines.heartbeat import NOTHING, SEVERAL, Marker, MarkFile, Progress
from fedloom.sims.engines.node_store import NodeStore

CACHED_RECORDS = 16  # shared records of this round and some of the previous one

Packed = tuple[Any, ...]
Replied = Packed | str  # a packed reply, or the reason why it is missing


@dataclass(frozen=True)
class WorkerSpec:
    """The settings of a worker process.

    Attributes:
        app: The ClientApp, as "module:attribute".
        combine: The function that adds up replies, as "module:attribute"; "": replies are returned one by one.
        cohort: The most sites of one shape that are trained together, in one vectorised step.
        sites: The number of sites.
        store: The folder of the sites' states.
        plugins: Modules with the user's own code.
        paths: The folders of these modules.
        node_store: The node's folder for contributions and sums; "": the server stores them.
    """

    app: str
    combine: str
    cohort: int
    sites: int
    store: str
    plugins: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    node_store: str = ""


@dataclass(frozen=True)
class Answers:
    """The result of `Worker.run`: a packed reply for each message, in order, and packed partial sums over some replies.

    `seconds`: the duration of each message, with an equal part of what the call itself took.
    """

    seconds: list[float]
    replies: list[Replied]
    sums: list[PackedSum]


class Worker:
    """The Ray actor that answers messages for any site. `fault`: why it cannot work, or ""."""

    def __init__(self, recipe: WorkerSpec, mark: MarkFile) -> None:
        take_identity()
        machine.reuse_freed_memory()
        self.recipe, self.fault = recipe, ""
        self.node = ray.get_runtime_context().get_node_id()
        self._marker = Marker(mark)
        self._records: OrderedDict[str, PackedArrays] = OrderedDict()
        self._seconds: dict[int, float] = {}  # by place, of the messages of this call that were answered in turn
        sys.path += [path for path in recipe.paths if path not in sys.path]
        try:
            for module in recipe.plugins:
                importlib.import_module(module)
            self.app = _imported(recipe.app)
            self.combine = _imported(recipe.combine) if recipe.combine else None
            if recipe.node_store and self.combine is not None:
                self.combine = functools.partial(self.combine, part=NodeStore(recipe.node_store, self.node))
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"

    @ray.method(concurrency_group="control")
    def status(self) -> tuple[str, str, bool, Progress | None]:
        """Return why this worker cannot work (or ""), its node, whether the pool can read its mark, and the mark."""
        return self.fault, self.node, self._marker.near, self._marker.read()

    def run(self, call: int, chunk: list[tuple[int, Packed]]) -> Answers:
        """Answer (site index, packed message) pairs in order, as call number `call`. If cancelled, return no replies."""
        try:
            return self._run(call, chunk)
        finally:
            self._marker.write(NOTHING, NOTHING)

    def _run(self, call: int, chunk: list[tuple[int, Packed]]) -> Answers:
        begin, self._seconds = time.perf_counter(), {}
        asked: dict[int, tuple[Message, Context]] = {}
        replied: dict[int, Replied] = {}
        for place, (site, parts) in enumerate(chunk):
            self._marker.write(call, place)
            try:
                asked[place] = unpack(parts, self._fetch), site_context(site, self.recipe.sites, self.recipe.store)
            except Exception as error:
                replied[place] = f"its message cannot be read ({type(error).__name__}: {error})"
        replies = self._as_one(call, asked) if self.recipe.cohort > 1 else self._in_turn(call, asked)
        if len(replies) < len(asked):  # cancelled
            return Answers([], [], [])
        sums: Sequence[PartialSum] = ()
        if self.combine is not None:
            self._marker.write(call, SEVERAL)
            replies, sums = self._combined(list(asked.values()), replies)
        replied |= {place: pack(reply) for place, reply in zip(asked, replies, strict=True)}
        packed, places = [pack_sum(sum) for sum in sums], range(len(chunk))
        rest = (time.perf_counter() - begin - sum(self._seconds.values())) / len(chunk)
        seconds = [rest + self._seconds.get(place, 0.0) for place in places]
        return Answers(seconds, [replied[place] for place in places], packed)

    def _combined(
        self, asked: Sequence[tuple[Message, Context]], replies: list[Message]
    ) -> tuple[list[Message], Sequence[PartialSum]]:
        """Add up the replies. If their contributions cannot be stored or read, all become errors of this machine."""
        assert self.combine is not None
        try:
            return self.combine([message for message, _ in asked], replies)
        except (OSError, UserError) as error:
            line = of_storage(error, Path(self.recipe.store).parent) or str(error)
            return [Message(Error(STORAGE, line), reply_to=message) for message, _ in asked], ()

    def _in_turn(self, call: int, asked: Mapping[int, tuple[Message, Context]]) -> list[Message]:
        """The replies, in order; fewer than messages if the call is cancelled."""
        replies: list[Message] = []
        cancelled = ray.get_runtime_context().is_canceled
        for place, (message, context) in asked.items():
            if cancelled():
                break
            self._marker.write(call, place)
            begin = time.perf_counter()
            replies.append(answer(self.app, message, context))
            self._seconds[place] = time.perf_counter() - begin
        return replies

    def _as_one(self, call: int, asked: Mapping[int, tuple[Message, Context]]) -> list[Message]:
        """Train sites of one shape together; answer other messages in turn."""
        from fedloom.clients.job import moment, read_job
        from fedloom.clients.training.vectorised import same_shape, train_cohort

        messages, configs = ([each for each, _ in asked.values()], [context.node_config for _, context in asked.values()])
        if len(messages) == 1 or any(message.metadata.message_type != TRAIN for message in messages):
            return self._in_turn(call, asked)
        self._marker.write(call, SEVERAL)
        replies: dict[int, Message] = {}
        try:
            with moment(*next(iter(asked.values()))):
                jobs = [read_job(message, context) for message, context in asked.values()]
                groups = same_shape(jobs, self.recipe.cohort)
                trained = [(group, train_cohort([jobs[place] for place in group])) for group in groups]
        except Exception:  # the joint step failed, for example for lack of memory: train each site alone
            return self._in_turn(call, asked)
        for group, outcomes in trained:
            for place, done in zip(group, outcomes, strict=True):
                message, config = messages[place], configs[place]
                failure = isinstance(done, Exception)
                replies[place] = failed(done, message, config) if failure else Message(done, reply_to=message)
        return [replies[place] for place in range(len(messages))]

    def _fetch(self, shared: Shared) -> PackedArrays:
        key = shared.reference.hex()
        if key not in self._records:
            try:
                self._records[key] = ray.get(shared.reference)
            except (OSError, RaySystemError, LocalRayletDiedError):  # the node is ending: others take its sites
                os._exit(1)
            while len(self._records) > CACHED_RECORDS:
                self._records.popitem(last=False)
        self._records.move_to_end(key)
        return self._records[key]


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
