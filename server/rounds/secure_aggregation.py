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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from flwr.app import RecordDict
from torch import Tensor

from clients.identity import MOST_BYTES
from clients.messages import LIFT, MASKED, SECURE_KEYS, SECURE_SHARES, SECURE_UNMASK, to_states
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
from conf.errors import FailedError
from conf.sites import Site
from fusion.exact import ExactSum, State
from server.ledger import Ledger
from server.ledger.slots import Put

if TYPE_CHECKING:
    from server.rounds.exchange import Reply
    from server.rounds.run import Content, Exchange, Expected, Run

MOST_SEALED = 256  # bytes of a share that is sealed
MOST_TRIES = 500  # subsets of shares, if some are wrong
RECORD = "masked"  # of a round's record in the ledger: which sites' masks are in what is kept of each other


_Masked = tuple[int, int, set[str]]  # a round: its number, the sites' number of it, the sites that count


def _without(rounds: Sequence[_Masked], gone: Sequence[str]) -> list[_Masked]:
    return [(number, at, sites - set(gone)) for number, at, sites in rounds]


def partners(together: Mapping[frozenset[str], object], leaving: Sequence[str]) -> list[str]:
    """The sites that stay and have masks in common with those that leave."""
    others = {name for pair in together if pair & set(leaving) for name in pair}
    return sorted(others - set(leaving))


def rounds_together(ledger: Ledger) -> dict[frozenset[str], list[int]]:
    """By two sites, the sites' rounds of which what is kept of both holds their common mask; forgotten sites are in none."""
    rounds: list[_Masked] = []
    for event in ledger.events():
        if event.kind == "round" and (record := (event.body.get("record") or {}).get(RECORD)):
            rounds = _without(rounds, record["lifted"])
            rounds.append((event.body["round"], record["round"], set(record["sites"])))
        elif event.kind == "rolled back":
            rounds = [one for one in rounds if one[0] <= event.body["round"]]
        elif event.kind == "forgotten":
            rounds = _without(rounds, event.body["sites"])
    found: dict[frozenset[str], list[int]] = {}
    for _, at, sites in rounds:
        for pair in itertools.combinations(sorted(sites), 2):
            found.setdefault(frozenset(pair), []).append(at)
    return found


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
            given = _bytes(answer, "keys")
            if not 3 * KEY <= len(given) <= 3 * KEY + MOST_BYTES:
                raise ReplyError("its part of secure aggregation cannot be read")
            self.heard.keys[site.name], self.heard.signatures[site.name] = given[: 3 * KEY], given[3 * KEY :]

        self._ask(SECURE_KEYS, asked, {}, take)
        self._enough(SECURE_KEYS, len(self.heard.keys))

    def _shares(self, asked: Sequence[Site]) -> None:
        def take(site: Site, answer: State) -> None:
            others = self.heard.keys.keys() - {site.name}
            if answer.keys() != others:
                raise ReplyError("its shares are not for those that began the round")
            self.heard.sealed[site.name] = {name: _bytes(answer, name) for name in sorted(others)}

        signed = {name: one + self.heard.signatures[name] for name, one in self.heard.keys.items()}
        sent = {SECURE_KEYS: {name: _tensor(one) for name, one in signed.items()}}
        self._ask(SECURE_SHARES, asked, sent, take)
        self._enough(SECURE_SHARES, len(self.heard.sealed))

    def _contributions(self, kind: str, content: "Content", asked: Sequence[Site]) -> None:
        def sent(site: Site) -> Mapping[str, State]:
            shares = {name: _tensor(one[site.name]) for name, one in self.heard.sealed.items() if name != site.name}
            given = content(site) if callable(content) else content
            return {**given, SECURE_SHARES: shares, **self._lifts(site)}

        for received in self.exchange.ask(kind, self.run, asked, sent, self.expected):
            site = received.site
            try:
                states = _read(received)
                numbers = train_numbers(_content(received), self.exchange.bounds(site))
                self.run.countersigned(site.name, _content(received))
                self.heard.vectors[site.name] = {
                    record: _vector(states.get(record), record, self._like(record, site.name)) for record in self.expected
                }
            except ReplyError as error:
                self.exchange.replied(site, str(error))
                continue
            self.heard.numbers[site.name], self.heard.samples[site.name] = numbers, int(numbers["samples"])
        self._enough(kind, len(self.heard.vectors))
        if missing := [name for name in partners(self.together, self.run.leaving) if name not in self.heard.vectors]:
            raise FailedError(f"round {self.run.number}: {missing[0]} did not answer, and it alone can take out its masks "
                              f"in common with {', '.join(self.run.leaving)}; resume when it is there, or forget it, too"
                              )  # fmt: skip

    def _unmask(self, asked: Sequence[Site]) -> None:
        number = places(self.heard.keys)
        counts = {name: _tensor(bytes([name in self.heard.vectors])) for name in self.heard.sealed}

        def take(site: Site, answer: State) -> None:
            given = {name: _bytes(answer, name, SECRET) for name in answer.keys() & counts.keys()}
            for name, share in given.items():
                self.heard.shares.setdefault(name, {})[number[site.name]] = share

        self._ask(SECURE_UNMASK, asked, {SECURE_UNMASK: counts}, take)

    def _ask(self, kind: str, asked: Sequence[Site], sent: "Content", take: Callable[[Site, State], None]) -> None:
        """Have each readable answer taken in; sites whose answer is not are dropped."""
        for received in self.exchange.ask(kind, self.run, asked, sent, None):
            try:
                take(received.site, _read(received).get(kind, {}))
            except ReplyError as error:
                self.exchange.replied(received.site, str(error))

    def _enough(self, kind: str, answers: int) -> None:
        needed = self._threshold()
        if answers < needed:
            self.exchange.enough(kind, self.run, 0)  # names the first that failed, if one did
            raise FailedError(
                f"round {self.run.number}: {answers} sites answered '{kind}', secure aggregation needs {needed}"
            )

    def _threshold(self) -> int:
        return max(2, threshold_of(self.run.config.federation.secure_threshold, len(self.heard.keys)))

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
                    total.merge(_shaped(vectors[record], self._like(record, name)), addends=times)
                found[record] = total.mean()
        return found

    def _put(self) -> None:
        slots, summed = self.run.slots, [(record, one.slot) for record, one in self.expected.items() if one.slot]
        for record, slot in summed:
            puts = []
            for name, vectors in self.heard.vectors.items():
                now = _shaped(vectors[record], self._like(record, name))
                if slots.base(name):  # else what is kept is its first contribution, which is not masked
                    before = slots.contribution(slot, name)
                    now = {key: tensor + before[key] for key, tensor in now.items()}
                puts.append(Put(slot, name, now, self.heard.samples[name], now))
            for name in self.run.leaving:
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
        one = self.expected[record]
        return one.like if one.like is not None else self.run.slots.contribution(one.slot, site)

    # Sites that leave

    def _lifts(self, site: Site) -> dict[str, State]:
        """Of the sites that leave, the rounds whose masks this one has in common with them."""
        rounds = {gone: self.together.get(frozenset((gone, site.name)), []) for gone in self.run.leaving}
        return {LIFT: {gone: torch.tensor(one) for gone, one in rounds.items() if one}} if any(rounds.values()) else {}

    @staticmethod
    def _those(asked: Sequence[Site], names: Mapping[str, object]) -> list[Site]:
        return [site for site in asked if site.name in names]


