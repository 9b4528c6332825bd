"""The server's channel to the sites: messages out and replies in, within a window and a time limit."""

import itertools
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedloom.clients.privacy.guard import STORAGE
from fedloom.clients.protocol.messages import ASK, TRAIN, array_bytes
from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.conf.errors import plain
from fedloom.conf.sites import Site
from fedloom.server.ledger.blobs import LedgerError
from fedloom.server.ledger.ledger import Ledger
from fedloom.server.rounds.enrolment import POLL_SECONDS, REFRESH_SECONDS, Enrolment, reason_of
from fedloom.server.rounds.nodes import NONCE, InMemoryBindings, nonce

WINDOW_BYTES = 256 * 2**20
LEAST_UNDER_WAY, MOST_UNDER_WAY = 4, 1000
LEAST_TTL = 60.0  # seconds that a message waits for its node
NOT_TAKEN = "its node is no longer registered"


@dataclass(frozen=True)
class RawReply:
    """A site's unchecked answer: its content, or None and the reason.

    `partial`: the partial sum that contains the site's contribution, which is then missing in the content. All sites in the
    sum share the same object.
    """

    site: Site
    content: RecordDict | None
    reason: str = ""
    partial: PartialSum | None = None


@dataclass
class ClientChannel:
    """The connection between a run and all its sites, through a Flower grid.

    Attributes:
        grid: Flower's grid, or that of an engine.
        sites: All sites of the run.
        window: How many messages may be in progress at once; 0: derived from their size.
        bindings: Stores to which node each site's contributions belong (server.rounds.enrolment).
        enrolment: Finds the node of each site.
        traffic: By site, the bytes of arrays sent and received since it was last cleared.
    """

    grid: Grid
    sites: list[Site]
    window: int
    bindings: Ledger | InMemoryBindings = field(default_factory=InMemoryBindings)
    enrolment: Enrolment = field(init=False)
    traffic: dict[str, tuple[int, int]] = field(default_factory=dict)
    _range: range | None = None

    def __post_init__(self) -> None:
        self.enrolment = Enrolment(self.grid, self.sites, self.bindings)

    @property
    def simulated(self) -> bool:
        """Whether the nodes are the user's own simulated ones, which need no identification."""
        return bool(getattr(self.grid, "simulated", False))

    @property
    def nodes(self) -> dict[str, int]:
        """The node id of each connected site, by site name."""
        return self.enrolment.nodes

    @property
    def in_order(self) -> bool:
        """Whether the engine answers messages in the order in which they are sent."""
        return bool(getattr(self.grid, "in_order", False))

    @property
    def adds_up(self) -> bool:
        """Whether workers on this machine can add up replies, unless the configuration says otherwise."""
        return bool(getattr(self.grid, "adds_up", False))

    @property
    def received(self) -> int | None:
        """Bytes of arrays that have arrived so far, including partial sums; None if the engine does not count them."""
        return getattr(self.grid, "received", None)

    def parts(self, run: str) -> Any:
        """Return the store of the run's contributions on a cluster's nodes (RemoteBlobStore); None without a cluster."""
        return self.grid.parts(run) if self.simulated and hasattr(self.grid, "parts") else None  # type: ignore[attr-defined]

    def begin(self) -> None:
        """Assign a simulation's nodes to the sites, and wait until its engine can work."""
        self.enrolment.simulate()
        if begin := getattr(self.grid, "begin", None):  # only the engines of fedloom have it
            begin()

    def join(self, timeout: float, fewest: int = 0, unneeded: Collection[str] = ()) -> None:
        """Wait until every site is connected; arguments and errors as in server.rounds.enrolment.Enrolment.join."""
        self.enrolment.join(timeout, fewest, unneeded)

    def refresh(self, timeout: float = REFRESH_SECONDS) -> None:
        """Update which node each site has. Do nothing if a simulation's nodes are the same range of ids as before."""
        nodes = self.grid.get_node_ids() if self.simulated else None
        if not isinstance(nodes, range) or nodes != self._range or len(self.nodes) < len(self.sites):
            self.enrolment.refresh(timeout)
        self._range = nodes if isinstance(nodes, range) else None

    def ask(
        self, kind: str, orders: Iterable[tuple[Site, RecordDict]], round: int, timeout: float, ordered: bool = False
    ) -> Iterator[RawReply]:
        """Send each site its order, and yield the replies as they arrive.

        After the timeout, remaining orders are cancelled: they no longer run, and late replies do not count.

        Args:
            kind: TRAIN, or the name of a question.
            orders: Pairs of a site and its order.
            round: The round's number, for Flower's group id.
            timeout: Seconds to wait for all replies.
            ordered: Whether to yield the replies in the order of `orders`.

        Yields:
            A RawReply for each site: its reply, or the reason why it is missing.

        Raises:
            LedgerError: In a simulation, this machine's storage has failed: no site is at fault.
        """
        absent: list[Site] = []
        asked: list[str] = []
        message_type = TRAIN if kind == TRAIN else ASK

        def messages() -> Iterator[tuple[Site, Message]]:
            for site, content in orders:
                if site.name in self.nodes:
                    ttl = max(timeout, LEAST_TTL)
                    if not self.simulated:
                        content[NONCE] = nonce()
                    self._count(site, array_bytes(content), 0)
                    asked.append(site.name)
                    yield site, Message(content, self.nodes[site.name], message_type, group_id=str(round), ttl=ttl)
                else:
                    absent.append(site)

        replies = self._exchange(messages(), timeout)
        yield from _in_order(replies, asked) if ordered else replies
        for site in absent:
            yield RawReply(site, None, "not connected")

    def _exchange(self, outgoing: Iterable[tuple[Site, Message]], timeout: float) -> Iterator[RawReply]:
        """Push messages within the window, and yield replies. After `timeout` seconds, pending messages have failed."""
        queue = iter(outgoing)
        first = next(queue, None)
        if first is None:
            return
        queue = itertools.chain([first], queue)
        window = min(self.window or room(first[1].content), sys.maxsize)
        pending: dict[str, Site] = {}
        deadline = time.monotonic() + timeout
        try:
            while True:
                batch = list(itertools.islice(queue, window - len(pending)))
                if batch:
                    ids = self.grid.push_messages([message for _, message in batch])
                    pairs = [(id, site) for id, (site, _) in zip(ids, batch, strict=True)]
                    pending.update((id, site) for id, site in pairs if id)
                    yield from (RawReply(site, None, NOT_TAKEN) for id, site in pairs if not id)
                if not pending:
                    return
                replies = list(self.grid.pull_messages(list(pending)))
                arrived = [(pending.pop(message.metadata.reply_to_message_id, None), message) for message in replies]
                yield from (self._reply(site, message) for site, message in arrived if site is not None)
                if time.monotonic() > deadline:
                    break
                if not replies:
                    time.sleep(getattr(self.grid, "poll_seconds", POLL_SECONDS))
        finally:
            self._cancel(pending)
        for site in itertools.chain(pending.values(), (site for site, _ in queue)):
            yield RawReply(site, None, f"no reply within {timeout:g} s")

    def _reply(self, site: Site, message: Message) -> RawReply:
        partial_sum: Any = getattr(self.grid, "partial_sum", None)  # only the engines of fedloom have it
        partial = partial_sum(message.metadata.reply_to_message_id) if partial_sum else None
        summed = partial.sizes.get(site.name, 0) if partial is not None else 0
        if message.has_error():
            if self.simulated and message.error.code == STORAGE:
                raise LedgerError(plain(message.error.reason or ""))
            self._count(site, 0, summed)
            return RawReply(site, None, reason_of(message))
        self._count(site, 0, array_bytes(message.content) + summed)
        return RawReply(site, message.content, "", partial)

    def _count(self, site: Site, sent: int, received: int) -> None:
        before = self.traffic.get(site.name, (0, 0))
        self.traffic[site.name] = before[0] + sent, before[1] + received

    def _cancel(self, pending: Mapping[str, Site]) -> None:
        """Cancel pending messages: fedloom's engines stop them; in a real federation, their replies are never fetched."""
        cancel: Any = getattr(self.grid, "cancel", None)
        if pending and cancel:
            cancel(list(pending))


def _in_order(replies: Iterable[RawReply], asked: Sequence[str]) -> Iterator[RawReply]:
    """Yield each site's reply in the order of `asked`, which grows meanwhile."""
    early: dict[str, RawReply] = {}
    place = 0
    for reply in replies:
        early[reply.site.name] = reply
        while place < len(asked) and asked[place] in early:
            yield early.pop(asked[place])
            place += 1


def room(content: RecordDict) -> int:
    """Return how many messages of this size may wait for a reply at once: their arrays fit into WINDOW_BYTES."""
    return max(LEAST_UNDER_WAY, min(MOST_UNDER_WAY, WINDOW_BYTES // max(1, array_bytes(content))))
