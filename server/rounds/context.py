"""What a method has at hand in a round: the sites to ask, and its slots to read and to change.

Nothing that a round does is valid before the loop commits it; a round that fails leaves no trace.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from flwr.app import RecordDict
from torch import Tensor

from fedloom.clients.protocol.messages import TRAIN, to_states
from fedloom.clients.protocol.partial_sums import SAMPLES, PartialSum
from fedloom.clients.protocol.reply_checks import Bounds, ReplyError, asked_numbers, check_record, train_numbers
from fedloom.clients.protocol.signatures import fingerprint, update_payload, verified_signature
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.randomness import generator
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum, ExactSumError, quantise
from fedloom.fusion.state import State
from fedloom.server.ledger.slots import Slots, SlotUpdate
from fedloom.server.rounds.channel import RawReply
from fedloom.server.rounds.privacy import refuse_hidden
from fedloom.server.rounds.record_spec import ClientUpdate, RecordSpec
from fedloom.server.rounds.schedules import Participation
from fedloom.server.rounds.view import Setup, View, own

Content = Mapping[str, State] | Callable[[Site], Mapping[str, State]]  # states by record name; for all, or of each site


class Gathering(Protocol):
    """A question whose replies are added up and put where they go (server.rounds.secure_aggregation)."""

    def gather(self, kind: str, content: Content, asked: Sequence[Site]) -> dict[str, State]:
        """Ask; the means over the replies, by record name."""
        ...


class Adding(Protocol):
    """The sums that workers hand over in the place of replies (server.rounds.partial_sums)."""

    def add(self, partial: PartialSum, reply: ClientUpdate) -> None:
        """Take in the sum that a site's reply is in, unless it is in already. Raises ReplyError."""
        ...

    def fetched(self) -> Iterator[tuple[ClientUpdate, str]]:
        """The replies whose sums nodes keep: with why they do not count, or nothing."""
        ...


class Transport(Protocol):
    """How questions reach the sites of a run (server.rounds.transport)."""

    run: str
    length: int

    def ask(
        self, kind: str, context: "RoundContext", sites: Sequence[Site], content: Content,
        expected: Mapping[str, RecordSpec] | None,
    ) -> Iterator[RawReply]:  # fmt: skip
        """Every site's answer, or why there is none. `expected`: records that may be added up on the way."""
        ...

    def masked(self, context: "RoundContext", expected: Mapping[str, RecordSpec]) -> Gathering:
        """A question whose replies are added up without being read."""
        ...

    def partials(self, context: "RoundContext", means: dict[str, ExactSum], expected: Mapping[str, RecordSpec]) -> Adding:
        """The sums that workers hand over in the place of replies."""
        ...

    def bounds(self, site: Site) -> Bounds:
        """How large what the site sends may be."""
        ...

    def images(self, site: Site) -> int:
        """How many training images the site has; 0 if nobody knows."""
        ...

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        """By site, the names of its classes 0, 1, ...; none if they are numbers. Without sites that did not enrol."""
        ...

    def replied(self, site: Site, reason: str) -> None:
        """Tell how a site's reply fared; `reason`: why it was dropped."""
        ...

    def message(self, text: str) -> None:
        """Tell the user something."""
        ...

    def enough(self, kind: str, context: "RoundContext", replies: int) -> None:
        """Raises TooFewRepliesError if a question has too few good replies."""
        ...


