"""The server's access to nodes that store their sites' contributions (federation.node_store).

In a round the server receives one sum from each node. It fetches a contribution only on demand, and all of them at the end
of the run. It asks a node through its keeper, an actor that has only the folder's name: a lost keeper is started again. The
contributions of a lost node are lost, unless another node sees the same folder (a shared disk).
"""

import contextlib
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError

from fedloom.clients.protocol.messages import to_arrays
from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State
from fedloom.server.ledger.blobs import NodeLostError
from fedloom.server.ledger.rows import Contribution
from fedloom.server.ledger.sums import SumRow
from fedloom.sims.engines.node_store import ASK_SECONDS, BETWEEN, checked, keeper, sound

LOOK_SECONDS = 0.5


def alive() -> set[str]:
    """Return the ids of the nodes that Ray reports as alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


class Stores:
    """The server's access to the stores of all nodes. `received`: the bytes of arrays that nodes have sent."""

    def __init__(self, folder: str) -> None:
        self.folder, self.received = folder, 0
        self._keepers: dict[str, Any] = {}

    def begin(self, nodes: Iterable[str]) -> None:
        """Start the keeper actors of these nodes, in parallel. A node whose keeper runs already is skipped."""
        for node in nodes:
            if node not in self._keepers:
                self._keepers[node] = keeper(self.folder, node)

    def ask(self, node: str, method: str, *arguments: Any) -> Any:
        """Return what `method` of a node's keeper returns. Raises NodeLostError if the node is lost or the call fails."""
        until, error = time.monotonic() + ASK_SECONDS, "it does not answer"
        while node in alive() and time.monotonic() < until:
            self.begin([node])
            reference = getattr(self._keepers[node], method).remote(*arguments)
            try:
                while not ray.wait([reference], timeout=LOOK_SECONDS)[0] and node in alive() and time.monotonic() < until:
                    pass
                answer = ray.get(reference, timeout=0)
            except RayError as failed:
                error = str(failed).strip().splitlines()[-1]
                self._keepers.pop(node)
                if getattr(failed, "cause", None) is not None:  # the keeper lives: the call itself failed
                    break
                time.sleep(LOOK_SECONDS)
                continue
            self.received += _bytes(answer)
            return answer
        raise NodeLostError(f"node {node[:8]} cannot send its contributions ({error})")


class Parts:
    """One run's contributions on all nodes (a server.ledger.blobs.RemoteBlobStore). `holders`: node by digest."""

    def __init__(self, stores: Stores, run: str) -> None:
        self.stores, self.run = stores, run
        self.holders: dict[str, str] = {}
        self._odd = True

    def look(self) -> bool:
        """If contributions may be lost, ask all nodes which ones they have. Return whether the nodes were asked."""
        now, lost = alive(), {*self.holders.values()} - alive()
        if not (self._odd or lost):
            return False
        self.holders, self._odd = {}, False
        self.stores.begin(now)
        for node in sorted(now):
            try:
                self.note(node, self.stores.ask(node, "names", self.run))
            except NodeLostError:
                self._odd = True
        return True

    def doubt(self) -> None:
        """Make the next `look` ask all nodes."""
        self._odd = True

    def note(self, node: str, digests: Iterable[str]) -> None:
        """Record that a node has the contributions with these digests."""
        self.holders |= dict.fromkeys(digests, node)

    def names(self) -> set[str]:
        """Return the digests of all contributions on nodes."""
        return set(self.holders)

    def holder(self, digest: str) -> str:
        """Return the node that has the contribution with this digest, or ""."""
        return self.holders.get(digest, "")

    def get(self, digest: str) -> bytes:
        """Return a contribution's bytes. Raises NodeLostError if its node is lost or the bytes are damaged."""
        node = self.holder(digest)
        content = self._asked(node, "read", digest)
        self._odd |= not sound(content, digest)
        return checked(content, digest, node)

    def add_up(self, partials: Sequence[PartialSum]) -> PartialSum:
        """Return the total of partial sums, added up on a node that sees their files. Raises NodeLostError without one."""
        first = partials[0]
        node, arrays = self._anywhere(first.node, "add_up", [partial.ticket for partial in partials])
        states: dict[str, State] = {record: {} for record in first.addends}
        for name, array in arrays.items():
            record, _, tensor = name.partition(BETWEEN)
            states[record][tensor] = torch.from_numpy(array.copy())
        addends = {record: sum(partial.addends[record] for partial in partials) for record in first.addends}
        samples = {site: number for partial in partials for site, number in partial.samples.items()}
        blobs = {site: digest for partial in partials for site, digest in partial.blobs.items()}
        self.note(node, blobs.values())
        messages = frozenset[str]().union(*(partial.messages for partial in partials))
        records = {record: to_arrays(state) for record, state in states.items()}
        return PartialSum(first.run, first.round, messages, samples, addends, records, blobs=blobs)

    def summed(self, row: SumRow, names: Sequence[str], given: Sequence[Contribution], bits: int) -> ExactSum:
        """Sum the tensors `names` over contributions on the nodes that have them. Raises NodeLostError if one is lost."""
        total = ExactSum(bits, modular=True)
        for node in sorted({self.holder(contribution.blob) for contribution in given}):
            mine = [each for each in given if self.holder(each.blob) == node]
            arrays, addends = self._asked(node, "summed", row, names, mine, bits)
            total.merge({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, addends)
        return total

    def remove(self, digests: Collection[str]) -> None:
        """Delete the contributions with these digests on the nodes that have them."""
        for node, mine in self._by_node(digests).items():
            self._try(node, "remove", mine)
            for digest in mine:
                del self.holders[digest]

    def end(self) -> None:
        """Delete the run's files on its nodes, when the server has all contributions."""
        for node in {*self.holders.values()}:
            self._try(node, "end")
        self.holders = {}

    def _by_node(self, digests: Collection[str]) -> Mapping[str, list[str]]:
        nodes: dict[str, list[str]] = {}
        for digest in digests:
            if node := self.holder(digest):
                nodes.setdefault(node, []).append(digest)
        return nodes

    def _anywhere(self, node: str, method: str, *arguments: Any) -> tuple[str, Any]:
        """Call a node, or if that fails the other nodes until one succeeds; return the node and the result."""
        try:
            return node, self._asked(node, method, *arguments)
        except NodeLostError:
            for other in sorted(alive() - {node}):
                with contextlib.suppress(NodeLostError):
                    return other, self._asked(other, method, *arguments)
            raise

    def _asked(self, node: str, method: str, *arguments: Any) -> Any:
        try:
            return self.stores.ask(node, method, self.run, *arguments)
        except NodeLostError:
            self._odd = True
            raise

    def _try(self, node: str, method: str, *arguments: Any) -> None:
        """Call a node, or do nothing if the node is lost."""
        try:
            self._asked(node, method, *arguments)
        except NodeLostError:
            return


def _bytes(answer: Any) -> int:
    """The bytes of the arrays in an answer."""
    if isinstance(answer, bytes):
        return len(answer)
    arrays = answer[0] if isinstance(answer, tuple) else answer if isinstance(answer, dict) else {}
    return sum(array.nbytes for array in arrays.values())
