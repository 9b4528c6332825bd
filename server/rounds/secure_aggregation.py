"""Secure aggregation at the server: exact sums of contributions that it cannot read, and that sites can leave again.

It follows Bonawitz et al. 2017, Fig. 4, over the integers modulo 2**64. For each site, the server stores what it sent: its
contribution with pairwise masks, one for each round and each other site that counted in it. One site of a pair adds their
mask and the other subtracts it. Therefore, the stored contributions sum up to S, the exact sum without masks, bit for bit.

To forget site k, all others remove their masks with k from their stored contributions, within the masked sum of an ordinary
round. The stored contribution of k is replaced by zeros. S then lacks exactly the contribution of k. Site k is not asked: it
may be gone, and cannot lie. The server learns the contribution of k plus the sum of the other sites' updates in that round.
"""

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedloom.clients.data.standardise import KEY as STANDARDISE
from fedloom.clients.data.standardise import SITES
from fedloom.clients.privacy.secure_aggregation.primitives import (
    agreed,
    commitment,
    mask,
    public_key,
    rebuilt,
    sign,
    threshold_of,
)
from fedloom.clients.protocol.messages import IDLE, LIFT, TRAIN
from fedloom.clients.protocol.partial_sums import SAMPLES
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State
from fedloom.server.ledger.slots import SlotUpdate
from fedloom.server.rounds.asking import Content, Round, Transport
from fedloom.server.rounds.masked_answers import MaskedAnswers
from fedloom.server.rounds.masked_exchange import MaskedExchange, SummedElsewhereError, WithoutError, those
from fedloom.server.rounds.masked_replies import shaped
from fedloom.server.rounds.masks import partners, rounds_together
from fedloom.server.rounds.record_spec import RecordSpec

MOST_DRAWS = 3  # draws of a round's batches


