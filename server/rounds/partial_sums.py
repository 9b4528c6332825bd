"""Partial sums that workers hand over in the place of replies (clients.protocol.partial_sums), taken in at the server."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from flwr.app import RecordDict

from fedloom.clients.protocol.messages import to_states
from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.clients.protocol.reply_checks import ReplyError, check_record
from fedloom.conf.errors import FailedError
from fedloom.fusion.exact import ExactSum, ExactSumError
from fedloom.server.ledger.blobs import NodeLostError
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import ClientUpdate, RecordSpec

NODES = 16  # that are asked for their sums at once


@dataclass
class Partials:
    """The partial sums of one question: each is taken in once, for all of its sites, or refused for all of them.

    Those that nodes keep wait until all replies are there: then each node is asked for one sum (`fetched`).
    """

    context: RoundContext
    name: str
    means: dict[str, ExactSum]
    expected: Mapping[str, RecordSpec]
    _found: dict[frozenset[str], str] = field(default_factory=dict)  # why each was refused; empty: it was not
    _there: dict[str, dict[frozenset[str], PartialSum]] = field(default_factory=dict)  # by node
    _waiting: dict[str, list[ClientUpdate]] = field(default_factory=dict)

    def add(self, partial: PartialSum, reply: ClientUpdate) -> None:
        """Take in the sum that a site's reply is in, unless it is in already. Raises ReplyError.

        FailedError if it is not the sum of this reply: then nobody knows what it is.
        """
        known = partial.run, partial.round, partial.samples.get(reply.site.name)
        if known != (self.name, self.context.site_round, reply.samples):
            number, site = self.context.number, reply.site.name
            raise FailedError(f"round {number}: a worker's partial sum is not that of {site}'s reply; nothing of it counts")
        if partial.node:
            self._there.setdefault(partial.node, {})[partial.messages] = partial
            self._waiting.setdefault(partial.node, []).append(reply)
            return
        if partial.messages not in self._found:
            try:
                self._merge(partial)
                self._found[partial.messages] = ""
            except (ReplyError, ExactSumError) as error:
                self._found[partial.messages] = str(error)
        if reason := self._found[partial.messages]:
            raise ReplyError(reason)

    def fetched(self) -> Iterator[tuple[ClientUpdate, str]]:
        """The replies whose sums nodes keep, now that each node gives one sum: with why they do not count, or nothing."""
        parts = self.context.ledger.blobs.elsewhere
        if parts is None or not self._there:
            return
        with ThreadPoolExecutor(NODES) as threads:  # they add up at the same time
            asked = {node: threads.submit(parts.add_up, list(each.values())) for node, each in sorted(self._there.items())}
        for node, answer in asked.items():
            reason = ""
            try:
                self._merge(answer.result())
            except (NodeLostError, ReplyError, ExactSumError) as error:
                reason = str(error)
            yield from ((reply, reason) for reply in self._waiting[node])

    def _merge(self, partial: PartialSum) -> None:
        records, added = to_states(RecordDict({**partial.records})), {}
        for record, one in self.expected.items():
            like = one.like if one.like is not None else records.get(record, {})
            check_record(record, records.get(record), like, integers=True)
            if one.mean:
                added[record] = self.means[record].copy()
                added[record].merge(records[record], partial.addends[record])
        for record, one in self.expected.items():
            if one.slot:
                change = self.context.slots.summed(one.slot, records[record])
                self.context.slots.merge(one.slot, change, partial.samples, self.context.number, partial.blobs)
        self.means |= added
