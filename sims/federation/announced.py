"""Record the replies that nodes announce to a SuperLink, and bound their parts and bytes.

The record is in memory, since runs end with the SuperLink's process.
"""

import threading
from collections import deque
from dataclasses import dataclass

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import is_valid_sha256_hash, iterate_object_tree

from fedloom.server.flower.limits import LEAST_LIMIT, TIMES_SENT

LEAST_PARTS = 2000  # that every reply may have; the database needs half a millisecond for each
TIMES_PARTS = 4  # times the parts of the run's largest order
MOST_DEPTH = 8  # levels of parts in parts; Flower's messages have five
MOST_ALIVE = 8  # open replies of one node; it works on one order of a run at a time
MOST_AGAIN = 3  # announcements of one reply; the answer to one may have been lost


class RefusedReplyError(ValueError):
    """The server refuses a reply; the message says why."""


@dataclass
class Announced:
    """A reply that a node has announced.

    Attributes:
        node: The id of the node.
        run: The id of the run.
        root: The id of the reply's message.
        session: The session in which the node sends the reply's parts.
        times: How often it was announced.
        taken: The bytes received so far.
    """

    node: int
    run: int
    root: str
    session: str
    times: int = 1
    taken: int = 0  # bytes received


@dataclass
class _Orders:
    """The orders of a run: the parts of the largest one, and the most bytes in one session."""

    parts: int = 0
    largest: int = 0
    session: str = ""
    bytes: int = 0


class Book:
    """Records the orders of each run and the replies that nodes announce, to limit the parts and bytes of replies.

    Flower sends a message in parts. A node first announces its reply (`announce`), then sends the parts (`take`). The limits
    follow from the size of the run's orders, which the run's ServerApp sends to the SuperLink (`order`, `sent`).
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders: dict[int, _Orders] = {}
        self._held: dict[int, deque[Announced]] = {}  # by node, oldest first
        self._of_session: dict[str, Announced] = {}

    def order(self, run: int, tree: ObjectTree) -> set[str]:
        """Record a new order of a run.

        Args:
            run: The id of the run.
            tree: The parts of the order's message.

        Returns:
            The ids of all parts.
        """
        ids = [part.object_id for part in iterate_object_tree(tree)]
        with self._lock:
            orders = self._orders.setdefault(run, _Orders())
            orders.parts = max(orders.parts, len(ids))
        return set(ids)

    def sized(self, run: int) -> bool:
        """Return whether the size in bytes of a run's orders is known (`sent`)."""
        return self._orders.get(run, _Orders()).largest > 0

    def sent(self, run: int, session: str, size: int) -> None:
        """Record that the SuperLink received `size` bytes of a run's order in this session."""
        with self._lock:
            orders = self._orders.setdefault(run, _Orders())
            orders.bytes = size + (orders.bytes if session == orders.session else 0)
            orders.session, orders.largest = session, max(orders.largest, orders.bytes)

    def most_parts(self, run: int) -> int:
        """Return how many parts a reply in a run may have."""
        return max(LEAST_PARTS, TIMES_PARTS * self._orders.get(run, _Orders()).parts)

    def most_bytes(self, run: int) -> int:
        """Return how many bytes a reply in a run may have."""
        return max(LEAST_LIMIT, TIMES_SENT * self._orders.get(run, _Orders()).largest)

    def announce(self, node: int, run: int, root: str, session: str) -> list[Announced]:
        """Record that a node announces a reply.

        Args:
            node: The id of the node.
            run: The id of the run.
            root: The id of the reply's message.
            session: The session in which the node will send the reply's parts.

        Returns:
            Older open replies of this node, which the caller must drop.

        Raises:
            RefusedReplyError: The reply was announced too often.
        """
        with self._lock:
            held = self._held.setdefault(node, deque())
            if known := next((reply for reply in held if reply.root == root), None):
                if known.times >= MOST_AGAIN:
                    raise RefusedReplyError(f"it was announced more than {MOST_AGAIN} times")
                known.times += 1
                self._of_session.pop(known.session, None)
                known.session = session
                self._of_session[session] = known
                return []
            new = self._of_session[session] = Announced(node, run, root, session)
            held.append(new)
            return [self._let_go(held.popleft()) for _ in range(len(held) - MOST_ALIVE)]

    def _let_go(self, reply: Announced) -> Announced:
        self._of_session.pop(reply.session, None)
        return reply

    def forget(self, reply: Announced) -> None:
        """Remove an announced reply from the record."""
        with self._lock:
            self._let_go(reply)
            if reply in (held := self._held.get(reply.node, deque())):
                held.remove(reply)

    def take(self, node: int, session: str, size: int) -> Announced | None:
        """Count `size` received bytes of a reply, and return it; None if this node announced no reply in this session."""
        with self._lock:
            reply = self._of_session.get(session)
            if reply is None or reply.node != node:
                return None
            reply.taken += size
            return reply


def check_tree(tree: ObjectTree, most: int) -> None:
    """Raise RefusedReplyError for a reply with over `most` parts, too many levels, or parts that contradict each other."""
    left, children, number = [(tree, 1)], dict[str, frozenset[str]](), 0
    while left:
        part, depth = left.pop()
        number += 1
        if number > most:
            raise RefusedReplyError(f"it has more than {most} parts")
        if depth > MOST_DEPTH:
            raise RefusedReplyError(f"its parts have more than {MOST_DEPTH} levels")
        if not is_valid_sha256_hash(part.object_id):
            raise RefusedReplyError("a part's id is not a hash")
        within = frozenset(child.object_id for child in part.children)
        if len(within) < len(part.children) or children.setdefault(part.object_id, within) != within:
            raise RefusedReplyError("it names a part twice with different contents")
        left.extend((child, depth + 1) for child in part.children)
