"""A strategy at work on the slots of one run: begun or gone on with, asked for its models, and told to forget."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedloom.clients.networks import Model
from fedloom.clients.protocol.reply_checks import Bounds
from fedloom.conf import to_yaml
from fedloom.conf.errors import UserError
from fedloom.conf.progress import steps
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State, digest
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.blobs import RemoteBlobStore
from fedloom.server.ledger.declared import Slot, declared_sums
from fedloom.server.ledger.membership import Membership
from fedloom.server.ledger.slots import Slots
from fedloom.server.rounds.channel import RawReply
from fedloom.server.rounds.context import Adding, Gathering, RoundContext, Transport
from fedloom.server.rounds.privacy import hidden
from fedloom.server.rounds.recalibrated import end, recalibrated
from fedloom.server.rounds.schedules import Participation
from fedloom.server.rounds.view import Models, Setup, View
from fedloom.server.strategies import ResidualInfluence, slots_of, strategy_of


class NullTransport:
    """Of a run in which nobody can be asked: before the first round, and when sites are forgotten."""

    run, length = "", 0

    def ask(
        self, kind: str, context: RoundContext, sites: Sequence[Site], content: Any, expected: Any
    ) -> Iterator[RawReply]:
        raise UserError(f"'{kind}': sites can be asked in a round only")

    def masked(self, context: RoundContext, expected: Any) -> Gathering:
        raise UserError("sites can be asked in a round only")

    def partials(self, context: RoundContext, means: Any, expected: Any) -> Adding:
        raise UserError("sites can be asked in a round only")

    def images(self, site: Site) -> int:
        return 0

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        return {}

    def bounds(self, site: Site) -> Bounds:
        return Bounds()

    def replied(self, site: Site, reason: str) -> None: ...

    def message(self, text: str) -> None: ...

    def enough(self, kind: str, context: RoundContext, replies: int) -> None: ...


class ServerState:
    """The server's state of one run: begun, or as its last committed round left it."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.experiment, self.config = setup, setup.experiment, setup.config
        self.strategy = strategy_of(self.experiment)
        self.schedule = self.strategy.schedule(self.experiment)
        bits, names = self.config.federation.scale_bits, [site.name for site in setup.sites]
        declared = slots_of(self.experiment)
        self.ledger = setup.ledger or Ledger.create(
            setup.folder, "", to_yaml(self.config), bits, names, declared_sums(declared), list(declared)
        )
        self._check_slots(declared)
        self.slots = Slots(declared, setup.sites, self.ledger, bits, self.config.federation.history)
        self.membership = Membership(self.slots, self._settle)
        self.leaving: list[str] = []  # sites to be forgotten in the next round, in which others take out their masks
        if self.ledger.last_round() is None:
            self.strategy.begin(self.round_context())
            self.slots.commit(0, {})

    def _check_slots(self, declared: Mapping[str, Slot]) -> None:
        """UserError if the ledger was made with other slots: its sums would be read as what they are not."""
        created = next(self.ledger.events("created")).body
        now = {"sums": declared_sums(declared), "slots": list(declared)}
        if any(key in created and created[key] != now[key] for key in now):
            raise UserError(f"strategy '{self.config.strategy['name']}': declares other slots than when this run was made "
                            f"({', '.join(declared) or 'none'}); go on with the code that it was made with")  # fmt: skip

    def members(self) -> list[Site]:
        """The sites that take part: all but those that are forgotten."""
        return self.slots.members

    def view(self) -> View:
        """The slots as they are."""
        return View(self.setup, self.slots)

    def round_context(
        self, number: int = 0, participation: Participation | None = None, transport: Transport | None = None
    ) -> RoundContext:
        """What a round has at hand; by default one in which nobody can be asked."""
        participation = participation or Participation([], number)
        return RoundContext(self.setup, self.slots, participation, number, transport or NullTransport())

    # Rounds

    def length(self, rounds: int) -> int:
        """How many rounds the method takes if each site trains for `rounds`."""
        return self.schedule.length(rounds)

    def commit(self, number: int, record: dict[str, Any]) -> None:
        """Make a round's replies valid, in one step with the round's record."""
        self.slots.commit(number, record)

    def abandon(self) -> None:
        """Forget the replies since the last commit."""
        self.slots.abandon()

    def restart(self, site: Site) -> State | None:
        """What a site that lost its own state can begin with (float32); None if the server keeps nothing of that kind."""
        if self.config.federation.secure_aggregation:
            return None
        view = self.view()
        kept = [slot for slot, one in self.slots.declared.items() if one.resumable and self.slots.has(slot, site.name)]
        return {name: tensor for slot in kept for name, tensor in view.contribution(slot, site.name).items()} or None

    # Models

    def models(self, view: View | None = None) -> Models:
        """The networks of a view of the slots, by name."""
        view = view or self.view()
        return recalibrated(view, self.strategy.models(view))

    @property
    def display_name(self) -> str:
        """What tables call the aggregate; empty if the method has none."""
        first = next(iter(self.models()), "")
        return "" if first in {site.name for site in self.setup.sites} else first

    def aggregate(self, view: View | None = None) -> Model:
        """The aggregated network. UserError if the method has none."""
        if not self.display_name:
            raise UserError(
                f"strategy '{self.config.strategy['name']}': its networks are the sites' own; it has no aggregate"
            )
        return self.models(view)[self.display_name]

    def without(self, names: Sequence[str]) -> Model | None:
        """The aggregated network without these sites; None if the method has no such network."""
        if not self.slots.totals or not self.display_name or len(self.members()) <= len(names):
            return None
        if self.config.federation.secure_aggregation:  # a sum without one site is had by forgetting it alone
            return None
        return self.aggregate(self.view().without(names))

    # Forgetting

    def check_forgetting(self, names: Sequence[str], rollback: bool = False) -> None:
        """UserError if these sites cannot be taken out, or (`rollback`) it cannot go back to before they took part."""
        self.membership.check_forgetting(names, rollback)

    def check_recalibration(self, names: Sequence[str]) -> None:
        """UserError if the aggregate without these sites cannot be recalibrated."""
        from fedloom.server.rounds.recalibration import check  # closed forms: only where they are asked for

        if hidden(self.config):
            raise UserError("recalibration: reads what each site tells of its images, and this run hides that "
                            "(federation.secure_aggregation, privacy.noise); ask without --recalibrate")  # fmt: skip
        view = self.view().without(names)
        check(view, self.strategy.models(view))

    def forget(self, names: Sequence[str], body: dict[str, Any], request: str | None = None) -> None:
        """Take sites out, and commit it; `body` goes into the event, which answers `request`. UserError if it cannot."""
        self.membership.forget(names, body, request)

    def attach(self, parts: RemoteBlobStore | None) -> None:
        """From here on, find in these parts what nodes of a cluster keep in the ledger's place (None: nothing)."""
        self.ledger.blobs = replace(self.ledger.blobs, elsewhere=parts)

    def bring_home(self) -> int:
        """Fetch all contributions that nodes keep, which may then let go of them; how many. Raises NodeLostError."""
        return self.ledger.blobs.bring_home(self.ledger.referred())

    def lost(self) -> list[str]:
        """The sites whose contributions were with nodes that are not there any more."""
        return self.membership.lost()

    def lose(self, names: Sequence[str]) -> None:
        """Let sites whose contributions are lost take part from their first ones on, as if they had just joined."""
        self.membership.lose(names, {"lost": "their nodes are gone (federation.node_store)"})
        self.readmit(names)

    def roll_back(self, names: Sequence[str], body: dict[str, Any], request: str | None = None) -> None:
        """Go back to the round before the first of these sites took part, as `forget`. UserError if it cannot."""
        self.membership.roll_back(names, body, request)

    def readmit(self, names: Sequence[str]) -> None:
        """Let forgotten sites take part again, from their first contributions on. UserError if they are not forgotten."""
        self.membership.readmit(names, lambda name: self.strategy.initial_contribution(self.view(), name))

    def residue(self, names: Sequence[str] = ()) -> list[ResidualInfluence]:
        """Where these forgotten sites (none named: any that will be) may leave traces that subtraction does not reach."""
        found = list(self.strategy.residue(self.view(), names))
        if not all(isinstance(one, ResidualInfluence) for one in found):
            raise UserError(
                f"strategy '{self.config.strategy['name']}': residue() gives ResidualInfluence(location, reason) each"
            )
        return found

    def _settle(self) -> None:
        run = self.round_context(self.view().round)
        end(run)
        self.strategy.recompute_derived(run)

    # Evidence

    def digest(self) -> dict[str, str]:
        """Digests of the exact states, by name."""
        return self.slots.digest()

    def checks(self, visit: Callable[[Site], None] = lambda site: None) -> tuple[dict[str, bool], View | None]:
        """Facts about this very run that are computed, not assumed; and a view whose sums were added up in another order.

        Every contribution is read once, site by site; `visit` may look at the site's then.
        """
        sums = {slot: _Sums(self.slots, slot) for slot in self.slots.totals}
        for site in steps("measuring sites and checking sums", self.members()):
            for one in sums.values():
                one.read(site.name)
            visit(site)
        found = {_named(slot, what): holds for slot, one in sums.items() for what, holds in one.checks().items()}
        view = self.view().with_totals({slot: one.other_order() for slot, one in sums.items()}) if sums else None
        return found, view


