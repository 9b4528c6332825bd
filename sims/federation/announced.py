"""What nodes have announced to a SuperLink and may send it: parts of their replies, so many and of so many bytes.

Kept in memory: with the SuperLink's process its runs end, too.
"""

import threading
from collections import deque
from dataclasses import dataclass

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import is_valid_sha256_hash, iterate_object_tree

from fedloom.server.flower.limits import LEAST_LIMIT, TIMES_SENT

LEAST_PARTS = 2000  # of a reply, that are taken in any case: each takes the database half a millisecond
TIMES_PARTS = 4  # and so many times those of the run's largest order
MOST_DEPTH = 8  # of parts in parts: Flower's messages have five
MOST_ALIVE = 8  # replies of one node that are held; it works on one order of a run at a time
MOST_AGAIN = 3  # times that one reply is announced: the answer may have been lost


class RefusedReplyError(ValueError):
    """A reply that the server does not take; the message says why."""


@dataclass
class Announced:
    """A reply whose parts may come. `root`: the id of its message; `session`: under which they are sent."""

    node: int
    run: int
    root: str
    session: str
    times: int = 1
    taken: int = 0  # bytes that came


@dataclass
class _Orders:
    """What a run has sent: its largest order's parts, and the most bytes that went under one session."""

    parts: int = 0
    largest: int = 0
    session: str = ""
    bytes: int = 0


class Book:
    """All that is announced at one SuperLink."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: dict[int, _Orders] = {}
        self._held: dict[int, deque[Announced]] = {}  # by node, the oldest first
        self._of_session: dict[str, Announced] = {}

    def order(self, run: int, tree: ObjectTree) -> set[str]:
        """Take note of an order of a run; the ids of its parts."""
        ids = [part.object_id for part in iterate_object_tree(tree)]
        with self._lock:
            orders = self._orders.setdefault(run, _Orders())
            orders.parts = max(orders.parts, len(ids))
        return set(ids)

    def sized(self, run: int) -> bool:
        """Whether it is known how large a run's orders are."""
        return self._orders.get(run, _Orders()).largest > 0

    def sent(self, run: int, session: str, size: int) -> None:
        """Take note of bytes of a run's orders."""
        with self._lock:
            orders = self._orders.setdefault(run, _Orders())
            orders.bytes = size + (orders.bytes if session == orders.session else 0)
            orders.session, orders.largest = session, max(orders.largest, orders.bytes)

    def most_parts(self, run: int) -> int:
        """Of a reply in a run."""
        return max(LEAST_PARTS, TIMES_PARTS * self._orders.get(run, _Orders()).parts)

    def most_bytes(self, run: int) -> int:
        """Of a reply in a run."""
        return max(LEAST_LIMIT, TIMES_SENT * self._orders.get(run, _Orders()).largest)

    def announce(self, node: int, run: int, root: str, session: str) -> list[Announced]:
        """Hold a reply; those of the node that have to go for it. RefusedReplyError: it is announced again and again."""
        with self._lock:
            held = self._held.setdefault(node, deque())
            if found := next((one for one in held if one.root == root), None):
                if found.times >= MOST_AGAIN:
                    raise RefusedReplyError("it is announced again and again")
                found.times += 1
                self._of_session.pop(found.session, None)
                found.session = session
                self._of_session[session] = found
                return []
            new = self._of_session[session] = Announced(node, run, root, session)
            held.append(new)
            return [self._let_go(held.popleft()) for _ in range(len(held) - MOST_ALIVE)]

    def _let_go(self, one: Announced) -> Announced:
        self._of_session.pop(one.session, None)
        return one

    def forget(self, one: Announced) -> None:
        """Hold a reply no longer."""
        with self._lock:
            self._let_go(one)
            if one in (held := self._held.get(one.node, deque())):
                held.remove(one)

    def take(self, node: int, session: str, size: int) -> Announced | None:
        """Count bytes of a reply that come; None: this node has announced nothing under this session."""
        with self._lock:
            found = self._of_session.get(session)
            if found is None or found.node != node:
                return None
            found.taken += size
            return found


def check_tree(tree: ObjectTree, most: int) -> None:
    """RefusedReplyError for more than `most` parts, parts too deep in each other, or parts that cannot be."""
    left, children, number = [(tree, 1)], dict[str, frozenset[str]](), 0
    while left:
        part, depth = left.pop()
        number += 1
        if number > most:
            raise RefusedReplyError(f"it has more than {most} parts")
        if depth > MOST_DEPTH:
            raise RefusedReplyError(f"its parts are more than {MOST_DEPTH} deep in each other")
        if not is_valid_sha256_hash(part.object_id):
            raise RefusedReplyError("a part's id is not a hash")
        within = frozenset(child.object_id for child in part.children)
        if len(within) < len(part.children) or children.setdefault(part.object_id, within) != within:
            raise RefusedReplyError("it names a part twice, each time differently")
        left.extend((child, depth + 1) for child in part.children)
