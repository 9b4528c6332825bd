"""A cluster node's store of its sites' contributions (federation.node_store): a folder, in it one for each run's id.

The node's workers read and write it directly. Others ask the node's keeper, an actor that has only the folder's name.
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

ASK_SECONDS = 60.0  # to wait for a node that is alive for Ray
BETWEEN = "\0"  # separates a record's and a tensor's name in the file of a sum
KEY = "federation.node_store"

Summed = tuple[dict[str, np.ndarray], int]


def folder_of(name: str) -> Path:
    """Create and return this node's folder from federation.node_store. Raises UserError if it is not valid or writable."""
    path = Path(os.path.expanduser(os.path.expandvars(name)))
    if "$" in str(path):
        raise UserError(f"{KEY}: {name}: its variable is not set on this node; set it before Ray starts, or name a folder")
    if not path.is_absolute():
        raise UserError(f"{KEY}: got {name}, takes a whole path (from /), as each node opens it")
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise UserError(f"{KEY}: {path} cannot be written on this node ({error.strerror}); name another folder") from None


class NodeStore:
    """This node's folder of contributions and partial sums. Raises UserError if the folder cannot be written."""

    def __init__(self, folder: str, node: str) -> None:
        self.name, self.folder, self.node = folder, folder_of(folder), node
        self._others: dict[str, Any] = {}

    def blobs(self, run: str) -> Blobs:
        """Return the store of a run's contributions on this node."""
        return Blobs(self.folder / run / "blobs")

    def put(self, run: str, state: State) -> str:
        """Store a contribution to a run and return its digest."""
        return self.blobs(run).put(state)

    def get(self, run: str, digest: str, holder: str) -> State:
        """Return a contribution from this node or the node `holder`. Raises ReplyError if it cannot be read."""
        try:
            if self.blobs(run).path(digest).is_file() or holder in ("", self.node):
                return self.blobs(run).get(digest)
            if holder not in self._others:
                self._others[holder] = keeper(self.name, holder)
            content: Any = ray.get(self._others[holder].read.remote(run, digest), timeout=ASK_SECONDS)
            return _loaded(content, digest, holder)
        except (LedgerError, RayError) as error:
            self._others.pop(holder, None)
            last = str(error).strip().splitlines()[-1]
            raise ReplyError(f"{UNREADABLE} from node {holder[:8] or self.node[:8]} ({last})") from None

    def leave(self, sum: PartialSum) -> PartialSum:
        """Store a partial sum's records here; return the sum with a ticket (their file's name) in place of the records."""
        states, ticket = to_states(RecordDict({**sum.records})), uuid.uuid4().hex
        tensors = {record + BETWEEN + name: tensor for record, state in states.items() for name, tensor in state.items()}
        write_bytes(self._sum(sum.run, ticket), save(tensors), durable=False, private=True)
        return replace(sum, records={}, node=self.node, ticket=ticket)

    def add_up(self, run: str, tickets: Sequence[str]) -> dict[str, np.ndarray]:
        """Add up the stored sums with these tickets, delete their files, and return the total by tensor name."""
        total = ExactSum(bits=0)
        for ticket in tickets:
            total.merge(load(self._sum(run, ticket).read_bytes()), addends=1)
        for ticket in tickets:
            self._sum(run, ticket).unlink()
        return {name: tensor.numpy() for name, tensor in total.totals.items()}

    def _sum(self, run: str, ticket: str) -> Path:
        return self.folder / run / "sums" / f"{ticket}.safetensors"


class Keeper(NodeStore):
    """The Ray actor through which the server and other nodes use a node's store."""

    def names(self, run: str) -> set[str]:
        """Return the digests of a run's intact contributions. Delete its sums of unfinished rounds."""
        shutil.rmtree(self.folder / run / "sums", ignore_errors=True)
        return self.blobs(run).sound()

    def read(self, run: str, digest: str) -> bytes:
        """Return the bytes of the contribution with this digest."""
        return self.blobs(run).path(digest).read_bytes()

    def summed(self, run: str, row: SumRow, names: Sequence[str], rows: Sequence[Contribution], bits: int) -> Summed:
        """Sum the tensors `names` over this node's contributions `rows`. Return integer totals and the number of addends."""
        total = added_up(row, names, rows, self.blobs(run).get, bits)
        return {name: tensor.numpy() for name, tensor in total.totals.items()}, total.addends

    def remove(self, run: str, digests: Collection[str]) -> None:
        """Delete a run's contributions with these digests."""
        self.blobs(run).remove_all(digests)

    def end(self, run: str) -> None:
        """Delete all files of a run on this node."""
        shutil.rmtree(self.folder / run, ignore_errors=True)


def keeper(folder: str, node: str) -> Any:
    """Start a `Keeper` on a node and return its handle. It ends when its last reference is deleted."""
    actor: Any = ray.remote(Keeper)
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=strategy).remote(folder, node)


def _loaded(content: bytes, digest: str, node: str) -> State:
    return dict(sorted(load(checked(content, digest, node)).items()))


def sound(content: bytes, digest: str) -> bool:
    """Return whether `digest` is the sha256 of the content."""
    return hashlib.sha256(content).hexdigest() == digest


def checked(content: bytes, digest: str, node: str) -> bytes:
    """Return the content unchanged. Raises NodeLostError, with the sender `node`, if its sha256 is not `digest`."""
    if not sound(content, digest):
        raise NodeLostError(f"node {node[:8]} sent a damaged contribution")
    return content
