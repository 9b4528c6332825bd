"""Sum aggregation at the server: S = N_1 + ... + N_n in exact integers, and forgetting by subtraction.

Every site of the roster is in the sum from the start, with its initial network; a reply replaces the site's old
contribution by its new one. S is thus the sum of what `contributions` holds (and of initial networks), at any time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import ArrayRecord

from clients.initial import initial_state
from clients.messages import MEAN, ROUND, SITE, STAR, SUBSET, to_arrays
from clients.objectives.modes import EXTRACTOR, HEAD, Mode, mode_of
from clients.randomness import generator
from conf.errors import UserError, unknown
from conf.sites import Site
from conf.typed import value
from fusion.exact import ExactSum, ExactSumError, State, dequantise, digest, quantise
from server.contributions import Contributions
from server.ledger import Contribution
from server.strategies.base import STRATEGIES, Aggregation, ReplyError, Setup, Strategy, check_record


@STRATEGIES.register("sum_aggregation")
@dataclass(frozen=True)
class SumAggregationStrategy(Strategy):
    """Options of the server's side."""

    subsets: int = value(16, "most leave-one-out means sent per round (if objective.subset_probability > 0)", low=1)
    weighting: str = value("equal", "of the replies in round averages (head, N*, fedavg)", choices=("equal", "samples"))

    def start(self, setup: Setup) -> Aggregation:
        """Begin a run with S_0, the sum of the sites' initial networks."""
        return SumAggregate(self, setup)


