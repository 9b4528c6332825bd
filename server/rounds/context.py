"""What a method can use in a round: sites to ask, and slots to read and change.

Nothing in a round is valid before the loop commits it. A round that fails leaves no trace.
"""

import contextlib
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

from torch import Tensor

from fedloom.clients.protocol.messages import TRAIN, to_states
from fedloom.clients.protocol.partial_sums import SAMPLES
from fedloom.clients.protocol.reply_checks import Bounds, ReplyError, asked_numbers, check_record, train_numbers
from fedloom.conf.errors import UserError, unknown
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum, ExactSumError, quantise
from fedloom.fusion.state import State
from fedloom.server.ledger.slots import Slots, SlotUpdate
from fedloom.server.rounds.asking import Adding, Content, Round, Transport
from fedloom.server.rounds.channel import RawReply
from fedloom.server.rounds.privacy import refuse_hidden
from fedloom.server.rounds.record_spec import ClientUpdate, RecordSpec
from fedloom.server.rounds.schedules import Participation
from fedloom.server.rounds.view import Setup, own


class RoundContext(Round):
    """One round of a strategy: it asks sites, and reads and changes slots. Reading includes this round's changes."""

    def __init__(self, setup: Setup, slots: Slots, participation: Participation, number: int, transport: Transport) -> None:
        super().__init__(setup, slots, participation, number, transport)
        self._open: list[tuple[str, list[SlotUpdate]]] = []  # the replies that the method has now: site, and what it puts
        self._questions: list[weakref.ref[Iterator[ClientUpdate]]] = []  # whose replies the method reads one by one
        self._abandoned = False  # the round failed: nothing is applied any more
        self._left: list[tuple[str, int]] = []  # questions that the method left early, and the replies until then

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

    def _drop(self, site: Site, reason: str) -> None:
        self._transport.replied(site, reason)
