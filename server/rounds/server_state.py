"""A strategy with the slots of one run: it starts or resumes, returns its models, and forgets sites."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedloom.clients.data.standardise import NONE, SITES
from fedloom.clients.networks import Model
from fedloom.conf import to_yaml
from fedloom.conf.errors import UserError
from fedloom.conf.package import NAME
from fedloom.conf.progress import steps
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State, digest
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.blobs import RemoteBlobStore
from fedloom.server.ledger.declared import Slot, declared_sums
from fedloom.server.ledger.membership import Membership
from fedloom.server.ledger.slots import Slots
from fedloom.server.rounds.asking import Transport
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.feature_statistics import FeatureStatistics
from fedloom.server.rounds.privacy import hidden
from fedloom.server.rounds.recalibrated import end, recalibrated
from fedloom.server.rounds.schedules import Participation
from fedloom.server.rounds.view import Models, Setup, View
from fedloom.server.strategies import ResidualInfluence, slots_of, strategy_of


class ServerState:
    """The server's state of one run: new, or as its last committed round left it."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.experiment, self.config = setup, setup.experiment, setup.config
        self.strategy = strategy_of(self.experiment)
        self.schedule = self.strategy.schedule(self.experiment)
        self.changed_attributes = _watched(strategy=self.strategy, schedule=self.schedule)
        bits, names = self.config.federation.scale_bits, [site.name for site in setup.sites]
        declared = slots_of(self.experiment)
        self.ledger = setup.ledger or Ledger.create(
            setup.folder, "", to_yaml(self.config), bits, names, declared_sums(declared), list(declared)
        )
        self._check_slots(declared)
        self.slots = Slots(declared, setup.sites, self.ledger, bits, self.config.federation.history)
        self.features = FeatureStatistics(self.experiment, self.slots)
        if self.features.way != NONE:
            self.setup = replace(setup, evaluator=setup.measuring().standardising(self.features.current))
        self.membership = Membership(self.slots, self._recompute_derived)
        self.leaving: list[str] = []  # sites to forget in the next round, in which others remove shared masks
        if self.ledger.last_round() is None:
            self.strategy.begin(self.round_context())
            self.slots.commit(0, {})

    def _check_slots(self, declared: Mapping[str, Slot]) -> None:
        """Raise UserError if the ledger was created with other slots, since its sums would be misread."""
        created = next(self.ledger.events("created")).body
        now = {"sums": declared_sums(declared), "slots": list(declared)}
        if any(key in created and created[key] != now[key] for key in now):
            raise UserError(f"strategy '{self.config.strategy['name']}': declares other slots than when this run was made "
                            f"({', '.join(declared) or 'none'}); resume with the code that made it")  # fmt: skip

    def members(self) -> list[Site]:
        """Return the sites of the run that are not forgotten."""
        return self.slots.members

    def domains(self) -> list[str]:
        """Return the domains of the members."""
        return list(dict.fromkeys(site.spec.domain for site in self.members()))

    def view(self) -> View:
        """Return a view of the current slots."""
        return View(self.setup, self.slots)

    def round_context(
        self, number: int = 0, participation: Participation | None = None, transport: Transport | None = None
    ) -> RoundContext:
        """Return the context of a round. By default, of one in which no site can be asked."""
        participation = participation or Participation([], number)
        return RoundContext(self.setup, self.slots, participation, number, transport or Transport())

    # Rounds

    def length(self, rounds: int) -> int:
        """Return how many rounds the method takes if each site trains for `rounds`."""
        return self.schedule.length(rounds)

    def commit(self, number: int, record: dict[str, Any]) -> None:
        """Commit a round's replies, in one transaction with the round's record."""
        self.slots.commit(number, record)

    def abandon(self) -> None:
        """Drop the replies since the last commit."""
        self.slots.abandon()

    def restart(self, site: Site) -> State | None:
        """Return the state (float32) from which a site continues after it lost its own state.

        It consists of the site's contributions in slots that declare them `resumable`.

        Returns:
            The state; None without such contributions, and under secure aggregation, where the server cannot read them.
        """
        if self.config.federation.secure_aggregation:
            return None
        view = self.view()
        declared = self.slots.declared
        resumable = [slot for slot in declared if declared[slot].resumable and self.slots.has(slot, site.name)]
        return {name: tensor for slot in resumable for name, tensor in view.contribution(slot, site.name).items()} or None

    # Models

    def models(self, view: View | None = None) -> Models:
        """Return the method's networks by name, computed from a view of the slots; None: the current slots."""
        view = view or self.view()
        return recalibrated(view, self.strategy.models(view))

    @property
    def display_name(self) -> str:
        """The aggregate's name in tables; empty if the method has no aggregate."""
        first = next(iter(self.models()), "")
        return "" if first in {site.name for site in self.setup.sites} else first

    def aggregate(self, view: View | None = None) -> Model:
        """Return the aggregated network of a view (None: the current slots). Raises UserError if the method has none."""
        if not self.display_name:
            raise UserError(
                f"strategy '{self.config.strategy['name']}': has no aggregate, because each site has its own network"
            )
        return self.models(view)[self.display_name]

    def without(self, names: Sequence[str]) -> Model | None:
        """Return the aggregated network without these sites; None if the method has no such network."""
        if not self.slots.sums or not self.display_name or len(self.members()) <= len(names):
            return None
        if self.config.federation.secure_aggregation:  # only forgetting a site gives the sum without it
            return None
        return self.aggregate(self.view().without(names))

    # Forgetting

    def check_forgetting(self, names: Sequence[str], rollback: bool = False) -> None:
        """Check that these sites can be removed and, with `rollback`, that the run can go back to before they participated.

        Raises UserError if not.
        """
        self.membership.check_forgetting(names, rollback)
        if not rollback:
            self.features.check_forgetting(names)
        elif self.features.has_summed(names) and not any(map(self.slots.base, names)):  # no round to go back to
            raise UserError(f"--rollback: {', '.join(names)} has no contribution; leave --rollback out")

    def check_recalibration(self, names: Sequence[str]) -> None:
        """Raise UserError if the aggregate without these sites cannot be recalibrated."""
        from fedloom.server.rounds.recalibration import check  # imported only when it is needed

        if hidden(self.config):
            raise UserError("recalibration: reads statistics of each site's images, which this run hides "
                            "(federation.secure_aggregation, privacy.noise); leave --recalibrate out")  # fmt: skip
        view = self.view().without(names)
        check(view, self.strategy.models(view))

    def check_restoration(self) -> None:
        """Raise UserError if the method cannot restore its aggregate after a subtraction."""
        if reason := self.strategy.no_restoration(self.experiment):
            raise UserError(f"--restore: {reason}; use --repair N for further rounds, or --rollback")

    def attach(self, parts: RemoteBlobStore | None) -> None:
        """Set where to read contributions that a cluster's nodes store; None: the server stores all."""
        self.ledger.blobs = replace(self.ledger.blobs, elsewhere=parts)

    def bring_home(self) -> int:
        """Move all contributions from a cluster's nodes to the server, and return their number. Raises NodeLostError."""
        return self.ledger.blobs.bring_home(self.ledger.referred())

    def lose(self, names: Sequence[str]) -> None:
        """Restart sites whose contributions are lost from their first contributions, as if they had just joined."""
        self.membership.lose(names, {"lost": "their nodes are gone (federation.node_store)"})
        self.readmit(names)

    def readmit(self, names: Sequence[str]) -> None:
        """Readmit forgotten sites, starting from their first contributions. Raises UserError if they are not forgotten."""
        self.membership.readmit(names, lambda name: self.strategy.initial_contribution(self.view(), name))

    def residue(self, names: Sequence[str] = ()) -> list[ResidualInfluence]:
        """Return where these forgotten sites may have left traces that subtraction does not remove.

        Without names: where any site that is forgotten may leave them.
        """
        traces = list(self.strategy.residue(self.view(), names))
        if not all(isinstance(trace, ResidualInfluence) for trace in traces):
            raise UserError(f"strategy '{self.config.strategy['name']}': residue() must return ResidualInfluence objects")
        if self.features.way == SITES and self.view().rounds_with(names):
            reason = "sites trained on examples standardised with sums that included the forgotten sites' (data.standardise)"
            traces.append(ResidualInfluence("the networks that the other sites trained", reason))
        return traces

    def _recompute_derived(self) -> None:
        run = self.round_context(self.view().round)
        end(run)
        self.strategy.recompute_derived(run)

    # Evidence

    def digest(self) -> dict[str, str]:
        """Return digests of the exact sums by slot or, for a method without sums, of the server's states by name."""
        return self.slots.digest()

    def checks(self, visit: Callable[[Site], None] = lambda site: None) -> tuple[dict[str, bool], View | None]:
        """Check this run's sums; return the results by name, and a view whose sums were added up in another order.

        Every contribution is read once, site by site. `visit` is called with each site after that.
        """
        sums = {slot: _Sums(self.slots, slot) for slot in self.slots.totals}
        for site in steps("measuring sites and checking sums", self.members()):
            for added in sums.values():
                added.read(site.name)
            visit(site)
        results = {_named(slot, check): holds for slot, added in sums.items() for check, holds in added.checks().items()}
        view = self.view().with_totals({slot: added.other_order() for slot, added in sums.items()}) if sums else None
        return results, view


