"""Between a round and its sites: orders out, replies in; what sites lack is sent to them, and they are asked again.

Plain replies come one by one; with federation.partial_sums workers add them up, with federation.secure_aggregation nobody
reads more than their sum.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from flwr.app import ArrayRecord

from fedloom.clients.protocol.messages import ENROL, LOST, TRAIN, UNKNOWN, config_digest, text_record
from fedloom.clients.protocol.reply_checks import Bounds
from fedloom.conf import to_json
from fedloom.conf.errors import FailedError, UserError, plain
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum
from fedloom.server.ledger.blobs import UNREADABLE
from fedloom.server.rounds.channel import ClientChannel, RawReply
from fedloom.server.rounds.context import Adding, Content, Gathering, RoundContext
from fedloom.server.rounds.listener import Listener
from fedloom.server.rounds.participants import Participants
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.task_messages import Asking, TaskMessages

STATE, CONFIGURATION = "its own state", "the configuration"  # what a site may lack
MOST_REASON = 300  # characters of why a reply is dropped
MOST_LINES = 10  # on dropped replies of a round; all are in its record


class TooFewRepliesError(FailedError):
    """A round ended with fewer good replies than federation.min_replies; nothing of it was committed."""


@dataclass
class RoundTransport:
    """What travels to the sites of one run. `run` identifies the run to their stores; `length`: its rounds, to the sites.

    `back`: the round to which the run has gone back: no site's store is there any more. `dropped`: sites of this round, and
    why their replies do not count.
    """

    config: Config
    run: str
    channel: ClientChannel
    state: ServerState
    listener: Listener
    length: int
    back: int = -1
    dropped: dict[str, str] = field(default_factory=dict)
    participants: Participants = field(init=False)
    digest: str = field(init=False)
    text: ArrayRecord = field(init=False)
    _has: set[str] = field(default_factory=set)  # sites that have the configuration

    def __post_init__(self) -> None:
        text = to_json(self.config)
        self.digest, self.text = config_digest(text), text_record(text)
        self.participants = Participants(
            self.config, self.channel.simulated, lambda sites: self.question(Asking(ENROL, 1, 1), sites, {}), self.message
        )

    # What a round asks (server.rounds.context.Transport)

    def ask(
        self, kind: str, context: RoundContext, sites: Sequence[Site], content: Content,
        expected: Mapping[str, RecordSpec] | None,
    ) -> Iterator[RawReply]:  # fmt: skip
        """All sites' replies, as they come. `expected`: records that may be added up on the way."""
        asking = Asking(kind, context.number, context.site_round, "", context.trained, context.attempt, context.again)
        return self.question(asking, sites, content, expected)

    def masked(self, context: RoundContext, expected: Mapping[str, RecordSpec]) -> Gathering:
        """One question whose replies are added up without being read."""
        from fedloom.server.rounds.secure_aggregation import SecureAggregation  # cryptography: only where it is asked for

        return SecureAggregation(context, self, expected)

    def partials(self, context: RoundContext, means: dict[str, ExactSum], expected: Mapping[str, RecordSpec]) -> Adding:
        """The sums that workers hand over in the place of replies."""
        from fedloom.server.rounds.partial_sums import Partials

        return Partials(context, self.run, means, expected)

    def bounds(self, site: Site) -> Bounds:
        """How large what the site sends may be."""
        return self.participants.bounds(site)

    def images(self, site: Site) -> int:
        """How many training images the site has; 0 if it did not enrol."""
        return self.participants.images(site)

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        """By site, the names of its classes; those that did not enrol are left out."""
        return self.participants.class_names(sites)

    def message(self, text: str) -> None:
        """Tell the user something."""
        self.listener.message(text)

    def replied(self, site: Site, reason: str) -> None:
        """Tell of a reply, and keep why it is dropped."""
        reason = plain(reason)[:MOST_REASON]
        if reason:
            self.dropped[site.name] = reason
        if UNREADABLE in reason and (parts := self.state.ledger.blobs.elsewhere):
            parts.doubt()
        self.listener.reply(site.name, not reason, reason)
        if reason and len(self.dropped) <= MOST_LINES:
            self.message(f"round {self.state.view().round + 1}: {site.name} dropped: {reason}")

    def enough(self, kind: str, context: RoundContext, replies: int) -> None:
        """Raises TooFewRepliesError if too few sites have trained."""
        fewest = min(self.config.federation.min_replies, max(1, len(context.participants))) if kind == TRAIN else 1
        if replies >= fewest:
            return
        first = next(iter(self.dropped.items()), ("", "no site was asked"))
        raise TooFewRepliesError(
            f"round {context.number}: {replies} good replies, federation.min_replies={fewest}"
            f" (first failure: {': '.join(filter(None, first))})"
        )

    # How it travels

    def question(
        self, asking: Asking, sites: Sequence[Site], content: Content, expected: Mapping[str, RecordSpec] | None = None
    ) -> Iterator[RawReply]:
        """All sites' replies; those that lost their own state, or lack the configuration, are asked again with it."""
        messages, waiting = TaskMessages(self, asking, content, expected or {}), deque((site, False) for site in sites)
        tried: dict[str, set[str]] = {}  # what each site lacked, and was sent

        def settled(reply: RawReply) -> RawReply | None:
            """The reply; None if its site is asked again."""
            if reply.content is not None and UNKNOWN not in reply.content.config_records:
                self._has.add(reply.site.name)
            lack, sent = _lack(reply), tried.setdefault(reply.site.name, set())
            if not lack:
                return reply
            if reason := f"it lost {lack} again" if lack in sent else self._refused(reply.site, asking.number, lack):
                return RawReply(reply.site, None, reason)
            sent.add(lack)
            waiting.append((reply.site, STATE in sent))
            return None

        def turns() -> Iterator[Iterator[RawReply | None]]:
            while waiting:
                asked = [waiting.popleft() for _ in range(len(waiting))]
                orders = ((site, messages.order(site, lost)) for site, lost in asked)
                timeout = self.config.federation.timeout
                yield map(settled, self.channel.ask(asking.kind, orders, asking.site_round, timeout))

        return filter(None, chain.from_iterable(turns()))

    def needs_configuration(self, site: Site) -> bool:
        """Whether the configuration goes with the site's order. In a simulation always: engines carry it once per worker."""
        return self.channel.simulated or site.name not in self._has

    def _refused(self, site: Site, number: int, lack: str) -> str:
        """Why a site that lacks something is not asked again; empty: it is. The user hears of a lost state."""
        if lack == CONFIGURATION:
            self._has.discard(site.name)
            return ""
        base = self.state.slots.base(site.name)
        if base and self.config.federation.secure_aggregation:
            return "its own state is lost, and under masks nobody else has it; forget it, then readmit it"
        told = f"{site.name}: its own state is lost: that after round {base}"
        begins = "its contribution" if self.state.restart(site) is not None else "the beginning"
        if base < 1:
            return "it says that its own state is lost, and needs none"
        if self.config.federation.lost_store == "stop" and base > self.back:
            raise UserError(f"round {number}: {told}; federation.lost_store=restart begins at {begins}")
        if not self.channel.enrolment.owns(site.name):
            return f"its own state is lost; {self._stranger(site.name)}"
        self.message(f"round {number}: {told}; it begins again at {begins}")
        return ""

    def _stranger(self, site: str) -> str:
        """Why a node that took a site's place is not sent what the site gave, and how to mend it."""
        enrolment, run = self.channel.enrolment, f"{self.config.run.root}/{self.config.run.name}"
        node, owner = enrolment.nodes.get(site), enrolment.bindings.bound().get(site)
        claims = ", ".join(map(str, enrolment.claims(site)))
        return (f"node {node} is not sent what node {owner} gave ('fedloom readmit {run} {site} --node ID' says which one "
                f"is the site now, of those that claim it: {claims})")  # fmt: skip


def _lack(reply: RawReply) -> str:
    """What the site says that it lacks; empty if nothing."""
    records = reply.content.config_records if reply.content is not None else {}
    return CONFIGURATION if UNKNOWN in records else STATE if LOST in records else ""