def _is_pair(public: bytes, seed: bytes) -> bool:
    return public_key(seed) == public


def _content(received: "Reply") -> RecordDict:
    """What a site has answered. ReplyError if it has not."""
    if received.content is None:
        raise ReplyError(received.reason)
    return received.content


def _read(received: "Reply") -> dict[str, State]:
    content = _content(received)
    try:
        return to_states(content)
    except Exception as error:  # bytes from outside: NumPy raises EOFError, BadZipFile and more
        raise ReplyError(f"its arrays cannot be read ({error})") from None


def _bytes(state: State, name: str, size: int = 0) -> bytes:
    """The bytes under a name. ReplyError for what is none, or of another size."""
    one = state.get(name)
    good = (
        one is not None
        and one.dtype == torch.uint8
        and one.ndim == 1
        and len(one) in ((size,) if size else range(MOST_SEALED))
    )
    if one is None or not good:
        raise ReplyError("its part of secure aggregation cannot be read")
    return bytes(one.numpy())


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _vector(state: State | None, record: str, like: Mapping[str, Tensor]) -> Tensor:
    """A masked record: int64, as long as what is under it. ReplyError for anything else."""
    size = sum(tensor.numel() for tensor in like.values())
    vector = (state or {}).get(MASKED)
    if vector is None or len(state or {}) != 1 or vector.dtype != torch.int64 or vector.shape != (size,):
        raise ReplyError(f"record '{record}' is no masked vector of {size} whole numbers")
    return vector.clone()


def _shaped(vector: Tensor, like: Mapping[str, Tensor]) -> State:
    """The inverse of clients.secure_aggregation.site.flat, for the shapes of `like`."""
    names = sorted(like)
    parts = vector.split([like[name].numel() for name in names])
    return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}