class _Sums:
    """A slot's contributions, added up again as they are read: those at even and those at odd places apart."""

    def __init__(self, slots: Slots, slot: str) -> None:
        self.slots, self.slot = slots, slot
        self.halves = [slots.empty(slot), slots.empty(slot)]
        self.last: tuple[State, int] | None = None
        self.place = 0

    def read(self, site: str) -> None:
        """Add a site's contribution, if it has one; the last one is kept apart."""
        if not self.slots.has(self.slot, site):
            return
        self._add_last()
        self.last = (
            self.slots.summed(self.slot, self.slots.contribution(self.slot, site)),
            self.slots.weight(self.slot, site),
        )

    def other_order(self) -> ExactSum:
        """The sum of all: odd places, then even ones, then the last."""
        total = _merged(self.halves[::-1])
        if self.last:
            total.add(*self.last)
        return total

    def checks(self) -> Mapping[str, bool]:
        """What holds of the slot's sum."""
        if self.last is None:  # nobody has put anything: then nothing is summed
            return {"sum_of_contributions": False} if self.slots.total(self.slot).addends else {}
        whole, others = digest(self.slots.total(self.slot).totals), _merged(self.halves)
        ahead = others.copy()
        ahead.add(*self.last)
        rest = self.slots.total(self.slot).copy()
        rest.subtract(*self.last)
        again = rest.copy()
        again.add(*self.last)
        return {
            "sum_of_contributions": digest(ahead.totals) == whole,
            "commutative": digest(self.other_order().totals) == whole,
            "subtraction_exact": not others.totals or digest(rest.totals) == digest(others.totals),
            "add_back_exact": digest(again.totals) == whole,
        }

    def _add_last(self) -> None:
        if self.last:
            self.halves[self.place % 2].add(*self.last)
            self.place += 1


def _merged(halves: Sequence[ExactSum]) -> ExactSum:
    """The sum of two sums."""
    total = halves[0].copy()
    if halves[1].totals:
        total.merge(halves[1].totals, halves[1].addends)
    return total


def _named(slot: str, what: str) -> str:
    return what if slot == "sum" else f"{slot}: {what}"
