"""What a method can use in a round: sites to ask, and slots to read and change.

Nothing in a round is valid before the loop commits it. A round that fails leaves no trace.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from flwr.app import RecordDict
from torch import Tensor

from fedloom.clients.protocol.messages import TRAIN, to_states
from fedloom.clients.protocol.partial_sums import SAMPLES, PartialSum
from fedloom.clients.protocol.reply_checks import Bounds, ReplyError, asked_numbers, check_record, train_numbers
from fedloom.clients.protocol.signatures import SIGNED, fingerprint, update_payload, verified_signature
from fedloom.conf.errors import FailedError, UserError, unknown
from fedloom.conf.randomness import generator
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum, ExactSumError, SumOverflowError, quantise
from fedloom.fusion.state import State
from fedloom.server.ledger.slots import Slots, SlotUpdate
from fedloom.server.rounds.channel import RawReply
from fedloom.server.rounds.privacy import refuse_hidden
from fedloom.server.rounds.record_spec import ClientUpdate, RecordSpec
from fedloom.server.rounds.schedules import Participation, Restoration
from fedloom.server.rounds.view import Setup, View, own

Content = Mapping[str, State] | Callable[[Site], Mapping[str, State]]  # states by record name, for all sites or each


class UnorderedError(FailedError):
    """A sum overflowed, and which site is refused depended on the order of arrival. The round begins again, in order."""


class Gathering(Protocol):
    """A question whose replies are added up without being read (server.rounds.secure_aggregation)."""

    def gather(self, kind: str, content: Content, asked: Sequence[Site]) -> dict[str, State]:
        """Send the sites the question `kind` with `content`; return the means over the replies, by record name."""
        ...

    def total(self, kind: str, asked: Sequence[Site], needed: Sequence[str]) -> tuple[State, list[str]]:
        """Send the sites the question `kind`; return the sum of the answers' one record, and the sites of the sum."""
        ...


class Adding(Protocol):
    """Adds up the partial sums that workers send instead of single replies (server.rounds.partial_sums)."""

    def add(self, partial: PartialSum, reply: ClientUpdate) -> None:
        """Add the partial sum that contains a site's reply, unless it is added already. Raises ReplyError."""
        ...

    def fetched(self) -> Iterator[tuple[ClientUpdate, str]]:
        """Fetch and add the sums that nodes store; yield each reply in them, with the reason why it is dropped, or ''."""
        ...


class Transport:
    """How questions reach the sites of a run. This one is that outside of rounds, where no site can be asked.

    Attributes:
        run: The run's id in the sites' stores.
        length: The number of rounds for the sites.
    """

    run: str
    length: int

    def __init__(self) -> None:
        self.run, self.length = "", 0

    def ask(
        self, kind: str, context: "RoundContext", sites: Sequence[Site], content: Content,
        expected: Mapping[str, RecordSpec] | None,
    ) -> Iterator[RawReply]:  # fmt: skip
        """Ask sites a question, and yield the replies.

        Args:
            kind: TRAIN, or the name of a question.
            context: The round.
            sites: The sites to ask.
            content: The records for all sites, or a function from a site to its records.
            expected: The records that workers may add up on the way; None: none.

        Yields:
            Every site's reply, or the reason for its absence.
        """
        raise UserError(f"'{kind}': sites can only be asked in a round")

    def masked(self, context: "RoundContext", expected: Mapping[str, RecordSpec]) -> Gathering:
        """Return a question for secure aggregation, whose replies are added up without being read."""
        raise UserError("sites can only be asked in a round")

    def partials(self, context: "RoundContext", means: dict[str, ExactSum], expected: Mapping[str, RecordSpec]) -> Adding:
        """Return the object that adds workers' partial sums to `means` and to the slots."""
        raise UserError("sites can only be asked in a round")

    def bounds(self, site: Site) -> Bounds:
        """Return the limits that are enforced on what the site sends."""
        return Bounds()

    def images(self, site: Site) -> int:
        """Return how many of the site's training examples count; 0 if unknown."""
        return 0

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        """Return, by enrolled site, what its classes 0, 1, ... stand for; empty if unknown."""
        return {}

    def replied(self, site: Site, reason: str) -> None:
        """Report a site's reply. `reason`: why it is dropped; "" if it counts."""

    def message(self, text: str) -> None:
        """Show the user a message."""

    def overflowed(self, site: Site, error: SumOverflowError) -> None:
        """Raise UnorderedError if the round can begin again with the replies in order, since the site's does not fit."""

    def enough(self, kind: str, context: "RoundContext", replies: int) -> None:
        """Raise TooFewRepliesError if `replies` good replies are too few for a question of this kind."""


