"""Take in the partial sums that workers send instead of replies (clients.protocol.partial_sums)."""

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from flwr.app import RecordDict

from fedloom.clients.protocol.messages import SITE, to_states
from fedloom.clients.protocol.partial_sums import PartialSum
from fedloom.clients.protocol.reply_checks import ReplyError, check_record
from fedloom.conf.errors import FailedError
from fedloom.fusion.exact import ExactSum, ExactSumError, SumOverflowError
from fedloom.server.ledger.blobs import NodeLostError
from fedloom.server.rounds.asking import Round
from fedloom.server.rounds.record_spec import ClientUpdate, RecordSpec

NODES = 16  # nodes that are asked for their sums at once


@dataclass
class Partials:
    """The partial sums of one question. Each is added once for all of its sites, or refused for all of them.

    Sums that nodes store wait until all replies have arrived. Then each node is asked for one sum (`fetched`).

    Attributes:
        context: The round.
        name: The run's id.
        means: The sums of records that are averaged, to which partial sums are added.
        expected: The records that a reply must have.
    """

    context: Round
    name: str
    means: dict[str, ExactSum]
    expected: Mapping[str, RecordSpec]
    _found: dict[frozenset[str], str] = field(default_factory=dict)  # the reason of each refusal; empty if it was added
    _there: dict[str, dict[frozenset[str], PartialSum]] = field(default_factory=dict)  # by node
    _waiting: dict[str, list[ClientUpdate]] = field(default_factory=dict)

    def add(self, partial: PartialSum, reply: ClientUpdate) -> None:
        """Add the partial sum that contains a site's reply, unless it is added already.

        Raises ReplyError if the sum is refused; FailedError if the sum does not belong to this reply.
        """
        known = partial.run, partial.round, partial.samples.get(reply.site.name)
        if known != (self.name, self.context.site_round, reply.samples):
            number, site = self.context.number, reply.site.name
            raise FailedError(f"round {number}: a worker's partial sum does not belong to {site}'s reply")
        if partial.node:
            self._there.setdefault(partial.node, {})[partial.messages] = partial
            self._waiting.setdefault(partial.node, []).append(reply)
            return
        if partial.messages not in self._found:
            try:
                self._merge(partial)
                self._found[partial.messages] = ""
            except SumOverflowError:  # one of its sites is at fault
                raise
            except (ReplyError, ExactSumError) as error:
                self._found[partial.messages] = str(error)
        if reason := self._found[partial.messages]:
            raise ReplyError(reason)

    def fetched(self) -> Iterator[tuple[ClientUpdate, str]]:
        """Fetch and add one sum from each node; yield the replies in it, each with the reason why it is dropped, or ""."""
        parts = self.context.ledger.blobs.elsewhere
        if parts is None or not self._there:
            return
        with ThreadPoolExecutor(NODES) as threads:  # nodes add up at the same time
            asked = {node: threads.submit(parts.add_up, list(each.values())) for node, each in sorted(self._there.items())}
        for node, answer in asked.items():
            reason = ""
            try:
                self._merge(answer.result(), node=True)
            except (NodeLostError, ReplyError, ExactSumError) as error:
                reason = self.context.reason(self._waiting[node][0].site, error)
            yield from ((reply, reason) for reply in self._waiting[node])

    def _merge(self, partial: PartialSum, node: bool = False) -> None:
        records, added = to_states(RecordDict({**partial.records})), {}
        whole = to_states(RecordDict({SITE: partial.new}))[SITE] if partial.new is not None else None
        for record, spec in self.expected.items():
            like = spec.like if spec.like is not None else records.get(record, {})
            check_record(record, records.get(record), like, integers=True)
            if spec.mean:
                added[record] = self.means[record].copy()
                added[record].merge(records[record], partial.addends[record])
        for record, spec in self.expected.items():
            if spec.slot:
                change = self.context.slots.summed(spec.slot, records[record])
                new = self.context.slots.summed(spec.slot, whole) if whole is not None else None
                self.context.slots.merge(
                    spec.slot, change, partial.samples, self.context.number, partial.blobs, node=node, new=new
                )
        self.means |= added
