"""The baseline of arithmetic: one network goes from site to site, each training it where the one before left it."""

from collections.abc import Sequence
from typing import Any

from flwr.app import ArrayRecord

from clients.initial import initial_state
from clients.messages import MEAN, SITE, to_arrays
from conf.errors import UserError
from conf.sites import Site
from fusion.arithmetic import to_state
from fusion.exact import ExactSumError, State, digest, quantise
from server.contributions import Contributions
from server.strategies.base import Aggregation, ReplyError, Setup, Turn, check_record

THETA = "shared"  # the ledger's name for the network's state


class Sequential(Aggregation):
    """All rounds of one site, then all of the next; a site's own rounds, batches and rates are as when it trains alone."""

    def __init__(self, setup: Setup, order: Sequence[Site], row: str) -> None:
        self.ledger, self._row = setup.opened(), row
        self.bits = setup.config.federation.scale_bits
        self.contributions = Contributions(self.ledger, self.bits, setup.config.federation.history)
        self.order, self.each = list(order), setup.config.rounds
        self.initial = initial_state(setup.config)
        last = self.ledger.last_round()
        self.theta = quantise(self.initial, self.bits) if last is None else self.ledger.blobs.get(last.states[THETA])
        if last is None:
            self._commit(0, {})
        self.abandon()

    def members(self) -> list[Site]:
        return self.order

    def length(self, rounds: int) -> int:
        return rounds * len(self.order)

    def turn(self, round: int) -> Turn:
        return Turn([self.order[(round - 1) // self.each]], (round - 1) % self.each + 1)

    def records(self, round: int) -> dict[str, ArrayRecord]:
        return {MEAN: to_arrays(self.aggregate())}

    def base(self, site: Site) -> int:
        return 0

    def fold(self, site: Site, round: int, records: dict[str, State], samples: int) -> None:
        check_record(SITE, records.get(SITE), self.initial)
        try:
            self._next = quantise(records[SITE], self.bits)
        except ExactSumError as error:
            raise ReplyError(str(error)) from None

    def commit(self, round: int, record: dict[str, Any]) -> None:
        self.theta = self._next
        self._commit(round, record)

    def forget(self, names: Sequence[str], body: dict[str, Any], request: str | None = None) -> None:
        self.check_forgetting(names)

    def check_forgetting(self, names: Sequence[str], rollback: bool = False) -> None:
        raise UserError(f"{self._row}: one network was trained at one site after the other; train again without the site")

    def abandon(self) -> None:
        self._next = self.theta

    def aggregate(self) -> State:
        return to_state(self.theta, self.initial, self.bits)

    def traces(self, names: Sequence[str] = ()) -> dict[str, str]:
        return {"the network": "it was trained at one site after the other; no site's part can be taken out"}

    def row(self) -> str:
        return self._row

    def digest(self) -> dict[str, str]:
        return {THETA: digest(self.theta)}

    def _commit(self, round: int, record: dict[str, Any]) -> None:
        self.contributions.commit(round, {THETA: self.theta}, self.digest(), record)
