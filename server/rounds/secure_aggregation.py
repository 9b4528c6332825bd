"""Secure aggregation at the server: exact sums over sites none of whose contributions it can read, and that can forget.

Bonawitz et al. 2017, Fig. 4, over the integers modulo 2**64. Of each site the server keeps what it sent: its contribution
under the masks that it has in common with others, one term for each round and each other site that both counted in. One of
two sites adds their mask and the other subtracts it, so the kept contributions sum up to S, the exact sum of what is under
the masks, bit for bit.

To forget site k, all others take their masks with k out of what is kept of them, within the masked sum of an ordinary
round; what is kept of k is replaced by nothing. S has lost exactly the contribution of k, and k was not asked: it may be
gone, and cannot lie. The server learns what k gave up to the sum of the others' updates of that round.
"""

import itertools
import math
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clients.identity import MOST_BYTES
from clients.messages import LIFT, SECURE_KEYS, SECURE_SHARES, SECURE_UNMASK
from clients.partial import SAMPLES
from clients.replies import ReplyError, train_numbers
from clients.secure_aggregation.primitives import (
    KEY,
    SECRET,
    agreed,
    commitment,
    mask,
    places,
    public_key,
    rebuilt,
    sign,
    threshold_of,
)
from conf.errors import FailedError, UserError, plain
from conf.sites import Site
from fusion.exact import ExactSum, State
from server.ledger.slots import Put
from server.rounds.masked_replies import content_of, read, read_bytes, read_vector, shaped, to_tensor
from server.rounds.masks import partners, rounds_together
from server.rounds.schedules import FEWEST_MASKED

if TYPE_CHECKING:
    from server.rounds.expected import Expected
    from server.rounds.run import Content, Exchange, Run

MOST_TRIES = 500  # subsets of shares, if some are wrong
MOST_REASON = 300  # characters of why a site failed


@dataclass
class _Heard:
    """What sites have said in one attempt, by name. `keys`: two public keys and a commitment, 96 bytes; `signatures` of them
    are for the other sites.
    """

    id: str
    keys: dict[str, bytes] = field(default_factory=dict)
    signatures: dict[str, bytes] = field(default_factory=dict)
    sealed: dict[str, dict[str, bytes]] = field(default_factory=dict)  # by sender and receiver
    samples: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, dict[str, float]] = field(default_factory=dict)  # its loss, and more
    vectors: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by site and record
    shares: dict[str, dict[int, bytes]] = field(default_factory=dict)  # of one of its secrets, by place


