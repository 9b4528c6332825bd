"""What a node of a cluster keeps of its sites' contributions (federation.node_store): in a folder, under the run's id.

Its workers write and read there themselves; others ask the node's keeper, an actor that holds nothing but the folder's name.
"""

import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
from flwr.app import RecordDict
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from safetensors.torch import load, save

from fedloom.clients.protocol.messages import to_states
from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.clients.storage.states import write_bytes
from fedloom.conf.errors import UserError
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State
from fedloom.server.ledger.blobs import UNREADABLE, Blobs, LedgerError, NodeLostError
from fedloom.server.ledger.rows import Contribution
from fedloom.server.ledger.sums import SumRow, added_up

ASK_SECONDS = 60.0  # for which a node that Ray takes to be alive may say nothing
BETWEEN = "\0"  # a record's name and a tensor's, in the file of a sum
KEY = "federation.node_store"

Summed = tuple[dict[str, np.ndarray], int]


def folder_of(given: str) -> Path:
    """The folder on this node that federation.node_store names: made, and fit to be written. UserError if it cannot be."""
    path = Path(os.path.expanduser(os.path.expandvars(given)))
    if "$" in str(path):
        raise UserError(f"{KEY}: {given}: its variable is not set on this node; set it before Ray starts, or name a folder")
    if not path.is_absolute():
        raise UserError(f"{KEY}: got {given}, takes a whole path (from /), which each node reads by itself")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise UserError(f"{KEY}: {path} cannot be written on this node ({error.strerror}); name another folder") from None


class NodeStore:
    """The part of the node that this process runs on. UserError for a folder that cannot be had."""

    def __init__(self, folder: str, node: str) -> None:
        self.given, self.folder, self.node = folder, folder_of(folder), node
        self._others: dict[str, Any] = {}

    def blobs(self, run: str) -> Blobs:
        """The contributions that are kept here."""
        return Blobs(self.folder / run / "blobs")

    def put(self, run: str, state: State) -> str:
        """Keep a contribution; its digest."""
        return self.blobs(run).put(state)

    def get(self, run: str, digest: str, holder: str) -> State:
        """A contribution that is kept here, or at the node `holder`. ReplyError if that is not there."""
        try:
            if self.blobs(run).path(digest).is_file() or holder in ("", self.node):
                return self.blobs(run).get(digest)
            if holder not in self._others:
                self._others[holder] = keeper(self.given, holder)
            content: Any = ray.get(self._others[holder].read.remote(run, digest), timeout=ASK_SECONDS)
            return _loaded(content, digest, holder)
        except (LedgerError, RayError) as error:
            self._others.pop(holder, None)
            last = str(error).strip().splitlines()[-1]
            raise ReplyError(f"{UNREADABLE} from node {holder[:8] or self.node[:8]} ({last})") from None

    def leave(self, sum: PartialSum) -> PartialSum:
        """Keep the records of a sum; the sum without them, and with where they are."""
        states, ticket = to_states(RecordDict({**sum.records})), uuid.uuid4().hex
        whole = {record + BETWEEN + name: tensor for record, state in states.items() for name, tensor in state.items()}
        write_bytes(self._sum(sum.run, ticket), save(whole), durable=False, private=True)
        return replace(sum, records={}, node=self.node, ticket=ticket)

    def add_up(self, run: str, tickets: Sequence[str]) -> dict[str, np.ndarray]:
        """The sum of sums that were left here, which then go."""
        total = ExactSum(bits=0)
        for ticket in tickets:
            total.merge(load(self._sum(run, ticket).read_bytes()), addends=1)
        for ticket in tickets:
            self._sum(run, ticket).unlink()
        return {name: tensor.numpy() for name, tensor in total.totals.items()}

    def _sum(self, run: str, ticket: str) -> Path:
        return self.folder / run / "sums" / f"{ticket}.safetensors"


class Keeper(NodeStore):
    """The actor through which others reach a node's part."""

    def names(self, run: str) -> set[str]:
        """The digests of what is kept here, whole; sums of rounds that came to nothing go."""
        shutil.rmtree(self.folder / run / "sums", ignore_errors=True)
        return self.blobs(run).sound()

    def read(self, run: str, digest: str) -> bytes:
        """The bytes of a contribution."""
        return self.blobs(run).path(digest).read_bytes()

    def summed(self, run: str, row: SumRow, names: Sequence[str], given: Sequence[Contribution], bits: int) -> Summed:
        """These tensors added up over contributions that are kept here, and how many those are."""
        total = added_up(row, names, given, self.blobs(run).get, bits)
        return {name: tensor.numpy() for name, tensor in total.totals.items()}, total.addends

    def remove(self, run: str, digests: Collection[str]) -> None:
        """Let go of contributions."""
        self.blobs(run).remove_all(digests)

    def end(self, run: str) -> None:
        """Let go of all that is kept of a run."""
        shutil.rmtree(self.folder / run, ignore_errors=True)


def keeper(folder: str, node: str) -> Any:
    """A keeper of that node, which runs until nobody knows it any more."""
    actor: Any = ray.remote(Keeper)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=there).remote(folder, node)


def _loaded(content: bytes, digest: str, node: str) -> State:
    return dict(sorted(load(checked(content, digest, node)).items()))


def sound(content: bytes, digest: str) -> bool:
    return hashlib.sha256(content).hexdigest() == digest


def checked(content: bytes, digest: str, node: str) -> bytes:
    if not sound(content, digest):
        raise NodeLostError(f"node {node[:8]} has damaged what it kept")
    return content
