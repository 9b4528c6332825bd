"""Remove sites from the slots exactly, and readmit them, in one transaction with the ledger's event."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from fedloom.conf.errors import UserError, unknown
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum, exact
from fedloom.fusion.state import State
from fedloom.server.ledger.ledger import Ledger
from fedloom.server.ledger.rows import Contribution
from fedloom.server.ledger.slots import Slots, stored
from fedloom.server.ledger.sums import SumRow, added_up

BeforeCommit = Callable[[], None]  # recomputes what a method derives from its slots


def check_members(members: Sequence[Site], names: Sequence[str]) -> None:
    """Raise UserError unless each name is a member's and occurs once."""
    known, seen = {site.name for site in members}, set()
    for name in names:
        if name not in known:
            raise unknown("site", name, [site.name for site in members])
        if name in seen:
            raise UserError(f"the site '{name}' is named twice; name it once")
        seen.add(name)


def rounds_with(ledger: Ledger, names: Sequence[str]) -> int:
    """Return over how many rounds forgotten sites may have left traces until they were forgotten.

    The count starts with the first round that has a contribution by one of them. Without names, it is the number of rounds.
    """
    wanted, rounds, first, longest = set(names), 0, 0, 0
    for event in ledger.events():
        if event.kind in ("round", "rolled back"):
            rounds = event.body["round"]
            first = first if first <= rounds else 0
        if event.kind == "round" and not first and wanted & event.body["contributions"].keys():
            first = rounds  # in round 0, every site has the initial state, to which no site contributed
        if event.kind == "forgotten" and first and wanted & set(event.body["sites"]):
            longest = max(longest, rounds - first + 1)
    return longest if names else rounds


class Membership:
    """Removes sites from a run's slots and readmits them. `before_commit` is called before each change is committed."""

    def __init__(self, slots: Slots, before_commit: BeforeCommit = lambda: None) -> None:
        self.slots, self.ledger, self.before_commit = slots, slots.ledger, before_commit

    def check_forgetting(self, names: Sequence[str], rollback: bool = False) -> None:
        """Check that these sites can be removed and, with `rollback`, that the run can go back to before they participated.

        Raises UserError if not.
        """
        slots, remaining = self.slots, len(self.slots.members) - len(names)
        check_members(slots.members, names)
        masked = any(map(slots.masked, slots.declared))
        if not slots.declared:
            raise UserError("the method stores no contributions, or strategy.forgettable is false, so no site can be "
                            "subtracted; train again without it")  # fmt: skip
        if remaining <= 0:
            raise UserError("no site would be left: delete the run's folder instead")
        if masked and remaining == 1:
            raise UserError("one site would be left, and the sum would reveal its contribution: two sites must remain")
        if rollback and (before := self._before(names)) is not None:
            if before and masked:
                raise UserError(
                    "--rollback: with secure aggregation only last contributions are stored, and other sites joined before"
                )
            self.ledger.check_roll_back(before)

    def forget(self, names: Sequence[str], body: dict, request: str | None = None) -> None:
        """Subtract sites and commit. `body`: facts for the ledger's event, which answers `request`. Raises UserError."""
        self.check_forgetting(names)
        self.slots.stage({slot: self.slots.sum_without(slot, names) for slot in self.slots.totals})
        self._leave(names, body, request)

    def lost(self) -> list[str]:
        """Return the sites whose contributions were on nodes that are gone."""
        blobs, latest = self.ledger.blobs, self.slots.contributions.latest
        if blobs.elsewhere is None or not blobs.elsewhere.look():
            return []
        missing = {blob for blob in {contribution.blob for contribution in latest.values()} if not blobs.has(blob)}
        return [site for site, contribution in latest.items() if contribution.blob in missing]

    def lose(self, names: Sequence[str], body: dict) -> None:
        """Remove sites whose contributions are lost: add up the sums again from what is left, and commit it."""
        lost = set(names)
        remaining = [contribution for site, contribution in self.slots.contributions.latest.items() if site not in lost]
        self.slots.stage({row.name: self._added_up(row, remaining) for row in self.ledger.sums()})
        self._leave(names, body, None)

    def roll_back(self, names: Sequence[str], body: dict, request: str | None = None) -> None:
        """Go back to the round before the first of these sites participated; arguments as in `forget`."""
        if (before := self._before(names)) is not None:
            self.ledger.roll_back(before, names, body, request)
            self.slots.reload()

    def readmit(self, names: Sequence[str], first: Callable[[str], Mapping[str, State]]) -> None:
        """Readmit forgotten sites, starting from their `first` contributions. Raises UserError if they are not forgotten."""
        slots, back = self.slots, dict[str, Contribution]()
        for name in names:
            parts = {slot: stored(state, slots.bits) for slot, state in first(name).items()}
            for slot, state in parts.items():
                if slot in slots.totals:
                    slots.changing(slot).add(slots.summed(slot, exact(state, slots.bits)))
            if parts:
                back[name] = Contribution(slots.contributions.blob_of(parts), 0, 0, slots.bits)
        members = {site.name for site in slots.members} | set(names)
        with self._committed([site for site in slots.sites if site.name in members], slots.contributions.latest | back):
            self.ledger.readmit(names, back, slots.write(), slots.digest())

    def _added_up(self, row: SumRow, contributions: Sequence[Contribution]) -> ExactSum:
        """Add up contributions, each on the machine that stores it."""
        blobs, names = self.ledger.blobs, list(self.slots.totals[row.name].totals)
        local = [contribution for contribution in contributions if not blobs.holder(contribution.blob)]
        total = added_up(row, names, local, blobs.get, self.slots.bits)
        if blobs.elsewhere is not None and len(local) < len(contributions):
            remote = [contribution for contribution in contributions if blobs.holder(contribution.blob)]
            part = blobs.elsewhere.summed(row, names, remote, self.slots.bits)
            total.merge(part.totals, part.addends)
        return total

    def _leave(self, names: Sequence[str], body: dict, request: str | None) -> None:
        """Commit the staged sums, which are without these sites."""
        slots, leaving = self.slots, set(names)
        latest = {site: contribution for site, contribution in slots.contributions.latest.items() if site not in leaving}
        with self._committed([site for site in slots.members if site.name not in leaving], latest):
            self.ledger.forget(names, slots.write(), slots.digest(), body, request)

    @contextlib.contextmanager
    def _committed(self, members: list[Site], latest: dict[str, Contribution]) -> Iterator[None]:
        """Set these members and contributions while the ledger is written; restore the old ones if that fails."""
        slots = self.slots
        before = slots.members, slots.contributions.latest
        slots.members, slots.contributions.latest = members, latest
        try:
            self.before_commit()
            yield
        except BaseException:
            slots.members, slots.contributions.latest = before
            slots.abandon()
            raise
        slots.accept()

    def _before(self, names: Sequence[str]) -> int | None:
        """Return the round before the first in which one of these sites participated; None if none ever did."""
        rounds = [
            contribution.round for name in names for contribution in self.ledger.history(name) if contribution.round > 0
        ]
        return min(rounds) - 1 if rounds else None
