"""The nodes that keep their sites' contributions (federation.node_store; each its part), as the server reaches them.

What arrives at the server in a round is one sum from each node. It fetches a contribution only when it needs that one, and
all of them when the run ends. A node is asked through its keeper, an actor that holds nothing but the folder's name: who
loses it starts another one. What a lost node kept is gone, unless another node sees the same folder (a shared disk).
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
    """The nodes that Ray takes to be alive."""
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


class Stores:
    """All nodes' parts, as the server reaches them. `received`: bytes of arrays that came from them."""

    def __init__(self, folder: str) -> None:
        self.folder, self.received = folder, 0
        self._keepers: dict[str, Any] = {}

    def begin(self, nodes: Iterable[str]) -> None:
        """Start the keepers of these nodes, all at the same time."""
        for node in nodes:
            if node not in self._keepers:
                self._keepers[node] = keeper(self.folder, node)

    def ask(self, node: str, what: str, *words: Any) -> Any:
        """What a node's keeper says. Raises NodeLostError where there is none any more, or it cannot do it."""
        until, error = time.monotonic() + ASK_SECONDS, "it does not answer"
        while node in alive() and time.monotonic() < until:
            self.begin([node])
            reference = getattr(self._keepers[node], what).remote(*words)
            try:
                while not ray.wait([reference], timeout=LOOK_SECONDS)[0] and node in alive() and time.monotonic() < until:
                    pass
                answer = ray.get(reference, timeout=0)
            except RayError as failed:
                error = str(failed).strip().splitlines()[-1]
                self._keepers.pop(node)
                if getattr(failed, "cause", None) is not None:  # the keeper lives, and what it has is not there
                    break
                time.sleep(LOOK_SECONDS)
                continue
            self.received += _bytes(answer)
            return answer
        raise NodeLostError(f"node {node[:8]} cannot give what it kept ({error})")


class Parts:
    """What nodes keep of one run; the server's side, for its ledger (server.ledger.blobs.RemoteBlobStore)."""

    def __init__(self, stores: Stores, run: str) -> None:
        self.stores, self.run = stores, run
        self.holders: dict[str, str] = {}
        self._nodes: set[str] = set()  # that were looked at
        self._odd = True

    def look(self) -> bool:
        """Whether anything may be gone since the last look; then, and at first, all nodes are asked what they have."""
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
        """Ask all nodes what they have at the next look."""
        self._odd = True

    def note(self, node: str, digests: Iterable[str]) -> None:
        """A node keeps these now."""
        self.holders |= dict.fromkeys(digests, node)

    def names(self) -> set[str]:
        """The digests of all that nodes keep."""
        return set(self.holders)

    def holder(self, digest: str) -> str:
        """The node that has it; empty if none has."""
        return self.holders.get(digest, "")

    def get(self, digest: str) -> bytes:
        """A contribution's bytes. Raises NodeLostError."""
        node = self.holder(digest)
        content = self._asked(node, "read", digest)
        self._odd |= not sound(content, digest)
        return checked(content, digest, node)

    def add_up(self, partials: Sequence[PartialSum]) -> PartialSum:
        """One sum for several that a node keeps, from it or from another one that sees its folder. Raises NodeLostError."""
        first = partials[0]
        node, found = self._anywhere(first.node, "add_up", [one.ticket for one in partials])
        states: dict[str, State] = {record: {} for record in first.addends}
        for name, array in found.items():
            record, _, tensor = name.partition(BETWEEN)
            states[record][tensor] = torch.from_numpy(array.copy())
        addends = {record: sum(one.addends[record] for one in partials) for record in first.addends}
        samples = {site: number for one in partials for site, number in one.samples.items()}
        blobs = {site: digest for one in partials for site, digest in one.blobs.items()}
        self.note(node, blobs.values())
        messages = frozenset[str]().union(*(one.messages for one in partials))
        records = {record: to_arrays(state) for record, state in states.items()}
        return PartialSum(first.run, first.round, messages, samples, addends, records, blobs=blobs)

    def summed(self, row: SumRow, names: Sequence[str], given: Sequence[Contribution], bits: int) -> ExactSum:
        """These tensors added up over contributions, each at the node that has it. Raises NodeLostError."""
        total = ExactSum(bits, modular=True)
        for node in sorted({self.holder(one.blob) for one in given}):
            mine = [one for one in given if self.holder(one.blob) == node]
            arrays, addends = self._asked(node, "summed", row, names, mine, bits)
            total.merge({name: torch.from_numpy(array.copy()) for name, array in arrays.items()}, addends)
        return total

    def remove(self, digests: Collection[str]) -> None:
        """Let go of contributions, where they are."""
        for node, mine in self._by_node(digests).items():
            self._tell(node, "remove", mine)
            for digest in mine:
                del self.holders[digest]

    def end(self) -> None:
        """Let go of all: the server has it now."""
        for node in {*self.holders.values()}:
            self._tell(node, "end")
        self.holders = {}

    def _by_node(self, digests: Collection[str]) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = {}
        for digest in digests:
            if node := self.holder(digest):
                found.setdefault(node, []).append(digest)
        return found

    def _anywhere(self, node: str, what: str, *words: Any) -> tuple[str, Any]:
        """What a node says, or if it is lost the first of the others that knows; with the node's name."""
        try:
            return node, self._asked(node, what, *words)
        except NodeLostError:
            for other in sorted(alive() - {node}):
                with contextlib.suppress(NodeLostError):
                    return other, self._asked(other, what, *words)
            raise

    def _asked(self, node: str, what: str, *words: Any) -> Any:
        try:
            return self.stores.ask(node, what, self.run, *words)
        except NodeLostError:
            self._odd = True
            raise

    def _tell(self, node: str, what: str, *words: Any) -> None:
        """Ask for what need not be done any more where the node is lost."""
        try:
            self._asked(node, what, *words)
        except NodeLostError:
            return


def _bytes(answer: Any) -> int:
    """Of arrays in an answer."""
    if isinstance(answer, bytes):
        return len(answer)
    arrays = answer[0] if isinstance(answer, tuple) else answer if isinstance(answer, dict) else {}
    return sum(array.nbytes for array in arrays.values())