@dataclass
class SecureAggregation:
    """One question whose replies are added up without being read. It takes four exchanges."""

    run: "Run"
    exchange: "Exchange"
    expected: "Mapping[str, Expected]"

    def __post_init__(self) -> None:
        self._rebuilt: dict[str, bytes] = {}
        self.together = rounds_together(self.run.ledger) if self.run.leaving else {}
        self.heard = _Heard(uuid.uuid4().hex)
        self._failed = ""  # the first site that did, and why

    def gather(self, kind: str, content: "Content", asked: Sequence[Site]) -> dict[str, State]:
        """Ask; put every sum where it goes; the means over the replies, by record name. FailedError if too few answer."""
        self.run.attempt = self.heard.id
        try:
            self._keys(asked)
            self._shares(self._those(asked, self.heard.keys))
            self._contributions(kind, content, self._those(asked, self.heard.sealed))
            self._unmask(self._those(asked, self.heard.vectors))
        finally:
            self.run.attempt = ""
        for name, vectors in self.heard.vectors.items():
            self._bare(name, vectors)
        means = self._means()
        self._put()
        self._sound(means)
        self._count(asked)
        return means

    # The four questions

    def _keys(self, asked: Sequence[Site]) -> None:
        def take(site: Site, answer: State) -> None:
            given = read_bytes(answer, "keys")
            if not 3 * KEY <= len(given) <= 3 * KEY + MOST_BYTES:
                raise ReplyError("its part of secure aggregation cannot be read")
            _check_keys(given, self.heard.keys.values())
            self.heard.keys[site.name], self.heard.signatures[site.name] = given[: 3 * KEY], given[3 * KEY :]

        self._ask(SECURE_KEYS, asked, {}, take)
        self._enough(SECURE_KEYS, asked, self.heard.keys)

    def _shares(self, asked: Sequence[Site]) -> None:
        def take(site: Site, answer: State) -> None:
            others = self.heard.keys.keys() - {site.name}
            if answer.keys() != others:
                raise ReplyError("its shares are not for those that began the round")
            self.heard.sealed[site.name] = {name: read_bytes(answer, name) for name in sorted(others)}

        signed = {name: one + self.heard.signatures[name] for name, one in self.heard.keys.items()}
        sent = {SECURE_KEYS: {name: to_tensor(one) for name, one in signed.items()}}
        self._ask(SECURE_SHARES, asked, sent, take)
        self._enough(SECURE_SHARES, asked, self.heard.sealed)

    def _contributions(self, kind: str, content: "Content", asked: Sequence[Site]) -> None:
        def sent(site: Site) -> Mapping[str, State]:
            shares = {name: to_tensor(one[site.name]) for name, one in self.heard.sealed.items() if name != site.name}
            given = content(site) if callable(content) else content
            return {**given, SECURE_SHARES: shares, **self._lifts(site)}

        for received in self.exchange.ask(kind, self.run, asked, sent, self.expected):
            site = received.site
            try:
                states = read(received)
                numbers = train_numbers(content_of(received), self.exchange.bounds(site))
                self.run.countersigned(site.name, content_of(received))
                self.heard.vectors[site.name] = {
                    record: read_vector(states.get(record), record, self._like(record, site.name))
                    for record in self.expected
                }
            except ReplyError as error:
                self._drop(site, str(error))
                continue
            self.heard.numbers[site.name], self.heard.samples[site.name] = numbers, int(numbers["samples"])
        self._enough(kind, asked, self.heard.vectors)
        if missing := [name for name in partners(self.together, self.run.leaving) if name not in self.heard.vectors]:
            raise FailedError(f"round {self.run.number}: {missing[0]} did not answer, and it alone can take out its masks "
                              f"in common with {', '.join(self.run.leaving)}; resume when it is there, or forget it, too"
                              )  # fmt: skip

    def _unmask(self, asked: Sequence[Site]) -> None:
        number = places(self.heard.keys)
        counts = {name: to_tensor(bytes([name in self.heard.vectors])) for name in self.heard.sealed}

        def take(site: Site, answer: State) -> None:
            given = {name: read_bytes(answer, name, SECRET) for name in answer.keys() & counts.keys()}
            for name, share in given.items():
                self.heard.shares.setdefault(name, {})[number[site.name]] = share

        self._ask(SECURE_UNMASK, asked, {SECURE_UNMASK: counts}, take)

    def _ask(self, kind: str, asked: Sequence[Site], sent: "Content", take: Callable[[Site, State], None]) -> None:
        """Have each readable answer taken in; sites whose answer is not are dropped."""
        for received in self.exchange.ask(kind, self.run, asked, sent, None):
            try:
                take(received.site, read(received).get(kind, {}))
            except ReplyError as error:
                self._drop(received.site, str(error))

    def _drop(self, site: Site, reason: str) -> None:
        self._failed = self._failed or f" (first failure: {site.name}: {plain(reason)[:MOST_REASON]})"
        self.exchange.replied(site, reason)

    def _enough(self, kind: str, asked: Sequence[Site], answers: Collection[str]) -> None:
        if len(answers) < (needed := self._threshold()):
            told = f"{len(answers)} of {len(asked)} sites answered '{kind}', secure aggregation needs {needed}"
            raise FailedError(f"round {self.run.number}: {told}{self._failed}")

    def _threshold(self) -> int:
        return max(FEWEST_MASKED, threshold_of(self.run.config.federation.secure_threshold, len(self.heard.keys)))

    # What comes of it

    def _bare(self, name: str, vectors: Mapping[str, Tensor]) -> None:
        """Take a site's own mask off, and those that it has in common with sites that dropped out, in place."""
        keys, words = self.heard.keys, (self.exchange.run, str(self.run.site_round), self.heard.id)
        own = self._secret(name, "its own mask", lambda secret: commitment(secret) == keys[name][2 * KEY :])
        off = [(-1, own)]
        for gone in sorted(self.heard.sealed.keys() - self.heard.vectors.keys()):
            is_pair = partial(_is_pair, keys[gone][KEY : 2 * KEY])
            pair = self._secret(gone, "what it had in common with others", is_pair)
            off.append((-sign(name, gone), agreed(pair, keys[name][KEY : 2 * KEY], *words)))
        for record, vector in vectors.items():
            for times, key in off:
                vector += times * mask(key, record, len(vector))

    def _secret(self, name: str, what: str, right: Callable[[bytes], bool]) -> bytes:
        """A site's secret, from shares of it. Some may be wrong: subsets are tried. FailedError if none is right."""
        if name in self._rebuilt:
            return self._rebuilt[name]
        shares, needed = self.heard.shares.get(name, {}), self._threshold()
        for chosen in itertools.islice(itertools.combinations(sorted(shares), needed), MOST_TRIES):
            secret = rebuilt({place: shares[place] for place in chosen})
            if right(secret):
                return self._rebuilt.setdefault(name, secret)
        raise FailedError(f"round {self.run.number}: {what} cannot be taken off for {name}: {len(shares)} shares, of which "
                          f"{needed} must be right; go on with 'fedloom resume', which tries the round again")  # fmt: skip

    def _means(self) -> dict[str, State]:
        found = {}
        for record, one in self.expected.items():
            if one.mean:
                total = ExactSum(self.run.bits, modular=True)
                for name, vectors in self.heard.vectors.items():
                    times = self.heard.samples[name] if one.mean == SAMPLES else 1
                    total.merge(shaped(vectors[record], self._like(record, name)), addends=times)
                found[record] = total.mean()
        return found

    def _put(self) -> None:
        slots, summed = self.run.slots, [(record, one.slot) for record, one in self.expected.items() if one.slot]
        for record, slot in summed:
            puts = []
            for name, vectors in self.heard.vectors.items():
                now = shaped(vectors[record], self._like(record, name))
                if slots.base(name):  # else what is kept is its first contribution, which is not masked
                    before = slots.contribution(slot, name)
                    now = {key: tensor + before[key] for key, tensor in now.items()}
                puts.append(Put(slot, name, now, self.heard.samples[name], now))
            for name in self.run.leaving:
                if slots.has(slot, name):
                    nothing = {key: torch.zeros_like(tensor) for key, tensor in slots.contribution(slot, name).items()}
                    puts.append(Put(slot, name, nothing, 0, nothing))
            slots.put(puts, self.run.number)

    def _sound(self, means: Mapping[str, State]) -> None:
        """FailedError if a mean has entries that no honest sites give: one of them sent what is no masked contribution."""
        most = self.run.config.federation.largest_weight or math.inf
        totals = {one.slot: self.run.slots.total(one.slot).mean() for one in self.expected.values() if one.slot}
        for record, state in {**means, **totals}.items():
            for name, tensor in state.items():
                if tensor.numel() and not float(tensor.abs().max()) <= most:
                    raise FailedError(f"round {self.run.number}: the mean of '{record}', tensor '{name}', is beyond "
                                      f"federation.largest_weight={most:g}: a site sent what is no contribution. Nothing "
                                      "of the round counts; under masks nobody can tell which site it was")  # fmt: skip

    def _count(self, asked: Sequence[Site]) -> None:
        """Note who took part."""
        for name, numbers in self.heard.numbers.items():
            self.run.took(name, numbers)
        self.run.masked = sorted(self.heard.vectors)
        for site in self._those(asked, self.heard.vectors):
            self.exchange.replied(site, "")

    def _like(self, record: str, site: str) -> Mapping[str, Tensor]:
        """The names and shapes of what is under a record's masks."""
        return self.expected[record].start(self.run.slots, site)

    # Sites that leave

    def _lifts(self, site: Site) -> dict[str, State]:
        """Of the sites that leave, the rounds whose masks this one has in common with them."""
        rounds = {gone: self.together.get(frozenset((gone, site.name)), []) for gone in self.run.leaving}
        return {LIFT: {gone: torch.tensor(one) for gone, one in rounds.items() if one}} if any(rounds.values()) else {}

    @staticmethod
    def _those(asked: Sequence[Site], names: Mapping[str, object]) -> list[Site]:
        return [site for site in asked if site.name in names]


def _check_keys(given: bytes, others: Iterable[bytes]) -> None:
    """ReplyError for public keys with which no other site could agree on anything, and for those of another site."""
    try:
        for public in (given[:KEY], given[KEY : 2 * KEY]):
            agreed(bytes(SECRET), public)
    except UserError as error:
        raise ReplyError(str(error)) from None
    if given[: 3 * KEY] in others:
        raise ReplyError("its keys are another site's")


def _is_pair(public: bytes, seed: bytes) -> bool:
    return public_key(seed) == public