def _watched(**objects: object) -> Callable[[int], Iterable[str]]:
    """Return a function from a round's number to warnings about changed attributes of those objects that users wrote."""
    own = {kind: item for kind, item in objects.items() if not type(item).__module__.startswith(f"{NAME}.")}
    if not own:
        return lambda number: ()
    from fedloom.server.rounds.attributes import Attributes  # imported only for users' objects

    return Attributes(**own).changed


class _Sums:
    """A slot's contributions, added up again as they are read, in two halves: even and odd positions."""

    def __init__(self, slots: Slots, slot: str) -> None:
        self.slots, self.slot = slots, slot
        self.halves = [slots.empty(slot), slots.empty(slot)]
        self.last: tuple[State, int] | None = None
        self.place = 0

    def read(self, site: str) -> None:
        """Add a site's contribution, if it has one. The last one is held back."""
        if not self.slots.has(self.slot, site):
            return
        self._add_last()
        self.last = (
            self.slots.summed(self.slot, self.slots.contribution(self.slot, site)),
            self.slots.weight(self.slot, site),
        )

    def other_order(self) -> ExactSum:
        """Return the sum of all: odd positions, then even ones, then the last contribution."""
        total = _merged(self.halves[::-1])
        if self.last:
            total.add(*self.last)
        return total

    def checks(self) -> Mapping[str, bool]:
        """Return which checks of the slot's sum hold."""
        if self.last is None:  # no site has put anything, so nothing is summed
            return {"sum_of_contributions": False} if self.slots.total(self.slot).addends else {}
        expected, others = digest(self.slots.total(self.slot).totals), _merged(self.halves)
        ahead = others.copy()
        ahead.add(*self.last)
        rest = self.slots.total(self.slot).copy()
        rest.subtract(*self.last)
        again = rest.copy()
        again.add(*self.last)
        return {
            "sum_of_contributions": digest(ahead.totals) == expected,
            "commutative": digest(self.other_order().totals) == expected,
            "subtraction_exact": not others.totals or digest(rest.totals) == digest(others.totals),
            "add_back_exact": digest(again.totals) == expected,
        }

    def _add_last(self) -> None:
        if self.last:
            self.halves[self.place % 2].add(*self.last)
            self.place += 1


def _merged(halves: Sequence[ExactSum]) -> ExactSum:
    """Return the sum of two sums."""
    total = halves[0].copy()
    if halves[1].totals:
        total.merge(halves[1].totals, halves[1].addends)
    return total


def _named(slot: str, check: str) -> str:
    return check if slot == "sum" else f"{slot}: {check}"
