"""Slots: everything that a method stores durably. What sites put into them can be removed again, exactly.

Each site's contribution is stored separately. For each `Sum`, the exact sum of all contributions is stored, too. Forgetting
a site is a subtraction, and leaves the sum that never contained it. This module knows no method. A method knows nothing of
commits, crashes, digests and requests.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedloom.clients.data.standardise import STATISTICS
from fedloom.conf.errors import UserError
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum, ExactSumError, exact, quantise
from fedloom.fusion.state import State, digest
from fedloom.server.ledger.contributions import Contributions
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.ledger.ledger import Ledger
from fedloom.server.ledger.rows import Contribution


@dataclass(frozen=True)
class SlotUpdate:
    """What one site puts into a slot in a round.

    Attributes:
        slot: The slot's name.
        site: The site's name.
        state: The tensors: floats, or int64 in units of 2**-bits.
        samples: The number of training examples, for weighted sums.
        integers: The state as int64, if it is already known.
    """

    slot: str
    site: str
    state: State
    samples: int = 0
    integers: State | None = None


@dataclass
class RoundSum:
    """The exact sum of what sites put into a slot in one round, and whose contributions it contains."""

    total: ExactSum
    of: dict[str, Contribution | None] = field(default_factory=dict)


class Slots:
    """The slots of one run: sums, the server's states, every site's contribution, and what a round has staged."""

    def __init__(self, declared: Mapping[str, Slot], sites: Sequence[Site], ledger: Ledger, bits: int, history: str) -> None:
        self.declared, self.sites, self.ledger, self.bits, self.history = dict(declared), list(sites), ledger, bits, history
        self.reload()

    def reload(self) -> None:
        """Load the slots of the last committed round, without staged changes."""
        self.contributions = Contributions(self.ledger, self.bits, self.history, list(self.declared))
        forgotten = self.ledger.sites()
        self.members = [site for site in self.sites if not forgotten[site.name]]
        last = self.ledger.last_round()
        states = {name: self.ledger.blobs.get(blob) for name, blob in last.states.items()} if last else {}
        self._totals: dict[str, ExactSum] = {}  # of the current round
        self._of_round: dict[str, RoundSum] = {}  # by slot, of the round in which sites put something last
        self._round = 0  # the number of that round
        self._kept: dict[str, State] = {}
        self.arriving: dict[str, State] = {}  # in STATISTICS, by site: it counts with the site's next contribution
        self.totals = {name: self.empty(name) for name, slot in self.declared.items() if isinstance(slot, Sum)}
        for name, total in self.totals.items():
            if name in states:
                total.merge(states[name], addends=sum(self.weight(name, site) for site in self._names(name)))
        self.kept = {name: state for name, state in states.items() if name not in self.totals}

    def abandon(self) -> None:
        """Drop what was staged since the last commit."""
        self.contributions.abandon()
        self._totals, self._kept, self.arriving, self._of_round = {}, {}, {}, {}

    # Reading: what is committed and what is staged

    @property
    def sums(self) -> list[str]:
        """The names of the method's own sums, without the one of data.standardise."""
        return [name for name in self.totals if name != STATISTICS]

    def total(self, slot: str) -> ExactSum:
        """Return the sum of a slot, with staged changes; the caller must not change it."""
        return self._totals.get(slot) or self.totals[slot]

    def keeps(self) -> dict[str, State]:
        """Return the server's states by name, with staged changes."""
        return {**self.kept, **self._kept}

    def has(self, slot: str, site: str) -> bool:
        """Return whether the site has put something into the slot."""
        return self.contributions.has(site, slot)

    def contribution(self, slot: str, site: str) -> State:
        """Return what the site put into the slot last, as int64 in units of 2**-bits."""
        return self.contributions.load(site, slot)

    def summed(self, slot: str, state: State) -> State:
        """Return the part of a contribution that enters the slot's sum."""
        declared = self._declared(slot)
        return declared.part(state) if isinstance(declared, Sum) else {}

    def _declared(self, slot: str) -> Slot:
        if slot not in self.declared:
            raise KeyError(f"no slot '{slot}' (the strategy's slots() has: {', '.join(self.declared) or 'none'})")
        return self.declared[slot]

    def empty(self, slot: str) -> ExactSum:
        """Return an empty sum for the slot."""
        return ExactSum(self.bits, modular=self.masked(slot))

    def masked(self, slot: str) -> bool:
        """Return whether only the site itself can read what it put into the slot."""
        declared = self._declared(slot)
        return isinstance(declared, Sum) and declared.masked

    def weighted(self, slot: str) -> bool:
        """Return whether contributions to the slot count as often as the site has samples."""
        declared = self._declared(slot)
        return isinstance(declared, Sum) and declared.weighted

    def times(self, slot: str, samples: int) -> int:
        """Return how often a contribution of `samples` samples counts in the slot's sum."""
        return max(1, samples) if self.weighted(slot) else 1

    def sum_of(self, slot: str, names: Iterable[str]) -> ExactSum:
        """Return the sum of these sites' contributions to a slot: that of the last round, or read again and added."""
        of = {name: self.contributions.here(name) for name in names if self.has(slot, name)}
        if (known := self._of_round.get(slot)) and known.of == of:
            return known.total.copy()
        total = ExactSum(self.bits, modular=True)  # in any order, no partial sum overflows
        for name in of:
            total.add(self.summed(slot, self.contribution(slot, name)), self.weight(slot, name))
        return total

    def sum_without(self, slot: str, names: Iterable[str]) -> ExactSum:
        """Return the slot's sum minus the contributions of these sites, in exact integers."""
        rest = self.total(slot).copy()
        for name in names:
            if self.has(slot, name):
                rest.subtract(self.summed(slot, self.contribution(slot, name)), self.weight(slot, name))
        empty = not rest.addends and not any(bool(tensor.any()) for tensor in rest.totals.values())
        return self.empty(slot) if empty else rest  # as if no site had ever put anything

    def base(self, site: str) -> int:
        """Return the round of the site's last contribution, after which its own state is valid; 0 if it has none."""
        contribution = self.contributions.latest.get(site)
        return contribution.round if contribution else 0

    def digest(self) -> dict[str, str]:
        """Return digests of the exact sums by slot and, for a method without sums, of the server's states by name."""
        sums = {name: digest(self.total(name).totals) for name in self.totals}
        return sums if self.sums else sums | {name: digest(exact(state, self.bits)) for name, state in self.keeps().items()}

    # Staging a round

    def put(self, puts: Sequence[SlotUpdate], round: int) -> None:
        """Stage updates, in place of what sites put before. If a sum overflows, raise ExactSumError and change nothing.

        If a site puts twice into a slot, the later state counts. What is `arriving` from these sites is staged with it.
        """
        arriving = [name for name in dict.fromkeys(update.site for update in puts) if self.arrives(name)]
        puts = [*puts, *(SlotUpdate(STATISTICS, name, self.arriving[name]) for name in arriving)]
        puts = list({(update.slot, update.site): update for update in puts}.values())
        samples = {
            site: self._samples([update for update in puts if update.site == site])
            for site in {update.site for update in puts}
        }
        before, sums = dict(self._totals), [update for update in puts if update.slot in self.totals]
        try:
            added = [self._replaced(update, alone=len(sums) == 1) for update in sums]
        except ExactSumError:
            self._totals = before
            raise
        for site in dict.fromkeys(update.site for update in puts):
            mine = [update for update in puts if update.site == site]
            parts = {update.slot: stored(update.state, self.bits) for update in mine}
            self.contributions.stage(site, round, parts, samples[site])
        for update, new in zip(sums, added, strict=True):
            self._count(update, new, round)

    def put_all(self, slot: str, state: State, round: int) -> None:
        """Stage the same state for every site. Raises UserError if a site has already put something into the slot."""
        names = [site.name for site in self.members]
        if any(self.has(slot, name) for name in names):
            raise UserError(f"slot '{slot}': a site has already put something; call put_all once, before that")
        if slot in self.totals:
            self.changing(slot).add(self.summed(slot, exact(stored(state, self.bits), self.bits)), times=len(names))
        self.contributions.stage_all(names, round, {slot: stored(state, self.bits)})

    def merge(
        self, slot: str, change: State, samples: Mapping[str, int], round: int, blobs: Mapping[str, str], node: bool = False,
        new: State | None = None,
    ) -> None:  # fmt: skip
        """Stage a change of a sum by several sites whose contributions are already stored.

        Args:
            slot: The slot's name.
            change: The change of the sum, int64.
            samples: The number of samples, by site.
            round: The round.
            blobs: By site, the digest of the contribution that a worker has stored; without one, its file is read.
            node: Whether a cluster's nodes store them, and not the folder of staged contributions.
            new: The sum of these contributions, int64, if it is known.

        Raises:
            ExactSumError: The sum overflows.
            UserError: A worker's file is missing.
        """
        if not node:
            self.contributions.check_written(samples)
        new_addends = sum(self.times(slot, number) for site, number in samples.items())
        old = sum(self.weight(slot, site) for site in samples if self.has(slot, site))
        total = self.total(slot).copy()
        total.merge(change, addends=new_addends - old)
        self._totals[slot] = total
        for site, number in samples.items():
            if node:
                self.contributions.stage_kept(site, round, number, blobs[site])
            else:
                self.contributions.stage_written(site, round, number, blobs.get(site, ""))
        if new is not None:
            known = self._sum_of_round(slot, round)
            known.total.merge(new, addends=new_addends)
            twice = known.of.keys() & samples.keys()  # what they put first is not at hand any more
            known.of |= {site: None if site in twice else self.contributions.here(site) for site in samples}

    def keep(self, name: str, state: State) -> None:
        """Stage a state of the server under a name, in place of the previous one. ValueError: the name of a slot."""
        if name in self.declared:
            raise ValueError(f"'{name}' is a slot; store the server's state under another name")
        self._kept[name] = state

    def commit(self, round: int, record: dict) -> None:
        """Commit everything that is staged, in one transaction with the round's record."""
        self.contributions.commit(round, self._states(), self.digest(), record)
        self.accept()

    # Changes by a removal (server.ledger.membership)

    def stage(self, totals: Mapping[str, ExactSum]) -> None:
        """Stage these sums, by slot, for the next commit."""
        self._totals = {**self._totals, **totals}

    def write(self) -> dict[str, str]:
        """Write all sums and server's states, with staged changes, as blobs; return their digests by name."""
        return {name: self.ledger.blobs.put(state) for name, state in self._states().items()}

    def accept(self) -> None:
        """Make staged changes the current state, after they were committed."""
        self.totals |= self._totals
        self.kept |= self._kept
        self._totals, self._kept, self.arriving = {}, {}, {}

    # Helpers

    def arrives(self, site: str) -> bool:
        """Return whether sums of data.standardise came from the site in this round and are not staged yet."""
        return site in self.arriving and not self.has(STATISTICS, site)

    def _names(self, slot: str) -> list[str]:
        return [site for site in self.contributions.latest if self.has(slot, site)]

    def weight(self, slot: str, site: str) -> int:
        """Return how often a site's contribution counts in the slot's sum."""
        contribution = self.contributions.here(site)
        return self.times(slot, contribution.samples if contribution else 0)

    def _samples(self, puts: Sequence[SlotUpdate]) -> int:
        """Return the site's number of samples for all weighted slots. Raises ExactSumError if slots differ."""
        site, weighted = puts[0].site, [update for update in puts if self.weighted(update.slot)]
        before = self.contributions.here(site)
        if not weighted:
            keeps = before is not None and any(map(self.weighted, self.declared))
            return before.samples if before is not None and keeps else max(update.samples for update in puts)
        number = weighted[0].samples
        others = {slot for slot in self.declared if self.weighted(slot)} - {update.slot for update in weighted}
        elsewhere = any(before.samples != number and self.has(slot, site) for slot in others) if before else False
        if elsewhere or any(update.samples != number for update in weighted):
            raise ExactSumError(f"{site} must have one number of samples in all weighted slots; put into all at once")
        return number

    def changing(self, slot: str) -> ExactSum:
        """Return the slot's sum that this round may change: a copy of the committed one, made once."""
        if slot not in self._totals:
            self._totals[slot] = self.totals[slot].copy()
        return self._totals[slot]

    def _count(self, update: SlotUpdate, new: State, round: int) -> None:
        """Add what a site put, as integers, to the sum of the round."""
        known = self._sum_of_round(update.slot, round)
        if update.site in known.of:  # it puts twice: its first state is not at hand any more
            known.of[update.site] = None
            return
        known.total.add(new, self.times(update.slot, update.samples))
        known.of[update.site] = self.contributions.here(update.site)

    def _sum_of_round(self, slot: str, round: int) -> RoundSum:
        if round != self._round:
            self._round, self._of_round = round, {}
        return self._of_round.setdefault(slot, RoundSum(ExactSum(self.bits, modular=True)))

    def _replaced(self, update: SlotUpdate, alone: bool) -> State:
        """Put the site's new contribution into the slot's sum, in place if `alone`. Return it as integers."""
        integers = update.integers if update.integers is not None else exact(stored(update.state, self.bits), self.bits)
        new = self.summed(update.slot, integers)
        total, times = self.changing(update.slot), self.times(update.slot, update.samples)
        total = self._totals[update.slot] = total if alone else total.copy()
        if not self.has(update.slot, update.site):
            total.add(new, times)
            return new
        old = self.summed(update.slot, self.contribution(update.slot, update.site))
        before = self.weight(update.slot, update.site)
        total.replace(old, new, before, times)
        return new

    def _states(self) -> dict[str, State]:
        return {**self.keeps(), **{name: self.total(name).totals for name in self.totals}}


def stored(state: State, bits: int) -> State:
    """Return a state in the stored form of contributions: floats unchanged, counters in units of 2**-bits.

    A counter is an integer tensor next to floats, in units of 1.
    """
    if len({tensor.dtype.is_floating_point for tensor in state.values()}) < 2:
        return state
    counters = quantise({name: tensor for name, tensor in state.items() if not tensor.dtype.is_floating_point}, bits)
    return {name: counters.get(name, tensor) for name, tensor in state.items()}
