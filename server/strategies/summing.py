"""What strategies share that keep a contribution of each site, and the exact sum of all of them, in the run's ledger.

Every site is in the sum from the start; a reply replaces its old contribution by its new one. S is thus the sum of what
`contributions` holds, at any time, and forgetting a site is a subtraction.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from clients.initial import initial_state
from conf.errors import UserError
from conf.sites import Site
from fusion.exact import ExactSum, State, digest, quantise
from server.contributions import Contributions
from server.ledger import Contribution
from server.strategies.base import Aggregation, Setup


class Summing(Aggregation):
    """The exact sum S of the sites' contributions. A subclass calls `begin_or_resume` at the end of its __init__."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.config = setup, setup.config
        self.bits = self.config.federation.scale_bits
        self.ledger = setup.opened()
        self.contributions = Contributions(self.ledger, self.bits, self.config.federation.history)
        self.initial = quantise(initial_state(self.config), self.bits)
        self.sum = ExactSum(self.bits)
        forgotten = self.ledger.sites()
        self._members = [site for site in self.setup.sites if not forgotten[site.name]]

    def begin_or_resume(self) -> None:
        """Begin the run, or go on after its last committed round."""
        last = self.ledger.last_round()
        if last is None:
            self.begin()
            self.contributions.commit(0, self.states(), self.digest(), {})
        else:
            self.restore(last.states)
        self.stage()

    @abstractmethod
    def begin(self) -> None:
        """Round 0: stage the sites' first contributions."""

    @abstractmethod
    def restore(self, states: Mapping[str, str]) -> None:
        """As it was after the committed round that left these blobs, by name."""

    @abstractmethod
    def stage(self) -> None:
        """Begin to stage a round: no reply is in."""

    @abstractmethod
    def first(self, name: str) -> State:
        """What a site contributes before it has ever trained (int64)."""

    @abstractmethod
    def states(self) -> dict[str, State]:
        """What the ledger keeps of the server's state, by name."""

    def summed_part(self, state: State) -> State:
        """Of a contribution, what enters the sum."""
        return state

    def members(self) -> list[Site]:
        return self._members

    def contribution(self, name: str) -> State:
        """The site's committed contribution (int64)."""
        return self.contributions.load(name)

    def stage_first(self, alike: bool) -> None:
        """Put every site's first contribution into the sum; `alike`: they are all the same."""
        for site in self.setup.sites:
            first = self.first(site.name)
            self.sum.add(self.summed_part(first))
            self.contributions.stage(site.name, 0, first, 0, like=self.setup.sites[0].name if alike else None)

    def restore_sum(self, states: Mapping[str, str]) -> None:
        """The sum as it was committed."""
        self.sum.merge(self.ledger.blobs.get(states["sum"]), addends=len(self.contributions.latest))

    def abandon(self) -> None:
        self.contributions.abandon()
        self.stage()

    def forget(self, names: Sequence[str], body: dict[str, Any], request: str | None = None) -> None:
        self.check_forgetting(names)
        rest = self.sum_without(list(names))
        self.ledger.forget(names, self._blobs(rest), {"sum": digest(rest.totals)}, body, request)
        for name in names:
            del self.contributions.latest[name]
        self._changed(rest, [site for site in self._members if site.name not in names])

    def check_forgetting(self, names: Sequence[str], rollback: bool = False) -> None:
        self.check_names(names)
        if len(names) >= len(self.members()):
            raise UserError("no site would be left: delete the run's folder instead")
        if rollback and (before := self._before(names)) is not None:
            self.ledger.check_roll_back(before)

    def _before(self, names: Sequence[str]) -> int | None:
        """The round before the first in which one of these sites took part; None if none ever did."""
        rounds = [one.round for name in names for one in self.ledger.history(name) if one.round > 0]
        return min(rounds) - 1 if rounds else None

    def roll_back(self, names: Sequence[str], body: dict[str, Any], request: str | None = None) -> None:
        if (before := self._before(names)) is None:
            return
        self.ledger.roll_back(before, names, body, request)
        self.sum = ExactSum(self.bits)
        self.contributions = Contributions(self.ledger, self.bits, self.config.federation.history)
        self.restore(self.ledger.rounds()[-1].states)
        self.stage()

    def readmit(self, names: Sequence[str]) -> None:
        """Let forgotten sites take part again, from their first contributions on. UserError if they are not forgotten."""
        total, back = self.sum.copy(), {}
        for name in names:
            first = self.first(name)
            total.add(self.summed_part(first))
            back[name] = Contribution(self.ledger.blobs.put(first), 0, 0, self.bits)
        self.ledger.readmit(names, back, self._blobs(total), {"sum": digest(total.totals)})
        self.contributions.latest |= back
        self._changed(total, [site for site in self.setup.sites if site in self._members or site.name in names])

    def sum_without(self, names: list[str]) -> ExactSum:
        """S minus the contributions of these sites, in exact integers. UserError for a name that is unknown or repeated."""
        self.check_names(names)
        rest = self.sum.copy()
        for name in names:
            rest.subtract(self.summed_part(self.contribution(name)))
        return rest

    def sum_of(self, names: Sequence[str]) -> ExactSum:
        """The sum of these sites' contributions, added up in this order."""
        total = ExactSum(self.bits)
        for name in names:
            total.add(self.summed_part(self.contribution(name)))
        return total

    def summed(self) -> list[str]:
        return list(self.sum.totals)

    def digest(self) -> dict[str, str]:
        return {"sum": digest(self.sum.totals)}

    def checks(self) -> dict[str, bool]:
        names = [site.name for site in self.members()]
        others, back = self.sum_of(names[:-1]), self.sum_of(names[::-1])
        last = self.summed_part(self.contribution(names[-1]))
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

    def rounds_with(self, names: Sequence[str]) -> int:
        """How many rounds there were when these sites were forgotten; none named: how many there are."""
        rounds = found = 0
        for event in self.ledger.events():
            if event.kind in ("round", "rolled back"):
                rounds = event.body["round"]
            if event.kind == "forgotten" and set(names) & set(event.body["sites"]):
                found = rounds
        return found if names else rounds

    def _blobs(self, total: ExactSum) -> dict[str, str]:
        """The server's states, with this sum instead of its own, as blobs."""
        blobs = self.ledger.blobs
        return {name: blobs.put(state) for name, state in {**self.states(), "sum": total.totals}.items()}

    def _changed(self, total: ExactSum, members: list[Site]) -> None:
        """Other sites take part now, and this is their sum."""
        self.sum, self._members = total, members
        self.stage()