class RoundContext(View):
    """One round of a strategy: it asks sites, and reads and changes slots. Reading includes this round's changes."""

    def __init__(self, setup: Setup, slots: Slots, participation: Participation, number: int, transport: Transport) -> None:
        super().__init__(setup, slots)
        self.clipped: dict[str, dict[str, float]] = {}  # by site and record: the size of changes that were scaled back
        self.participants, self.site_round, self.number = participation.sites, participation.round, number
        self._transport = transport
        self.losses: dict[str, float] = {}  # of the sites that report them
        self.replies = 0  # from sites that have trained
        self.epsilon: dict[str, float] = {}  # each site's privacy cost so far, as it reports
        self.signed: dict[str, dict[str, str]] = {}  # the sites' signatures of what they sent
        self.trained: set[str] = set()  # sites that have trained in this round
        self._open: list[tuple[str, list[SlotUpdate]]] = []  # the replies that the method has now: site, and what it puts
        self._questions: list[weakref.ref[Iterator[ClientUpdate]]] = []  # whose replies the method reads one by one
        self._abandoned = False  # the round failed: nothing is applied any more
        self.attempt = ""  # the current attempt of secure aggregation
        self.again = 0  # which draw of the round's batches, for secure aggregation
        self.masked: list[str] = []  # the sites whose masked contributions count
        self.leaving: list[str] = []  # sites to be forgotten: the others remove the masks that they share with them
        self.restoration: Restoration | None = None  # the restoration to which the round belongs
        self.recalibrated = False  # no site trained: they sent statistics of the aggregates
        self.record: dict[str, Any] = {}  # the round's line in metrics.jsonl, once it is committed
        self._left: list[tuple[str, int]] = []  # questions that the method left early, and the replies until then

    def rng(self, purpose: str) -> np.random.Generator:
        """Return a NumPy generator for this round and purpose. It is the same whenever the round is repeated."""
        return generator(self.config.seed, purpose, str(self.number))

    @property
    def length(self) -> int:
        """How many rounds the sites' learning-rate schedule assumes."""
        return self._transport.length

    def images(self, site: Site) -> int:
        """Return how many of a site's training examples count, from the configuration or its report; 0 if unknown."""
        return self._transport.images(site)

    def most_samples(self, site: Site) -> int:
        """Return the largest number of samples that a site may report; 0: any."""
        return self._transport.bounds(site).most_samples

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        """Return, by site, what its classes 0, 1, ... stand for, by the configuration or its report; empty if unknown."""
        return self._transport.class_names(sites)

    def ask(
        self, kind: str, content: Content, expected: Mapping[str, RecordSpec] | Callable[[Site], Mapping[str, RecordSpec]],
        sites: Sequence[Site] | None = None, metrics: Sequence[str] = (), needed: bool = True,
    ) -> Iterator[ClientUpdate]:  # fmt: skip
        """Ask sites a question. Yield the replies that hold what is expected, as they arrive.

        What the method puts during a reply is applied when it asks for the next one, or leaves the question. If a sum
        overflows, nothing of the reply is applied, and the reply is dropped.

        Args:
            kind: the question, such as TRAIN.
            content: the states to send, by record name; or a function of the site.
            expected: what a reply must hold, by record name; or a function of the site.
            sites: the sites to ask; None: the participants.
            metrics: numbers that a reply must have (for TRAIN, loss and samples are always required).
            needed: whether too few replies are an error; otherwise the method continues with those that it has.

        Raises:
            TooFewRepliesError: for fewer replies to TRAIN than federation.min_replies.
        """
        question = self._replies(kind, content, expected, self.participants if sites is None else sites, metrics, needed)
        self._questions.append(weakref.ref(question))
        return question

    def _replies(
        self, kind: str, content: Content, expected: Mapping[str, RecordSpec] | Callable[[Site], Mapping[str, RecordSpec]],
        asked: Sequence[Site], metrics: Sequence[str], needed: bool,
    ) -> Generator[ClientUpdate]:  # fmt: skip
        """Yield the replies of `ask`."""
        replies = 0
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
            self._open.append((reply.site.name, mine))
            try:
                yield reply
            except GeneratorExit:  # the method needs no more replies
                heard = replies + self._apply(kind, reply, mine, left=True)
                self._left += [(kind, heard)] if needed else []
                raise
            finally:
                self._open = [each for each in self._open if each[1] is not mine]
            replies += self._apply(kind, reply, mine)
        if needed:
            self._transport.enough(kind, self, replies)

    def close(self) -> None:
        """End the round, and questions left early. Raises TooFewRepliesError if one of these had too few replies."""
        self._end_questions()
        for kind, replies in self._left:
            self._transport.enough(kind, self, replies)

    def abandon(self) -> None:
        """End the round after a failure: what the method has put during its last replies is not applied, now or later."""
        self._abandoned = True
        self._end_questions()

    def _end_questions(self) -> None:
        """End the questions whose replies the method did not read to the end, although it may still hold them."""
        for question in [question() for question in self._questions]:
            if isinstance(question, Generator):
                question.close()
        self._questions = []

    def _apply(self, kind: str, reply: ClientUpdate, puts: list[SlotUpdate], left: bool = False) -> int:
        """Apply what was put during a reply, or drop the reply if a sum overflows. Return 1 or 0 replies.

        `left`: the method has left the question.
        """
        if self._abandoned:
            return 0
        try:
            self.slots.put(puts, self.number)
        except ExactSumError as error:
            self._drop(reply.site, str(error) if left else self.reason(reply.site, error))
            return 0
        self._accepted(kind, reply)
        return 1

    def gather(
        self, kind: str, content: Content, expected: Mapping[str, RecordSpec], sites: Sequence[Site] | None = None
    ) -> dict[str, State]:
        """Ask sites, put records into their slots (`RecordSpec.slot`), and return the means over replies, by record name.

        With federation.partial_sums, workers add up the records. With federation.secure_aggregation, the server reads only
        the sums.

        Args:
            kind: the question, such as TRAIN.
            content: the states to send, by record name; or a function of the site.
            expected: what a reply must hold, by record name, and where it goes.
            sites: the sites to ask; None: the participants.

        Raises:
            TooFewRepliesError: for fewer replies than federation.min_replies.
        """
        asked, replies = self.participants if sites is None else sites, 0
        if self.config.federation.secure_aggregation:
            return self._transport.masked(self, expected).gather(kind, content, asked)
        means = {record: ExactSum(self.bits) for record, spec in expected.items() if spec.mean}
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
                self._drop(received.site, self.reason(received.site, error))
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
        return {record: total.mean() for record, total in means.items() if total.addends}

    def masked_sum(
        self, kind: str, expected: Mapping[str, RecordSpec], sites: Sequence[Site], needed: Sequence[str] = ()
    ) -> tuple[State, list[str]]:
        """Ask sites a question under masks, and return the sum of their answers, which the server cannot read one by one.

        Args:
            kind: The question.
            expected: The single record that each answer must hold, by its name.
            sites: The sites to ask.
            needed: Sites without which nothing is read.

        Returns:
            (sum, names): the int64 sum of this record over the sites that answered, and their names.

        Raises:
            FailedError: Too few sites answer.
        """
        return self._transport.masked(self, expected).total(kind, sites, needed)

    def message(self, text: str) -> None:
        """Show the user a message."""
        self._transport.message(text)

    def put(self, slot: str, site: Site, state: State, samples: int = 0) -> None:
        """Put the site's contribution, trained on `samples` images, into a slot, in place of its previous one.

        `state`: float tensors, or int64 in units of 2**-bits. Outside of a reply, raises ExactSumError on overflow.
        """
        if slot not in self.slots.declared:
            raise unknown("slot", slot, self.slots.declared)
        if not isinstance(samples, int) or samples < 0:
            raise UserError(f"slot '{slot}': samples of {site.name} must be a whole number from 0, not {samples!r}")
        update = SlotUpdate(slot, site.name, state, samples)
        ours = [puts for name, puts in self._open if name == site.name] or [puts for _, puts in self._open]
        if ours:
            ours[-1].append(update)
        else:
            self.slots.put([update], self.number)

    def put_all(self, slot: str, state: State) -> None:
        """Put the same state into a slot for every site. Raises UserError if a site has already put something into it."""
        self.slots.put_all(slot, state, self.number)

    def save_server_state(self, name: str, state: State) -> None:
        """Store a state of the server, which belongs to no site, in place of the previous one of this name."""
        if not isinstance(state, Mapping) or not all(isinstance(tensor, Tensor) for tensor in state.values()):
            raise UserError(f"save_server_state('{name}', ...): needs a dictionary of tensors, got {type(state).__name__}")
        self.slots.keep(name, own(dict(state)))

    def _checked(
        self, kind: str, received: RawReply, expected: Mapping[str, RecordSpec], metrics: Sequence[str] = ()
    ) -> ClientUpdate:
        """Return the reply if it holds what is expected. Raises ReplyError."""
        if received.content is None:
            raise ReplyError(received.reason)
        site = received.site
        # What is in a worker's sum is in it: the worker has checked it, by the files that it found.
        bounds = self._transport.bounds(site) if received.partial is None else Bounds()
        if kind == TRAIN:
            numbers = train_numbers(received.content, bounds, hidden=bool(self.config.privacy.noise))
            self.keep_signature(site.name, received.content)
        else:
            numbers = asked_numbers(received.content, metrics, bounds)
        try:
            records = to_states(received.content) if expected else {}
        except Exception as error:  # bytes from outside
            raise ReplyError(f"its arrays cannot be read ({error})") from None
        exact: dict[str, State] = {}
        clipped: dict[str, float] = {}
        for record, spec in expected.items():
            integers = None if spec.like is not None else False
            like = spec.start(self.slots, site.name)
            if not spec.whole:
                records.setdefault(record, {})
                like = {name: tensor for name, tensor in like.items() if name in records[record]}
            check_record(record, records.get(record), like, integers)
            bounds.check(record, records[record], like, change=spec.bounded)
            if spec.bounded:
                records[record], moved = bounds.clipped(records[record], like)
                clipped |= {record: moved} if moved else {}
            exact[record] = records[record] if spec.integers else quantise(records[record], self.bits)
            spec.check(records[record])
        return ClientUpdate(site, records, numbers, exact, clipped)

    def _put_all(self, reply: ClientUpdate, expected: Mapping[str, RecordSpec], means: dict[str, ExactSum]) -> None:
        """Add the whole reply to slots and means. If a sum overflows, raise ExactSumError and add nothing."""
        times = {record: reply.samples if expected[record].mean == SAMPLES else 1 for record in means}
        puts = [
            SlotUpdate(spec.slot, reply.site.name, reply[record], reply.samples, reply.integers[record])
            for record, spec in expected.items()
            if spec.slot
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

    def keep_signature(self, site: str, content: RecordDict) -> None:
        """Keep the site's signature of its reply for the round's record. Ignore an invalid one, or one by another key."""
        if SIGNED not in content.config_records:
            return
        payload = update_payload(self._transport.run, site, self.site_round, content)
        signed = verified_signature(content, *payload)
        if signed and fingerprint(signed["key"]) == self._keys.get(site):
            self.signed[site] = {"sha256": str(payload[-1]), **signed}

    def count_training(self, site: str, numbers: Mapping[str, float]) -> None:
        """Count a site as trained in this round, with its loss and privacy cost if `numbers` has them."""
        if "loss" in numbers:
            self.losses[site] = numbers["loss"]
        self.replies += 1
        self.trained.add(site)
        if self.config.privacy.noise and "epsilon" in numbers:
            self.epsilon[site] = numbers["epsilon"]

    def reason(self, site: Site, error: Exception) -> str:
        """Return why a reply is dropped. Raises UnorderedError if the round begins again instead."""
        if isinstance(error, SumOverflowError):
            self._transport.overflowed(site, error)
        return str(error)

    def _drop(self, site: Site, reason: str) -> None:
        self._transport.replied(site, reason)
