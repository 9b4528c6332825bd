"""Sum aggregation at the server: S = N_1 + ... + N_n in exact integers, and forgetting by subtraction.

A site's first contribution is its initial network. Beside the sum, the server keeps averages over each round's replies.
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
from conf.errors import UserError
from conf.schema import Config
from conf.sites import Site
from conf.typed import value
from fusion.exact import ExactSum, ExactSumError, State, dequantise, digest, quantise
from server.strategies.base import (
    STRATEGIES,
    Aggregation,
    ReplyError,
    Setup,
    Strategy,
    check_objective,
    check_record,
    counter,
)
from server.strategies.summing import Summing


@STRATEGIES.register("sum_aggregation")
@dataclass(frozen=True)
class SumAggregationStrategy(Strategy):
    """Options of the server's side."""

    subsets: int = value(16, "most leave-one-out means sent per round (if objective.subset_probability > 0)", low=1)
    weighting: str = value("equal", "of the replies in round averages (head, N*, fedavg)", choices=("equal", "samples"))

    def check(self, config: Config) -> None:
        """UserError for another objective, and for networks with counters: their mean would be none."""
        check_objective(config, "sum_aggregation")
        if name := counter(config):
            raise UserError(f"network.norm: the counter '{name}' cannot be averaged; take norm=group or norm=none")

    def start(self, setup: Setup) -> Aggregation:
        """Begin a run with S_0, the sum of the sites' initial networks."""
        return SumAggregate(self, setup)


class SumAggregate(Summing):
    """The running sum S and the round's averages."""

    def __init__(self, strategy: SumAggregationStrategy, setup: Setup) -> None:
        super().__init__(setup)
        self.strategy = strategy
        self.mode: Mode = mode_of(self.config)
        self.own_initial = self.config.objective.get("initialisation", "shared") == "own"
        self.begin_or_resume()

    def records(self, round: int) -> dict[str, ArrayRecord]:
        state = {**self._mean_state(), **_part(self.shared, HEAD)}
        records = {MEAN: to_arrays(state)}
        if self.mode.star:
            records[STAR] = to_arrays(_part(self.shared, EXTRACTOR))
        return records | self._leave_one_out(round)

    def base(self, site: Site) -> int:
        return self.contributions.latest[site.name].round if self.mode.sums else 0

    def fold(self, site: Site, round: int, records: dict[str, State], samples: int) -> None:
        check_record(ROUND, records.get(ROUND), self.shared)
        if self.mode.sums:
            check_record(SITE, records.get(SITE), self.mode.site_part(self.initial), integers=False)
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
                check_record(ROUND, records.get(ROUND), self.shared, integers=True)
                if self.mode.sums:
                    check_record(SITE, records.get(SITE), self.sum.totals, integers=True)
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
        self.contributions.commit(round, self.states(), self.digest(), record)
        self.stage()

    def check_forgetting(self, names: Sequence[str], rollback: bool = False) -> None:
        if not self.mode.sums:
            raise UserError(
                f"mode {self.config.objective['mode']}: no site's part can be subtracted; train again without it"
            )
        super().check_forgetting(names, rollback)

    def aggregate(self) -> State:
        return self._network(self.sum)

    def row(self) -> str:
        return self.mode.row

    def extra(self) -> dict[str, State]:
        return {"star": self.shared} if self.mode.star else {}

    def reversed(self) -> State | None:
        names = [site.name for site in self.members()]
        return self._network(self.sum_of(names[::-1])) if self.mode.sums else None

    def site(self, name: str) -> State | None:
        if not self.mode.sums:
            return None
        own = dequantise(self.contribution(name), self.bits)
        return {**_part(self.shared, HEAD), **own}

    def without(self, names: list[str]) -> State | None:
        if not self.mode.sums or len(self.members()) <= len(names):
            return None
        return self._network(self.sum_without(names))

    def summed_part(self, state: State) -> State:
        return self.mode.summed_part(state)

    def traces(self, names: Sequence[str] = ()) -> dict[str, str]:
        if not self.rounds_with(names):
            return {}  # nothing was trained yet
        averaged = "averaged over rounds in which the forgotten sites took part; subtraction does not change"
        others = "they were trained while the forgotten sites' networks were in the sum; subtraction does not change them"
        found = {"head": f"the shared head was {averaged} it", "other sites' networks": others}
        if self.mode.star:
            found["N* and all tensors that are not summed"] = f"they were {averaged} them, and the ledger keeps them"
        return found

    def digest(self) -> dict[str, str]:
        return super().digest() if self.mode.sums else {"sum": digest(quantise(self.shared, self.bits))}

    def checks(self) -> dict[str, bool]:
        return super().checks() if self.mode.sums else {}

    def begin(self) -> None:
        if self.mode.sums:
            self.stage_first(alike=not self.own_initial)
        self.shared = self._first_shared()

    def restore(self, states: Mapping[str, str]) -> None:
        self.shared = self.ledger.blobs.get(states["shared"])
        if self.mode.sums:
            self.restore_sum(states)

    def stage(self) -> None:
        self._next = self.sum.copy()
        self._round_sum = ExactSum(self.bits)

    def states(self) -> dict[str, State]:
        return {"shared": self.shared, **({"sum": self.sum.totals} if self.mode.sums else {})}

    def first(self, name: str) -> State:
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


def _part(state: State, prefix: str) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith(prefix)}