@dataclass
class SecureAggregation:
    """One question under secure aggregation: the server reads the sum of the replies, and no single reply.

    Attributes:
        context: The round.
        transport: Sends the questions.
        expected: The records that a reply must have.
    """

    context: Round
    transport: Transport
    expected: Mapping[str, RecordSpec]

    def __post_init__(self) -> None:
        if weighted := next((record for record, spec in self.expected.items() if spec.mean == SAMPLES), ""):
            raise UserError(f"federation.secure_aggregation: record '{weighted}' counts by samples, but masked sums count "
                            "each site once; set strategy.weighting=equal")  # fmt: skip
        self._rebuilt: dict[str, bytes] = {}
        self.needed: Sequence[str] = []  # sites without which the sum is not read
        self.together = rounds_together(self.context.ledger) if self.context.leaving else {}
        self.answers = MaskedAnswers("")

    def gather(self, kind: str, content: Content, asked: Sequence[Site]) -> dict[str, State]:
        """Ask the sites, put the masked contributions into slots, and return the means over the replies, by record name.

        The round begins again without sites whose shares are wrong or missing. It begins again with other batches if sites
        refuse to have the same training summed over other sites. If sites leave, the last resort is a round without
        training. Raises FailedError if too few sites answer.
        """
        self._exchange(kind, content, asked)
        means = {record: total.mean() for record, total in self._totals().items()}
        self._put()
        self._sound(means)
        self._count(asked)
        return means

    def total(self, kind: str, asked: Sequence[Site], needed: Sequence[str]) -> tuple[State, list[str]]:
        """Ask the sites; return the sum of their answers, which have one record, and the sites of the sum.

        The round begins again as in `gather`. No sum is read without a `needed` site. Raises FailedError if too few sites
        answer, or refuse the sum. Answers are not stored, so they have no masks in common with leaving sites.
        """
        self.needed, self.together = needed, {}
        self._exchange(kind, {}, asked)
        [total] = self._totals().values()
        return total.totals, sorted(self.answers.vectors)

    def _exchange(self, kind: str, content: Content, asked: Sequence[Site]) -> None:
        """Ask until the masks of all sites that count can be removed, and remove those that do not cancel."""
        draws, needed = 0, threshold_of(self.context.config.federation.secure_threshold, len(asked))
        while True:
            try:
                self._attempt(kind, content, asked)
                for name, vectors in self.answers.vectors.items():
                    self._bare(name, vectors)
                return
            except WithoutError as error:
                for site in (site for site in asked if error.blamed and site.name in error.sites):
                    self.transport.replied(site, str(error))
                asked = [site for site in asked if site.name not in error.sites]
                if len(asked) < needed or not error.sites:  # otherwise liars could exclude one honest site after another
                    raise
                self.transport.message(f"{error}: the round begins again without {', '.join(error.sites)}")
            except SummedElsewhereError:
                if (
                    kind != TRAIN
                    or self.context.again == IDLE
                    or ((draws := draws + 1) >= MOST_DRAWS and not self.context.leaving)
                ):
                    raise
                self.context.again = draws if draws < MOST_DRAWS else IDLE
                how = "with other batches" if draws < MOST_DRAWS else "without training"
                self.transport.message(f"round {self.context.number}: sites refuse this sum, since an earlier sum minus it "
                                       f"would reveal single contributions. The round begins again {how}")  # fmt: skip

    def _attempt(self, kind: str, content: Content, asked: Sequence[Site]) -> None:
        self.answers, self._rebuilt = MaskedAnswers(uuid.uuid4().hex), {}
        self.context.attempt = self.answers.id
        try:
            check = partial(self._check_counted, kind)
            self._talk = MaskedExchange(self.context, self.transport, self.expected, self.answers, self._lifts, check)
            self._talk.carry_out(kind, content, asked)
        finally:
            self.context.attempt = ""

    def _check_counted(self, kind: str) -> None:
        """Raise FailedError if too few sites count, or a site is missing that shares masks with leaving sites."""
        self.transport.enough(kind, self.context, len(self.answers.vectors))
        if missing := [name for name in partners(self.together, self.context.leaving) if name not in self.answers.vectors]:
            number = self.context.number
            raise FailedError(f"round {number}: {missing[0]} did not answer, and only it can remove its masks with "
                              f"{', '.join(self.context.leaving)}; resume when it is connected, or forget it")  # fmt: skip
        if missing := [name for name in self.needed if name not in self.answers.vectors]:
            raise FailedError(f"round {self.context.number}: {missing[0]} did not answer, but {STANDARDISE}={SITES} needs a "
                              "sum over the rest of its cohort; resume when it is connected, or forget it, too")  # fmt: skip

    # The sums

    def _bare(self, name: str, vectors: Mapping[str, Tensor]) -> None:
        """Remove a site's own mask, and the masks that it shares with sites that dropped out, in place."""
        keys, context = self.answers.keys, (self.transport.run, str(self.context.site_round), self.answers.id)
        own = self._secret(name, "its own mask", lambda secret: commitment(secret) == keys[name].own)
        off = [(-1, own)]
        for absent in sorted(self.answers.sealed.keys() - self.answers.vectors.keys()):
            is_pair = partial(_is_pair, keys[absent].pair)
            pair = self._secret(absent, "the masks that it shares with others", is_pair)
            off.append((-sign(name, absent), agreed(pair, keys[name].pair, *context)))
        for record, vector in vectors.items():
            for times, key in off:
                vector.add_(mask(key, record, len(vector)), alpha=times)

    def _secret(self, name: str, purpose: str, right: Callable[[bytes], bool]) -> bytes:
        """Rebuild a site's secret from shares that it dealt.

        Raises WithoutError if they are too few, or do not make its secret.
        """
        if name in self._rebuilt:
            return self._rebuilt[name]
        shares, needed = self.answers.shares.get(name, {}), self._talk.threshold
        if len(shares) < needed:
            fault = f"{name}: {len(shares)} valid shares for {purpose} arrived, but {needed} are needed"
            raise WithoutError(f"round {self.context.number}: {fault}", self.answers.signed.keys() - self.answers.helped)
        secret = rebuilt({index: shares[index] for index in sorted(shares)[:needed]})
        if not right(secret):
            raise WithoutError(
                f"round {self.context.number}: the shares that {name} dealt do not make its secret", [name], True
            )
        return self._rebuilt.setdefault(name, secret)

    def _totals(self) -> dict[str, ExactSum]:
        totals = {}
        for record, spec in self.expected.items():
            if spec.mean:
                total = ExactSum(self.context.bits, modular=True)
                for name, vectors in self.answers.vectors.items():
                    total.merge(shaped(vectors[record], self._talk.like(record, name)), addends=1)
                totals[record] = total
        return totals

    def _put(self) -> None:
        slots, summed = self.context.slots, [(record, spec.slot) for record, spec in self.expected.items() if spec.slot]
        for record, slot in summed:
            for name, vectors in self.answers.vectors.items():
                now = shaped(vectors[record], self._talk.like(record, name))
                if slots.base(name):  # otherwise the stored one is its first contribution, which is not masked
                    before = slots.contribution(slot, name)
                    now = {key: tensor + before[key] for key, tensor in now.items()}
                slots.put([SlotUpdate(slot, name, now, self.answers.samples[name], now)], self.context.number)
            for name in self.context.leaving:
                if slots.has(slot, name):
                    nothing = {key: torch.zeros_like(tensor) for key, tensor in slots.contribution(slot, name).items()}
                    slots.put([SlotUpdate(slot, name, nothing, 0, nothing)], self.context.number)

    def _sound(self, means: Mapping[str, State]) -> None:
        """Raise FailedError if a mean has entries that honest sites cannot cause."""
        federation = self.context.config.federation
        most = 2 * (federation.largest_weight or math.inf)  # sites limit how far they move from what they receive
        totals = {spec.slot: self.context.slots.total(spec.slot).mean() for spec in self.expected.values() if spec.slot}
        for record, state in {**means, **totals}.items():
            for name, tensor in state.items():
                if tensor.numel() and not float(tensor.abs().max()) <= most:
                    where = f"round {self.context.number}: the mean of '{record}', tensor '{name}'"
                    raise FailedError(f"{where}, is beyond twice federation.largest_weight ({most:.5g}): a site sent "
                                      "something other than a contribution. Nothing of the round counts. The masks hide "
                                      "which site it was")  # fmt: skip

    def _count(self, asked: Sequence[Site]) -> None:
        """Count the sites that participated."""
        for name, numbers in self.answers.numbers.items():
            self.context.count_training(name, numbers)
        self.context.masked = sorted(self.answers.vectors)
        for site in those(asked, self.answers.vectors):
            self.transport.replied(site, "")

    # Sites that leave

    def _lifts(self, site: Site) -> dict[str, State]:
        """Return the rounds whose masks this site shares with leaving sites."""
        rounds = {leaving: self.together.get(frozenset((leaving, site.name)), []) for leaving in self.context.leaving}
        shared = {leaving: torch.tensor(numbers, dtype=torch.int64) for leaving, numbers in rounds.items()}
        return {LIFT: shared} if shared else {}


def _is_pair(public: bytes, seed: bytes) -> bool:
    return public_key(seed) == public
