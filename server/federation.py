"""The sites as the server sees them: which node is which site, and a windowed, timed exchange of messages with them."""

import itertools
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from clients.messages import QUERY, TRAIN, WHO
from conf.errors import UserError
from conf.sites import Site

POLL_SECONDS = 0.2
REFRESH_SECONDS = 15.0
ASKED_AT_MOST = 5
WINDOW_BYTES = 256 * 2**20
LEAST_UNDER_WAY, MOST_UNDER_WAY = 4, 1000

Key = TypeVar("Key")


@dataclass(frozen=True)
class Reply:
    """A site's answer: its content, or None and the reason why there is none."""

    site: Site
    content: RecordDict | None
    reason: str = ""


@dataclass
class Federation:
    """All sites of a run, found through the grid. `window` messages are under way at once (0: by their size)."""

    grid: Grid
    sites: list[Site]
    window: int
    nodes: dict[str, int] = field(default_factory=dict)
    _asked: dict[int, int] = field(default_factory=dict)
    _failure: str = ""

    def join(self, timeout: float) -> None:
        """Wait until every site is there. Raises UserError naming the missing ones after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self.refresh(max(1.0, deadline - time.monotonic()))
            missing = [site.name for site in self.sites if site.name not in self.nodes]
            if not missing:
                return
            if time.monotonic() > deadline:
                named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
                told = f"; last failure: {self._failure}" if self._failure else ""
                raise UserError(
                    f"{len(missing)} of {len(self.sites)} sites did not join within {timeout:g} s: {named} "
                    f"(start their nodes, or raise federation.join_timeout{told})"
                )
            time.sleep(POLL_SECONDS)

    def refresh(self, timeout: float = REFRESH_SECONDS) -> None:
        """Ask nodes that are new which site they are (a restarted node may have a new id); silent ones a few times."""
        new = [node for node in self.grid.get_node_ids() if self._asked.get(node, 0) < ASKED_AT_MOST]
        queries = (Message(RecordDict(), node, QUERY, group_id="who") for node in new)
        names = {site.name for site in self.sites}
        by_place = {str(site.index): site.name for site in self.sites}
        for node, content, reason in self._exchange(zip(new, queries, strict=True), timeout):
            who = content.config_records.get(WHO) if content is not None else None
            if who is None:
                self._asked[node] = self._asked.get(node, 0) + 1
                self._failure = reason or "a node did not say which site it is"
                continue
            self._asked[node] = ASKED_AT_MOST
            name = str(who["site"]) if "site" in who else by_place.get(str(who.get("partition-id")), "")
            if name in names:
                self.nodes[name] = node

    def train(self, orders: Iterable[tuple[Site, RecordDict]], round: int, timeout: float) -> Iterator[Reply]:
        """Send each site its order; yield replies as they come, and a failure for each site that does not answer."""
        absent: list[Site] = []

        def messages() -> Iterator[tuple[Site, Message]]:
            for site, content in orders:
                if site.name in self.nodes:
                    yield site, Message(content, self.nodes[site.name], TRAIN, group_id=str(round))
                else:
                    absent.append(site)

        for site, content, reason in self._exchange(messages(), timeout):
            yield Reply(site, content, reason)
        for site in absent:
            yield Reply(site, None, "not connected")

    def _exchange(
        self, outgoing: Iterable[tuple[Key, Message]], timeout: float
    ) -> Iterator[tuple[Key, RecordDict | None, str]]:
        """Push within the window, pull, yield (key, content, reason). After `timeout` seconds what is pending has failed."""
        queue = iter(outgoing)
        first = next(queue, None)
        if first is None:
            return
        queue = itertools.chain([first], queue)
        window = self.window or room(first[1].content)
        pending: dict[str, Key] = {}
        deadline = time.monotonic() + timeout
        while True:
            batch = list(itertools.islice(queue, window - len(pending)))
            if batch:
                ids = self.grid.push_messages([message for _, message in batch])
                pending.update(zip(ids, (key for key, _ in batch), strict=True))
            if not pending:
                return
            replies = list(self.grid.pull_messages(list(pending)))
            for reply in replies:
                key = pending.pop(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    yield key, None, _told(reply.error.reason, reply.error.code)
                else:
                    yield key, reply.content, ""
            if time.monotonic() > deadline:
                for key in itertools.chain(pending.values(), (key for key, _ in queue)):
                    yield key, None, f"no reply within {timeout:g} s"
                return
            if not replies:
                time.sleep(getattr(self.grid, "poll_seconds", POLL_SECONDS))


def room(content: RecordDict) -> int:
    """How many messages such as this one may be under way at once, so that their arrays stay within WINDOW_BYTES."""
    size = sum(len(array.data) for record in content.array_records.values() for array in record.values())
    return max(LEAST_UNDER_WAY, min(MOST_UNDER_WAY, WINDOW_BYTES // max(1, size)))


def _told(reason: str | None, code: int) -> str:
    """The last line of an error's text (where Python names the exception, unless it is one made for users), or its code."""
    lines = [line for line in (reason or "").strip().splitlines() if line.strip()]
    return lines[-1].strip().removeprefix("conf.errors.UserError: ")[:300] if lines else f"error code {code}"
