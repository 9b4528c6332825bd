"""Between a round and its sites: send orders, receive replies, and ask again with what a site lacks.

Plain replies arrive one by one. Ray's workers may add them up (federation.partial_sums). With
federation.secure_aggregation, the server reads only their sum.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from flwr.app import ArrayRecord

from fedloom.clients.protocol.messages import (
    ENROL,
    LOST,
    MEAN,
    MOST_RECORDS,
    STAR,
    TRAIN,
    UNKNOWN,
    config_digest,
    text_record,
)
from fedloom.clients.protocol.reply_checks import Bounds
from fedloom.conf import to_json
from fedloom.conf.errors import FailedError, UserError, plain
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum, SumOverflowError
from fedloom.server.ledger.blobs import UNREADABLE
from fedloom.server.ledger.declared import Sum
from fedloom.server.rounds.asking import Adding, Content, Gathering, Round, Transport, UnorderedError
from fedloom.server.rounds.channel import ClientChannel, RawReply
from fedloom.server.rounds.listener import Listener
from fedloom.server.rounds.participants import Participants
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import failing
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.task_messages import Asking, TaskMessages

DROPOUT = "federation.dropout"  # in the reason of a reply that is missing because the configuration says so
STATE, CONFIGURATION = "its own state", "the configuration"  # what a site may lack
MOST_REASON = 300  # characters of the reason for a dropped reply
MOST_LINES = 10  # messages on dropped replies of a round; its record has all


class TooFewRepliesError(FailedError):
    """A round had fewer good replies than federation.min_replies; nothing of it was committed."""


@dataclass
class RoundTransport(Transport):
    """Sends a round's questions to the sites and returns their replies.

    Attributes:
        config: The run's configuration.
        run: The run's id in the sites' stores.
        channel: The connection to the sites.
        state: The server's state.
        listener: Receives the progress.
        length: The number of rounds for the sites.
        back: The round to which the run was rolled back: no site has its own state after it. -1: none.
        dropped: By site of this round, why its reply does not count.
        participants: What the server knows about each site.
        ordered: Whether replies come in the order of the sites, and no worker adds them up: after an overflow.
        digest: The digest of the configuration.
        text: The configuration as a record for sites that lack it.
    """

    config: Config
    run: str
    channel: ClientChannel
    state: ServerState
    listener: Listener
    length: int
    back: int = -1
    dropped: dict[str, str] = field(default_factory=dict)
    ordered: bool = False
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

    # What a round asks (server.rounds.asking.Transport)

    def ask(
        self, kind: str, context: Round, sites: Sequence[Site], content: Content,
        expected: Mapping[str, RecordSpec] | None,
    ) -> Iterator[RawReply]:  # fmt: skip
        fails = failing(self.config, context.number, sites) if kind == TRAIN and not context.leaving else {}
        asking = Asking(kind, context.number, context.site_round, "", context.trained, context.attempt, context.again,
                        context.restoration, fails)  # fmt: skip
        return self.question(asking, sites, content, expected)

    def masked(self, context: Round, expected: Mapping[str, RecordSpec]) -> Gathering:
        from fedloom.server.rounds.secure_aggregation import SecureAggregation  # imported only here: slow

        return SecureAggregation(context, self, expected)

    def partials(self, context: Round, means: dict[str, ExactSum], expected: Mapping[str, RecordSpec]) -> Adding:
        from fedloom.server.rounds.partial_sums import Partials

        return Partials(context, self.run, means, expected)

    def bounds(self, site: Site) -> Bounds:
        return self.participants.bounds(site)

    def images(self, site: Site) -> int:
        return self.participants.images(site)

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        return self.participants.class_names(sites)

    def message(self, text: str) -> None:
        self.listener.message(text)

    def replied(self, site: Site, reason: str) -> None:
        """Report a reply and, if it is dropped, store the reason."""
        reason = plain(reason)[:MOST_REASON]
        if reason:
            self.dropped[site.name] = reason
        if UNREADABLE in reason and (parts := self.state.ledger.blobs.elsewhere):
            parts.doubt()
        self.listener.reply(site.name, not reason, reason)
        if reason and len(self.dropped) <= MOST_LINES and DROPOUT not in reason:
            self.message(f"round {self.state.view().round + 1}: {site.name} dropped: {reason}")

    def overflowed(self, site: Site, error: SumOverflowError) -> None:
        """Raise UnorderedError in a simulation whose replies came in no order, or added up."""
        if self.channel.simulated and not (self.ordered or self.channel.in_order):
            raise UnorderedError(f"{site.name} or sites before it: {error}")

    def enough(self, kind: str, context: Round, replies: int) -> None:
        """Raise TooFewRepliesError if too few sites have trained."""
        fewest = min(self.config.federation.min_replies, max(1, len(context.participants))) if kind == TRAIN else 1
        if replies >= fewest:
            return
        first = next(iter(self.dropped.items()), ("", "no site was asked"))
        raise TooFewRepliesError(
            f"round {context.number}: {replies} good replies, federation.min_replies={fewest}"
            f" (first failure: {': '.join(filter(None, first))})"
        )

    # Messages

    def question(
        self, asking: Asking, sites: Sequence[Site], content: Content, expected: Mapping[str, RecordSpec] | None = None
    ) -> Iterator[RawReply]:
        """Ask sites a question, and yield every site's reply.

        A site that lacks the configuration or its own state is asked again, with what it lacks.

        Args:
            asking: The question.
            sites: The sites to ask.
            content: The records for all sites, or a function from a site to its records.
            expected: The records that workers may add up on the way.
        """
        messages, waiting = TaskMessages(self, asking, content, expected or {}), deque((site, False) for site in sites)
        tried: dict[str, set[str]] = {}  # what each site lacked, and was sent

        def accepted(reply: RawReply) -> RawReply | None:
            """Return the reply; None if its site is asked again."""
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
                yield map(accepted, self.channel.ask(asking.kind, orders, asking.site_round, timeout, self.ordered))

        return filter(None, chain.from_iterable(turns()))

    def adds_up(self, expected: Mapping[str, RecordSpec], content: Content) -> bool:
        """Return whether workers add up these records: as configured, or else if they can check replies as the server does.

        Raises:
            UserError: federation.partial_sums is true, but workers cannot add up these records.
        """
        federation, slots = self.config.federation, self.state.slots.declared
        summable = len(expected) <= MOST_RECORDS and all(spec.summable for spec in expected.values())
        if federation.partial_sums and not summable:
            raise UserError(f"federation.partial_sums: workers add up at most {MOST_RECORDS} records of whole floats, each "
                            "for a slot or a mean, without a check of the method's own. Strategy "
                            f"'{self.config.strategy['name']}' asks for others; set it to false")  # fmt: skip
        if self.ordered or federation.partial_sums is not None:
            return bool(federation.partial_sums) and not self.ordered
        one_sum = len(slots) <= 1 and all(isinstance(slot, Sum) for slot in slots.values())
        simple = one_sum and not federation.clip_change and not federation.secure_aggregation
        return simple and summable and self.channel.adds_up and _from_start(expected, content)

    def needs_configuration(self, site: Site) -> bool:
        """Return whether the site's order must include the configuration: in simulations always."""
        return self.channel.simulated or site.name not in self._has

    def _refused(self, site: Site, number: int, lack: str) -> str:
        """Return why a site that lacks something is not asked again; empty if it is. Report a lost state to the user."""
        if lack == CONFIGURATION:
            self._has.discard(site.name)
            return ""
        base = self.state.slots.base(site.name)
        if base and self.config.federation.secure_aggregation:
            return "its own state is lost, and the server only has it masked; forget the site, then readmit it"
        fault = f"{site.name} has lost its own state after round {base}"
        begins = "its contribution" if self.state.restart(site) is not None else "the beginning"
        if base < 1:
            return "it reports a lost state, but has none yet"
        if self.config.federation.lost_store == "stop" and base > self.back:
            raise UserError(f"round {number}: {fault}; set federation.lost_store=restart to start again from {begins}")
        if not self.channel.enrolment.owns(site.name):
            return f"its own state is lost; {self._stranger(site.name)}"
        self.message(f"round {number}: {fault}; it starts again from {begins}")
        return ""

    def _stranger(self, site: str) -> str:
        """Return why a node that took a site's place does not receive its contributions, and how to allow it."""
        enrolment, run = self.channel.enrolment, f"{self.config.run.root}/{self.config.run.name}"
        node, owner = enrolment.nodes.get(site), enrolment.bindings.bound().get(site)
        claims = ", ".join(map(str, enrolment.claims(site)))
        return (f"node {node} does not receive the contributions of node {owner} ('fedloom readmit {run} {site} --node ID' "
                f"chooses the site's node; these claim it: {claims})")  # fmt: skip


def _from_start(expected: Mapping[str, RecordSpec], content: Content) -> bool:
    """Return whether the records' limits are measured from the network that is sent, as workers measure them."""
    if callable(content) or MEAN not in content:
        return False
    sent = {**content[MEAN], **content.get(STAR, {})}
    return all(sent.get(name) is tensor for spec in expected.values() for name, tensor in (spec.like or {}).items())


def _lack(reply: RawReply) -> str:
    """Return what the site says that it lacks; empty if nothing."""
    records = reply.content.config_records if reply.content is not None else {}
    return CONFIGURATION if UNKNOWN in records else STATE if LOST in records else ""
