"""Who takes part: sites are taken out of the slots, bit for bit, and let in again, in one step with the ledger's event."""

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

Settle = Callable[[], None]  # recomputes what a method derives from its slots


def check_members(members: Sequence[Site], names: Sequence[str]) -> None:
    """UserError unless each is a member, named once."""
    known, seen = {site.name for site in members}, set()
    for name in names:
        if name not in known:
            raise unknown("site", name, [site.name for site in members])
        if name in seen:
            raise UserError(f"the site '{name}' is named twice")
        seen.add(name)


def rounds_with(ledger: Ledger, names: Sequence[str]) -> int:
    """Over how many rounds these sites may have left something, till they were forgotten: from the first on that has a
    contribution of theirs. None named: how many rounds there are."""
    wanted, rounds, first, found = set(names), 0, 0, 0
    for event in ledger.events():
        if event.kind in ("round", "rolled back"):
            rounds = event.body["round"]
            first = first if first <= rounds else 0
        if event.kind == "round" and not first and wanted & event.body["contributions"].keys():
            first = rounds  # of round 0 all have what the method began with: that is nobody's
        if event.kind == "forgotten" and first and wanted & set(event.body["sites"]):
            found = max(found, rounds - first + 1)
    return found if names else rounds


class Membership:
    """Takes sites out of a run's slots and lets them in again. `settle`: called before a change is committed."""

    def __init__(self, slots: Slots, settle: Settle = lambda: None) -> None:
        self.slots, self.ledger, self.settle = slots, slots.ledger, settle

    def check_forgetting(self, names: Sequence[str], rollback: bool = False) -> None:
        """UserError if these sites cannot be taken out, or (`rollback`) it cannot go back to before they took part."""
        slots, left = self.slots, len(self.slots.members) - len(names)
        check_members(slots.members, names)
        masked = any(map(slots.masked, slots.declared))
        if not slots.declared:
            raise UserError("its method keeps no contributions: no site's part can be subtracted; train again without it")
        if left <= 0:
            raise UserError("no site would be left: delete the run's folder instead")
        if masked and left == 1:
            raise UserError("one site would be left, and the sum would be what it gave: under masks two must stay")
        if rollback and (before := self._before(names)) is not None:
            if before and masked:
                raise UserError(
                    "--rollback: under masks sites keep only what they gave last; they were there before these sites"
                )
            self.ledger.check_roll_back(before)

    def forget(self, names: Sequence[str], body: dict, request: str | None = None) -> None:
        """Take sites out and commit it. `body` goes into the event, which answers `request`. UserError if it cannot."""
        self.check_forgetting(names)
        self.slots.stage({slot: self.slots.sum_without(slot, names) for slot in self.slots.totals})
        self._leave(names, body, request)

    def lost(self) -> list[str]:
        """The sites whose contributions were with nodes that are not there any more."""
        blobs, latest = self.ledger.blobs, self.slots.contributions.latest
        if blobs.elsewhere is None or not blobs.elsewhere.look():
            return []
        gone = {blob for blob in {one.blob for one in latest.values()} if not blobs.has(blob)}
        return [site for site, one in latest.items() if one.blob in gone]

    def lose(self, names: Sequence[str], body: dict) -> None:
        """Take sites out whose contributions are lost: the sums are added up anew, from all that is left. Commits it."""
        left = set(names)
        stays = [one for site, one in self.slots.contributions.latest.items() if site not in left]
        self.slots.stage({row.name: self._added_up(row, stays) for row in self.ledger.sums()})
        self._leave(names, body, None)

    def roll_back(self, names: Sequence[str], body: dict, request: str | None = None) -> None:
        """Go back to the round before the first of these sites took part, as `forget`."""
        if (before := self._before(names)) is not None:
            self.ledger.roll_back(before, names, body, request)
            self.slots.reload()

    def readmit(self, names: Sequence[str], first: Callable[[str], Mapping[str, State]]) -> None:
        """Let forgotten sites take part again, from their `first` contributions on. UserError if they are not forgotten."""
        slots, back = self.slots, dict[str, Contribution]()
        for name in names:
            parts = {slot: stored(state, slots.bits) for slot, state in first(name).items()}
            for slot, state in parts.items():
                if slot in slots.totals:
                    slots.changing(slot).add(slots.summed(slot, exact(state, slots.bits)))
            if parts:
                back[name] = Contribution(slots.contributions.blob_of(parts), 0, 0, slots.bits)
        there = {site.name for site in slots.members} | set(names)
        with self._committed([site for site in slots.sites if site.name in there], slots.contributions.latest | back):
            self.ledger.readmit(names, back, slots.write(), slots.digest())

    def _added_up(self, row: SumRow, given: Sequence[Contribution]) -> ExactSum:
        """A sum over contributions, each added up where it is."""
        blobs, names = self.ledger.blobs, list(self.slots.totals[row.name].totals)
        here = [one for one in given if not blobs.holder(one.blob)]
        total = added_up(row, names, here, blobs.get, self.slots.bits)
        if blobs.elsewhere is not None and len(here) < len(given):
            there = [one for one in given if blobs.holder(one.blob)]
            part = blobs.elsewhere.summed(row, names, there, self.slots.bits)
            total.merge(part.totals, part.addends)
        return total

    def _leave(self, names: Sequence[str], body: dict, request: str | None) -> None:
        """Commit the sums that are staged, in which these sites are no more."""
        slots, left = self.slots, set(names)
        latest = {site: one for site, one in slots.contributions.latest.items() if site not in left}
        with self._committed([site for site in slots.members if site.name not in left], latest):
            self.ledger.forget(names, slots.write(), slots.digest(), body, request)

    @contextlib.contextmanager
    def _committed(self, members: list[Site], latest: dict[str, Contribution]) -> Iterator[None]:
        """While the ledger is written: these members and contributions, with what is derived; as before if it fails."""
        slots = self.slots
        before = slots.members, slots.contributions.latest
        slots.members, slots.contributions.latest = members, latest
        try:
            self.settle()
            yield
        except BaseException:
            slots.members, slots.contributions.latest = before
            slots.abandon()
            raise
        slots.accept()

    def _before(self, names: Sequence[str]) -> int | None:
        """The round before the first in which one of these sites took part; None if none ever did."""
        rounds = [one.round for name in names for one in self.ledger.history(name) if one.round > 0]
        return min(rounds) - 1 if rounds else None