class SumAggregate(Aggregation):
    """The running sum S, the round's averages, and each site's contribution on disk."""

    def __init__(self, strategy: SumAggregationStrategy, setup: Setup) -> None:
        self.strategy, self.setup, self.config = strategy, setup, setup.config
        options = self.config.objective
        self.mode: Mode = mode_of(self.config)
        self.own_initial = options.get("initialisation", "shared") == "own"
        self.bits = self.config.federation.scale_bits
        self.ledger = setup.opened()
        self.contributions = Contributions(self.ledger, self.bits, self.config.federation.history)
        self.initial = quantise(initial_state(self.config), self.bits)
        self.sum = ExactSum(self.bits)
        forgotten = self.ledger.sites()
        self._members = [site for site in self.setup.sites if not forgotten[site.name]]
        last = self.ledger.last_round()
        if last is None:
            self._begin()
        else:
            self._restore(last.states)
        self._open()

    def members(self) -> list[Site]:
        return self._members

    def records(self, round: int) -> dict[str, ArrayRecord]:
        state = {**self._mean_state(), **_part(self.shared, HEAD)}
        records = {MEAN: to_arrays(state)}
        if self.mode.star:
            records[STAR] = to_arrays(_part(self.shared, EXTRACTOR))
        return records | self._leave_one_out(round)

    def base(self, site: Site) -> int:
        return self.contributions.latest[site.name].round if self.mode.sums else 0

    def fold(self, site: Site, round: int, records: dict[str, State], samples: int) -> None:
        check_record(ROUND, records.get(ROUND), _shapes(self.shared))
        if self.mode.sums:
            check_record(SITE, records.get(SITE), _shapes(self.mode.site_part(self.initial)))
        try:
            average = quantise(records[ROUND], self.bits)
            mine = quantise(records[SITE], self.bits) if self.mode.sums else {}
            round_sum = self._round_sum.copy()  # if one of the two sums cannot take the reply, neither does
            round_sum.add(average, times=samples if self.strategy.weighting == "samples" else 1)
            if self.mode.sums:
                old = self.mode.summed_part(self.contribution(site.name))
                self._next.replace(old, self.mode.summed_part(mine))
            self._round_sum = round_sum
        except ExactSumError as error:
            raise ReplyError(str(error)) from None
        if self.mode.sums:
            self.contributions.stage(site.name, round, mine, samples)

    def staging(self) -> str:
        return str(self.contributions.staging.resolve())

    def before(self, site: Site) -> str:
        return str(self.contributions.file(site.name).resolve()) if self.mode.sums else ""

    def restart(self, site: Site) -> State | None:
        return dequantise(self.contributions.load(site.name), self.bits) if self.mode.sums else None

    def fold_partial(self, site: Site, round: int, records: dict[str, State], addends: int, samples: int) -> None:
        try:
            if addends:
                check_record(ROUND, records.get(ROUND), _shapes(self.shared), integers=True)
                if self.mode.sums:
                    check_record(SITE, records.get(SITE), _shapes(self.sum.totals), integers=True)
                round_sum = self._round_sum.copy()
                round_sum.merge(records[ROUND], addends)
                if self.mode.sums:
                    self._next.merge(records[SITE], addends=0)
                self._round_sum = round_sum
            if self.mode.sums:
                self.contributions.stage_written(site.name, round, samples)
        except ExactSumError as error:
            raise ReplyError(str(error)) from None

    def commit(self, round: int, record: dict[str, Any]) -> None:
        self.shared = self._round_sum.mean()
        self.sum = self._next
        self.contributions.commit(round, self._states(), self.digest(), record)
        self._open()

    def forget(self, names: Sequence[str], body: dict[str, Any], request: str | None = None) -> None:
        if not self.mode.sums:
            raise UserError(
                f"mode {self.config.objective['mode']}: no site's part can be subtracted; train again without it"
            )
        if len(names) >= len(self.members()):
            raise UserError("no site would be left: delete the run's folder instead")
        rest = self.sum_without(list(names))
        self.ledger.forget(names, self._blobs(rest), {"sum": digest(rest.totals)}, body, request)
        for name in names:
            del self.contributions.latest[name]
        self._changed(rest, [site for site in self._members if site.name not in names])

    def roll_back(self, names: Sequence[str]) -> None:
        """Go back to the round before the first of these sites took part. LedgerError if that is not kept."""
        rounds = [one.round for name in names for one in self.ledger.history(name) if one.round > 0]
        if not rounds:
            return
        self.ledger.roll_back(min(rounds) - 1, names)
        self.sum = ExactSum(self.bits)
        self.contributions = Contributions(self.ledger, self.bits, self.config.federation.history)
        self._restore(self.ledger.rounds()[-1].states)
        self._open()

    def readmit(self, names: Sequence[str]) -> None:
        """Let forgotten sites take part again, from their initial networks on. UserError if they are not forgotten."""
        total, back = self.sum.copy(), {}
        for name in names:
            initial = self._initial(name)
            total.add(self.mode.summed_part(initial))
            back[name] = Contribution(self.ledger.blobs.put(initial), 0, 0, self.bits)
        self.ledger.readmit(names, back, self._blobs(total), {"sum": digest(total.totals)})
        self.contributions.latest |= back
        self._changed(total, [site for site in self.setup.sites if site in self._members or site.name in names])

    def abandon(self) -> None:
        self.contributions.abandon()
        self._open()

    def aggregate(self) -> State:
        return self._network(self.sum)

    def row(self) -> str:
        return self.mode.row

    def extra(self) -> dict[str, State]:
        return {"star": self.shared} if self.mode.star else {}

    def reversed(self) -> State | None:
        names = [site.name for site in self.members()]
        return self._network(self._sum_of(names[::-1])) if self.mode.sums else None

    def site(self, name: str) -> State | None:
        if not self.mode.sums:
            return None
        own = dequantise(self.contribution(name), self.bits)
        return {**_part(self.shared, HEAD), **own}

    def without(self, names: list[str]) -> State | None:
        if not self.mode.sums or len(self.members()) <= len(names):
            return None
        return self._network(self.sum_without(names))

    def sum_without(self, names: list[str]) -> ExactSum:
        """S minus the contributions of these sites, in exact integers. UserError for a name that is unknown or repeated."""
        known = [site.name for site in self.members()]
        for place, name in enumerate(names):
            if name not in known:
                raise unknown("site", name, known)
            if name in names[:place]:
                raise UserError(f"the site '{name}' is named twice")
        rest = self.sum.copy()
        for name in names:
            rest.subtract(self.mode.summed_part(self.contribution(name)))
        return rest

    def contribution(self, name: str) -> State:
        """The site's committed contribution (int64)."""
        return self.contributions.load(name)

    def summed(self) -> list[str]:
        return list(self.sum.totals)

    def digest(self) -> dict[str, str]:
        if self.mode.sums:
            return {"sum": digest(self.sum.totals)}
        return {"sum": digest(quantise(self.shared, self.bits))}

    def checks(self) -> dict[str, bool]:
        if not self.mode.sums:
            return {}
        names = [site.name for site in self.members()]
        others, back = self._sum_of(names[:-1]), self._sum_of(names[::-1])
        last = self.mode.summed_part(self.contribution(names[-1]))
        ahead = others.copy()
        ahead.add(last)
        rest = self.sum_without(names[-1:])
        again = rest.copy()
        again.add(last)
        whole = digest(self.sum.totals)
        return {
            "sum_of_contributions": digest(ahead.totals) == whole,
            "commutative": digest(ahead.totals) == digest(back.totals),
            "subtraction_exact": len(names) == 1 or digest(rest.totals) == digest(others.totals),
            "add_back_exact": digest(again.totals) == whole,
        }

    def _begin(self) -> None:
        """Round 0: every site is in the sum with its initial network."""
        for site in self.setup.sites if self.mode.sums else []:
            initial = self._initial(site.name)
            self.sum.add(self.mode.summed_part(initial))
            self.contributions.stage(site.name, 0, initial, 0, like=None if self.own_initial else self.setup.sites[0].name)
        self.shared = self._first_shared()
        self.contributions.commit(0, self._states(), self.digest(), {})

    def _restore(self, states: Mapping[str, str]) -> None:
        """As it was after the last committed round."""
        self.shared = self.ledger.blobs.get(states["shared"])
        if self.mode.sums:
            self.sum.merge(self.ledger.blobs.get(states["sum"]), addends=len(self.contributions.latest))

    def _blobs(self, total: ExactSum) -> dict[str, str]:
        """The server's states, with this sum instead of its own, as blobs."""
        blobs = self.ledger.blobs
        return {name: blobs.put(state) for name, state in {**self._states(), "sum": total.totals}.items()}

    def _changed(self, total: ExactSum, members: list[Site]) -> None:
        """Other sites take part now, and this is their sum."""
        self.sum, self._members = total, members
        self._open()

    def _states(self) -> dict[str, State]:
        return {"shared": self.shared, **({"sum": self.sum.totals} if self.mode.sums else {})}

    def _open(self) -> None:
        """Begin to stage a round."""
        self._next = self.sum.copy()
        self._round_sum = ExactSum(self.bits)

    def _initial(self, name: str) -> State:
        whole = quantise(initial_state(self.config, name), self.bits) if self.own_initial else self.initial
        return self.mode.site_part(whole)

    def _first_shared(self) -> State:
        """The round averages before any round: the initial head; with N*, its start at the sum of the sites."""
        first = dequantise(self.initial, self.bits)
        if not self.mode.sums:
            return first
        return {**first, **self.sum.total()} if self.mode.star else _part(first, HEAD)

    def _mean_state(self) -> State:
        return self.sum.mean() if self.mode.sums else _part(self.shared, EXTRACTOR)

    def _network(self, total: ExactSum) -> State:
        """The aggregated network: the paper's sum with N*'s other weights, our mean, or the round average."""
        if not self.mode.sums:
            return self.shared
        return {**self.shared, **(total.total() if self.mode.star else total.mean())}

    def _leave_one_out(self, round: int) -> dict[str, ArrayRecord]:
        sites = self.members()
        if not self.mode.subsets or not self.config.objective.get("subset_probability") or len(sites) < 2:
            return {}
        draw = generator(self.config.seed, "subsets", str(round))
        chosen = draw.choice(len(sites), size=min(self.strategy.subsets, len(sites)), replace=False)
        names = [sites[int(place)].name for place in np.sort(chosen)]
        return {SUBSET + name: to_arrays(self.sum_without([name]).mean()) for name in names}

    def _sum_of(self, names: list[str]) -> ExactSum:
        total = ExactSum(self.bits)
        for name in names:
            total.add(self.mode.summed_part(self.contribution(name)))
        return total


def _part(state: State, prefix: str) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith(prefix)}


def _shapes(state: State) -> dict:
    return {name: tensor.shape for name, tensor in state.items()}