class RoundContext(View):
    """A round under way. What it reads is what was committed, with what it has put and kept itself."""

    def __init__(self, setup: Setup, slots: Slots, participation: Participation, number: int, transport: Transport) -> None:
        super().__init__(setup, slots)
        self.clipped: dict[str, dict[str, float]] = {}  # by site and record: how far what was scaled back had moved
        self.participants, self.site_round, self.number = participation.sites, participation.round, number
        self._transport = transport
        self.losses: list[float] = []  # of the sites that tell theirs
        self.replies = 0  # of sites that have trained
        self.epsilon: dict[str, float] = {}  # what its rounds have cost each site, by its own word
        self.signed: dict[str, dict[str, str]] = {}  # what sites sent, in their own word
        self.trained: set[str] = set()  # sites whose own state is that after this round
        self._puts: list[SlotUpdate] | None = None  # of the reply that is at hand
        self.attempt = ""  # at secure aggregation, while it is under way
        self.again = 0  # which draw of the round's batches it is, under masks
        self.masked: list[str] = []  # the sites whose masked contributions count
        self.leaving: list[str] = []  # sites to be forgotten, whose masks are taken out of the others' contributions
        self.recalibrated = False  # nobody trained: the sites sent statistics of the aggregates
        self.record: dict[str, Any] = {}  # once it is committed: its line in metrics.jsonl
        self._left: list[tuple[str, int]] = []  # questions whose replies were not all heard, and how many were

    def rng(self, purpose: str) -> np.random.Generator:
        """NumPy's generator for this round and purpose: the same whenever the round is repeated."""
        return generator(self.config.seed, purpose, str(self.number))

    @property
    def length(self) -> int:
        """Of how many rounds the run is to the sites, whose learning rate follows it."""
        return self._transport.length

    def images(self, site: Site) -> int:
        """How many training images a site has, by the configuration or as it says; 0 if nobody knows."""
        return self._transport.images(site)

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        """By site, the names of its classes 0, 1, ... as the site says them; none if they are numbers."""
        return self._transport.class_names(sites)

    def ask(
        self, kind: str, content: Content, expected: Mapping[str, RecordSpec] | Callable[[Site], Mapping[str, RecordSpec]],
        sites: Sequence[Site] | None = None, metrics: Sequence[str] = (), needed: bool = True,
    ) -> Iterator[ClientUpdate]:  # fmt: skip
        """Ask the participants (or `sites`) a question; yield the replies that hold what is expected (of all, or of each
        site), as they come.

        What is put while a reply is at hand is taken over when the next one is asked for: all of it or, if a sum cannot
        take it, nothing, and the reply is dropped. `metrics`: numbers that a reply must have (of TRAIN: loss and samples).
        Raises TooFewRepliesError for fewer replies to TRAIN than federation.min_replies, unless no answer is `needed`: then
        the method goes on with those that it has.
        """
        asked, replies = self.participants if sites is None else sites, 0
        if kind == TRAIN:
            refuse_hidden(self.config)
        for received in self._transport.ask(kind, self, asked, content, None):
            try:
                wanted = expected(received.site) if callable(expected) else expected
                reply = self._checked(kind, received, wanted, metrics)
            except (ReplyError, ExactSumError) as error:
                self._drop(received.site, str(error))
                continue
            mine: list[SlotUpdate] = []
            outer, self._puts = self._puts, mine
            try:
                yield reply
            except GeneratorExit:  # the method has heard enough
                heard = replies + self._apply(kind, reply, mine)
                self._left += [(kind, heard)] if needed else []
                raise
            finally:
                self._puts = outer
            replies += self._apply(kind, reply, mine)
        if needed:
            self._transport.enough(kind, self, replies)

    def close(self) -> None:
        """At the end of a round: TooFewRepliesError if a question that was left early had too few replies."""
        for kind, replies in self._left:
            self._transport.enough(kind, self, replies)

    def _apply(self, kind: str, reply: ClientUpdate, puts: list[SlotUpdate]) -> int:
        """Apply what was put while the reply was at hand: all of it or, if a sum cannot hold it, nothing. 1 or 0 replies."""
        try:
            self.slots.put(puts, self.number)
        except ExactSumError as error:
            self._drop(reply.site, str(error))
            return 0
        self._accepted(kind, reply)
        return 1

    def gather(
        self, kind: str, content: Content, expected: Mapping[str, RecordSpec], sites: Sequence[Site] | None = None
    ) -> dict[str, State]:
        """Ask, and put every expected record where it goes; the means over the replies, by record name.

        Where federation.partial_sums allows it, workers add the records up; with federation.secure_aggregation nobody reads
        more than the sums. Raises TooFewRepliesError.
        """
        asked, replies = self.participants if sites is None else sites, 0
        if self.config.federation.secure_aggregation:
            return self._transport.masked(self, expected).gather(kind, content, asked)
        means = {record: ExactSum(self.bits) for record, one in expected.items() if one.mean}
        partials: Adding | None = None
        for received in self._transport.ask(kind, self, asked, content, expected):
            try:
                reply = self._checked(kind, received, expected if received.partial is None else {})
                if received.partial is not None:
                    partials = partials or self._transport.partials(self, means, expected)
                    partials.add(received.partial, reply)
                else:
                    self._put_all(reply, expected, means)
            except (ReplyError, ExactSumError) as error:
                self._drop(received.site, str(error))
                continue
            if received.partial is None or not received.partial.node:
                replies += 1
                self._accepted(kind, reply)
        for reply, reason in partials.fetched() if partials else ():
            if reason:
                self._drop(reply.site, reason)
            else:
                replies += 1
                self._accepted(kind, reply)
        self._transport.enough(kind, self, replies)
        return {record: one.mean() for record, one in means.items() if one.addends}

    def put(self, slot: str, site: Site, state: State, samples: int = 0) -> None:
        """Replace what the site put into the slot before: float tensors, or int64 ones in units of 2**-bits.

        Raises ExactSumError, if no reply is at hand, for what the exact sum cannot take.
        """
        if slot not in self.slots.declared:
            raise unknown("slot", slot, self.slots.declared)
        if not isinstance(samples, int) or samples < 0:
            raise UserError(f"slot '{slot}': got {samples!r} samples of {site.name}, takes a whole number from 0")
        one = SlotUpdate(slot, site.name, state, samples)
        if self._puts is None:
            self.slots.put([one], self.number)
        else:
            self._puts.append(one)

    def put_all(self, slot: str, state: State) -> None:
        """Let every site put the same, before any has put anything."""
        self.slots.put_all(slot, state, self.number)

    def save_server_state(self, name: str, state: State) -> None:
        """Keep a state that belongs to no site, in place of that of its name."""
        if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
            raise UserError(f"save_server_state('{name}', ...): takes a dictionary of tensors, got {type(state).__name__}")
        self.slots.keep(name, own(dict(state)))

    def _checked(
        self, kind: str, received: RawReply, expected: Mapping[str, RecordSpec], metrics: Sequence[str] = ()
    ) -> ClientUpdate:
        """The reply, if it holds what is expected. Raises ReplyError."""
        if received.content is None:
            raise ReplyError(received.reason)
        site, bounds = received.site, self._transport.bounds(received.site)
        if kind == TRAIN:
            numbers = train_numbers(received.content, bounds, hidden=bool(self.config.privacy.noise))
            self.countersigned(site.name, received.content)
        else:
            numbers = asked_numbers(received.content, metrics, bounds)
        try:
            records = to_states(received.content) if expected else {}
        except Exception as error:  # bytes from outside
            raise ReplyError(f"its arrays cannot be read ({error})") from None
        exact: dict[str, State] = {}
        clipped: dict[str, float] = {}
        for record, one in expected.items():
            integers = None if one.like is not None else False
            like = one.start(self.slots, site.name)
            if not one.whole:
                records.setdefault(record, {})
                like = {name: tensor for name, tensor in like.items() if name in records[record]}
            check_record(record, records.get(record), like, integers)
            bounds.check(record, records[record], like, change=one.bounded)
            if one.bounded:
                records[record], moved = bounds.clipped(records[record], like)
                clipped |= {record: moved} if moved else {}
            exact[record] = quantise(records[record], self.bits)
            one.check(records[record])
        return ClientUpdate(site, records, numbers, exact, clipped)

    def _put_all(self, reply: ClientUpdate, expected: Mapping[str, RecordSpec], means: dict[str, ExactSum]) -> None:
        """Into the slots and means: all of the reply or, with an ExactSumError, nothing."""
        times = {record: reply.samples if expected[record].mean == SAMPLES else 1 for record in means}
        puts = [
            SlotUpdate(one.slot, reply.site.name, reply[record], reply.samples, reply.integers[record])
            for record, one in expected.items()
            if one.slot
        ]
        with contextlib.ExitStack() as undo:
            for record, mean in means.items():
                mean.add(reply.integers[record], times[record])
                undo.callback(mean.subtract, reply.integers[record], times[record])
            self.slots.put(puts, self.number)
            undo.pop_all()

    def _accepted(self, kind: str, reply: ClientUpdate) -> None:
        if kind == TRAIN:
            self.count_training(reply.site.name, reply.metrics)
        if reply.clipped:
            self.clipped[reply.site.name] = {**self.clipped.get(reply.site.name, {}), **reply.clipped}
        self._transport.replied(reply.site, "")

    @functools.cached_property
    def _keys(self) -> dict[str, str]:
        return self.ledger.keys()

    def countersigned(self, site: str, content: RecordDict) -> None:
        """Keep the site's signature of what it sent, if it signs."""
        words = update_payload(self._transport.run, site, self.site_round, content)
        signed = verified_signature(content, *words)
        if signed and fingerprint(signed["key"]) == self._keys.get(site):
            self.signed[site] = {"sha256": str(words[-1]), **signed}

    def count_training(self, site: str, numbers: Mapping[str, float]) -> None:
        """Count a site's training, with its loss, if it tells that, and what it has cost."""
        if "loss" in numbers:
            self.losses.append(numbers["loss"])
        self.replies += 1
        self.trained.add(site)
        if self.config.privacy.noise and "epsilon" in numbers:
            self.epsilon[site] = numbers["epsilon"]

    def _drop(self, site: Site, reason: str) -> None:
        self._transport.replied(site, reason)
