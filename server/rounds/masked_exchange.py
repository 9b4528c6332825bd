"""One attempt at a masked sum: the five exchanges between server and sites (Bonawitz et al. 2017, Fig. 4).

The exchanges are: public keys; shares of two secrets, each encrypted for one site; masked contributions; signatures of the
list of sites that count; shares that remove the masks. Every site commits to its shares, so that a wrong share has a
culprit.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedloom.clients.data.standardise import KEY as STANDARDISE
from fedloom.clients.data.standardise import NONE, STATISTICS
from fedloom.clients.privacy.secure_aggregation.primitives import (
    KEY,
    PUBLIC,
    SECRET,
    SIGNATURE,
    PublicKeys,
    agreed,
    counted_words,
    is_signature,
    places,
    share_commitment,
    threshold_of,
)
from fedloom.clients.protocol.messages import (
    BASES,
    BLAMED,
    COMMITMENTS,
    SECURE_CONFIRM,
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_TRAINED,
    SECURE_UNMASK,
    SUMMED_BEFORE,
)
from fedloom.clients.protocol.reply_checks import ReplyError, train_numbers
from fedloom.clients.protocol.signatures import MOST_BYTES
from fedloom.conf.errors import FailedError, UserError, plain
from fedloom.conf.sites import Site
from fedloom.fusion.state import State
from fedloom.server.rounds.asking import Content, Round, Transport
from fedloom.server.rounds.masked_answers import MaskedAnswers, Trained
from fedloom.server.rounds.masked_replies import content_of, read, read_bytes, read_vector, to_tensor
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import MIN_MASKED_SITES

MOST_REASON = 300  # characters of a failure's reason


class SummedElsewhereError(FailedError):
    """Sites refuse because their contribution is in another sum that was read. Other batches may help."""


class WithoutError(FailedError):
    """Some sites' shares are wrong, or they are silent. Without them, the round can begin again.

    `blamed`: the message says what these sites did. Otherwise they are silent.
    """

    def __init__(self, text: str, sites: Collection[str], blamed: bool = False) -> None:
        super().__init__(text)
        self.sites, self.blamed = sorted(sites), blamed


@dataclass
class MaskedExchange:
    """The five exchanges with the sites in one attempt at a masked sum.

    Attributes:
        context: The round.
        transport: Sends the questions.
        expected: The records that a reply must have.
        answers: Receives what the sites send.
        lifts: Returns what a site receives in addition to the method's records.
        check: Raises FailedError if the contributions are not enough. Then no secret is revealed.
    """

    context: Round
    transport: Transport
    expected: Mapping[str, RecordSpec]
    answers: MaskedAnswers
    lifts: Callable[[Site], Mapping[str, State]]
    check: Callable[[], None]
    _failed: str = ""  # the first site that failed, and why
    _shapes: dict[tuple[str, str], Mapping[str, Tensor]] = field(default_factory=dict, init=False)

    def carry_out(self, kind: str, content: Content, asked: Sequence[Site]) -> None:
        """Run the five exchanges. Raises FailedError if too few sites answer."""
        self._keys(asked)
        self._shares(those(asked, self.answers.keys))
        self._contributions(kind, content, those(asked, self.answers.sealed))
        self.check()
        self._confirm(those(asked, self.answers.vectors))
        self._unmask(those(asked, self.answers.signed))

    @property
    def threshold(self) -> int:
        """How many sites must answer each exchange."""
        return max(MIN_MASKED_SITES, threshold_of(self.context.config.federation.secure_threshold, len(self.answers.keys)))

    def like(self, record: str, site: str) -> Mapping[str, Tensor]:
        """Return the names and shapes of a masked record's tensors, as tensors on the meta device."""
        if (record, site) not in self._shapes:
            start = self.expected[record].start(self.context.slots, site)
            self._shapes[record, site] = {name: torch.empty_like(tensor, device="meta") for name, tensor in start.items()}
        return self._shapes[record, site]

    def _keys(self, asked: Sequence[Site]) -> None:
        def take(site: Site, answer: Mapping[str, State]) -> None:
            packed = read_bytes(answer.get(SECURE_KEYS, {}), "keys")
            if not PUBLIC <= len(packed) <= PUBLIC + MOST_BYTES:
                raise ReplyError("its message for secure aggregation cannot be read")
            keys = PublicKeys.read(packed[:PUBLIC])
            _check_keys(keys, self.answers.keys.values())
            self.answers.keys[site.name], self.answers.signatures[site.name] = keys, packed[PUBLIC:]

        self._ask(SECURE_KEYS, asked, {}, take)
        self._enough(SECURE_KEYS, asked, self.answers.keys)

    def _shares(self, asked: Sequence[Site]) -> None:
        def take(site: Site, answer: Mapping[str, State]) -> None:
            others, sealed = self.answers.keys.keys() - {site.name}, answer.get(SECURE_SHARES, {})
            if sealed.keys() != others:
                raise ReplyError("its shares are not for the sites that began the round")
            size = KEY * len(self.answers.keys)
            committed = {kind: read_bytes(answer.get(COMMITMENTS, {}), kind, size) for kind in ("own", "pair")}
            self.answers.sealed[site.name] = {name: read_bytes(sealed, name) for name in sorted(others)}
            self.answers.commitments[site.name] = committed

        signed = {name: keys.packed() + self.answers.signatures[name] for name, keys in self.answers.keys.items()}
        sent = {SECURE_KEYS: {name: to_tensor(content) for name, content in signed.items()}}
        self._ask(SECURE_SHARES, asked, sent, take)
        self._check_blamed(asked)
        self._enough(SECURE_SHARES, asked, self.answers.sealed)

    def _contributions(self, kind: str, content: Content, asked: Sequence[Site]) -> None:
        index, slots = places(self.answers.keys), self.context.slots
        bases = {name: torch.tensor([slots.base(name)]) for name in self.answers.sealed}

        def sent(site: Site) -> Mapping[str, State]:
            at = index[site.name]
            committed = {name: self._commitment(name, "own", at) + self._commitment(name, "pair", at)
                         for name in self.answers.sealed}  # fmt: skip
            shares = {name: to_tensor(sealed[site.name] + committed[name])
                      for name, sealed in self.answers.sealed.items() if name != site.name}  # fmt: skip
            records = content(site) if callable(content) else content
            return {**records, SECURE_SHARES: shares, BASES: bases, **self.lifts(site)}

        for received in self.transport.ask(kind, self.context, asked, sent, self.expected):
            site = received.site
            try:
                states = read(received)
                self._check_blame(site, content_of(received).config_records.get(BLAMED))
                bounds = replace(self.transport.bounds(site), counted=0)  # no weight: each site counts once
                numbers = train_numbers(content_of(received), bounds, hidden=True)
                self.context.keep_signature(site.name, content_of(received))
                trained = Trained.read(self.answers, site.name, states.get(SECURE_TRAINED, {}))
                self.answers.vectors[site.name] = {
                    record: read_vector(states.get(record), record, self.like(record, site.name)) for record in self.expected
                }
            except ReplyError as error:
                self.drop(site, str(error))
                continue
            self.answers.numbers[site.name], self.answers.samples[site.name] = numbers, int(numbers["samples"])
            self.answers.trained[site.name] = trained
        self._check_blamed(asked)
        self._alike(asked)
        self._enough(kind, asked, self.answers.vectors)

    def _alike(self, asked: Sequence[Site]) -> None:
        """Drop sites whose signed training, or starting state, differs from that of most sites with the same base."""
        trained, base = self.answers.trained, self.context.slots.base
        usual = _usual(own.digest for own in trained.values())
        histories = {round: _usual(own.history for name, own in trained.items() if base(name) == round)
                     for round in map(base, trained)}  # fmt: skip
        for site in those(asked, dict(trained)):
            own = trained[site.name]
            if own.digest != usual or own.history != histories[base(site.name)]:
                for answers in (self.answers.trained, self.answers.vectors, self.answers.numbers, self.answers.samples):
                    answers.pop(site.name)
                self.drop(
                    site,
                    "its order, its number of steps (training.steps sets the same for all), or the state that it "
                    "continues from differs from most sites",
                )

    def _check_blame(self, site: Site, record: object) -> None:
        """Note that a site cannot use another one's shares; then raise ReplyError, as it cannot participate."""
        name = record.get("site") if isinstance(record, Mapping) else None
        if isinstance(name, str) and name in self.answers.keys and name != site.name:
            self.answers.blamed.setdefault(name, set()).add(site.name)
            raise ReplyError(f"it cannot use the shares of {name}")

    def _check_blamed(self, asked: Sequence[Site]) -> None:
        """Raise WithoutError if more sites blame a site's shares than can all lie, or if too few are left without them."""
        blamed = self.answers.blamed
        wrong = [name for name, sites in blamed.items() if 3 * len(sites) > len(self.answers.keys)]
        left = {site.name for site in asked} - set().union(*blamed.values())
        if blamed and len(left) < self.threshold:
            wrong = wrong or [max(sorted(blamed), key=lambda name: len(blamed[name]))]  # otherwise too few would be left
        if wrong:
            names = ", ".join(sorted(wrong))
            raise WithoutError(
                f"round {self.context.number}: other sites report that they cannot use the shares of {names}", wrong, True
            )

    def _confirm(self, asked: Sequence[Site]) -> None:
        def take(site: Site, answer: Mapping[str, State]) -> None:
            word = read_bytes(answer.get(SECURE_CONFIRM, {}), "signature", SIGNATURE)
            text = counted_words(self.answers.id, self.answers.trained[site.name].digest.hex(), [*self.answers.vectors])
            if not is_signature(self.answers.keys[site.name].signing, text, word):
                raise ReplyError("its signature of the list of sites is wrong")
            self.answers.signed[site.name] = word

        counts = {name: to_tensor(bytes([name in self.answers.vectors])) for name in self.answers.sealed}
        trained = {name: to_tensor(own.words) for name, own in self.answers.trained.items()}
        self._ask(SECURE_CONFIRM, asked, {SECURE_CONFIRM: counts, SECURE_TRAINED: trained}, take)
        if len(self.answers.signed) < self.threshold and self.answers.refusing:
            ways = (
                f"with {STANDARDISE}={NONE}"
                if STATISTICS in self.expected
                else "with a smaller training.batch, training.schedule=constant, or privacy.noise"
            )
            raise SummedElsewhereError(
                f"round {self.context.number}: the contribution of {self.answers.refusing[0]} is nearly the same as in an "
                "earlier sum of other sites, or of another run. The difference of both sums would reveal single "
                "contributions. Resume when the same "
                f"sites are connected, or start a new run {ways}"
            )
        self._enough(SECURE_CONFIRM, asked, self.answers.signed)

    def _unmask(self, asked: Sequence[Site]) -> None:
        number = places(self.answers.keys)

        def take(site: Site, answer: Mapping[str, State]) -> None:
            shares = answer.get(SECURE_UNMASK, {})
            dealt = {name: read_bytes(shares, name, SECRET) for name in shares.keys() & self.answers.sealed.keys()}
            for name, share in dealt.items():
                if share_commitment(share) != self._commitment(name, self.answers.kind(name), number[site.name]):
                    raise ReplyError(f"its share of {name}'s secret is not the one that {name} dealt")
            self.answers.helped.add(site.name)
            for name, share in dealt.items():
                self.answers.shares.setdefault(name, {})[number[site.name]] = share

        signed = {name: to_tensor(signature) for name, signature in self.answers.signed.items()}
        self._ask(SECURE_UNMASK, asked, {SECURE_UNMASK: signed}, take)

    def _commitment(self, name: str, kind: str, index: int) -> bytes:
        """Return a site's commitment to the share of one of its secrets that the site at this index holds."""
        return self.answers.commitments[name][kind][KEY * (index - 1) : KEY * index]

    def _ask(
        self, kind: str, asked: Sequence[Site], sent: Content, take: Callable[[Site, Mapping[str, State]], None]
    ) -> None:
        """Pass each readable answer to `take`; drop sites with unreadable answers."""
        for received in self.transport.ask(kind, self.context, asked, sent, None):
            try:
                answer = read(received)
                if SUMMED_BEFORE in content_of(received).config_records:
                    if kind not in (SECURE_CONFIRM, SECURE_UNMASK):
                        raise ReplyError(f"it refuses a sum at '{kind}', before the sites of the sum are known")
                    self.answers.refusing.append(received.site.name)
                    continue
                self._check_blame(received.site, content_of(received).config_records.get(BLAMED))
                take(received.site, answer)
            except ReplyError as error:
                self.drop(received.site, str(error))

    def drop(self, site: Site, reason: str) -> None:
        """Report a site's answer as dropped, with the reason."""
        self._failed = self._failed or f" (first failure: {site.name}: {plain(reason)[:MOST_REASON]})"
        self.transport.replied(site, reason)

    def _enough(self, kind: str, asked: Sequence[Site], answers: Collection[str]) -> None:
        if len(answers) < (needed := self.threshold):
            fault = f"{len(answers)} of {len(asked)} sites answered '{kind}', secure aggregation needs {needed}"
            silent = {site.name for site in asked} - {*answers} - set().union(*self.answers.blamed.values())
            raise WithoutError(f"round {self.context.number}: {fault}{self._failed}", silent)


def those(asked: Sequence[Site], names: Mapping[str, object]) -> list[Site]:
    """Return the asked sites whose names are in `names`, in the same order."""
    return [site for site in asked if site.name in names]


def _usual(digests: Iterable[bytes]) -> bytes:
    """Return the most common digest."""
    counts = Counter(digests)
    return max(counts, key=lambda digest: (counts[digest], digest), default=b"")


def _check_keys(keys: PublicKeys, others: Iterable[PublicKeys]) -> None:
    """Raise ReplyError for public keys that are unusable for key agreement, or are another site's."""
    try:
        for public in (keys.channel, keys.pair):
            agreed(bytes(SECRET), public)
    except UserError as error:
        raise ReplyError(str(error)) from None
    if any(keys.pair == other.pair or keys.channel == other.channel for other in others):
        raise ReplyError("its keys are another site's")
