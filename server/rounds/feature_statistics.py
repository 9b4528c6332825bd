"""Mean and deviation over all sites' training examples, by which every site standardises its own (data.standardise=sites).

Each site answers one question in the round in which it first trains: exact sums over its examples (fusion.wide). They are
in a slot of their own, so the ledger holds them, and forgetting a site subtracts them. Mean and deviation follow from the
sum, so they equal those of a run without the site, bit for bit.

Under secure aggregation, the new sites of a round are a cohort: they answer with one masked sum, which the server saves. A
single new site uses the others' mean and deviation. To forget a site, the rest of its cohort answers again. Both sums differ
by that site's. If only one site of the cohort remains, the cohort no longer has a sum.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedloom.clients.data import outputs
from fedloom.clients.data.standardise import (
    COUNT,
    KEY,
    NONE,
    SITE,
    SITES,
    STANDARDISATION,
    STATISTICS,
    Standardisation,
    check_sums,
    empty_sums,
    first_schema,
)
from fedloom.clients.objectives import Experiment
from fedloom.clients.protocol.partial_sums import ONCE
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State, digest
from fedloom.fusion.wide import carry
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.ledger.slots import Slots
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import MIN_MASKED_SITES

PLACES = "places"  # in a saved cohort: the indices of its sites
OTHERS = f"set {KEY}={NONE}, or {KEY}={SITE} with evaluation.where=sites"


def check(experiment: Experiment) -> None:
    """Raise UserError for a way to standardise that the run's other options exclude."""
    way, federation = experiment.standardise, experiment.federation
    if way == SITES and experiment.privacy.noise:
        raise UserError(f"{KEY}: '{SITES}' reads sums of features to which privacy.noise adds no noise; {OTHERS}")
    if way == SITES and federation.partial_sums:
        raise UserError(f"{KEY}: '{SITES}' needs a slot of its own, and federation.partial_sums takes only one; {OTHERS}")
    if way == SITE and experiment.evaluation.where == "server":
        raise UserError(f"{KEY}: with '{SITE}', only a site knows its mean and deviation; set evaluation.where=sites")


def with_statistics(experiment: Experiment, slots: Mapping[str, Slot]) -> Mapping[str, Slot]:
    """Return a method's slots, and the one of the sites' sums if the run needs it. Raises UserError if it has no place."""
    if experiment.standardise != SITES:
        return slots
    check(experiment)
    if experiment.federation.secure_aggregation:
        return slots
    name = experiment.config.strategy.get("name")
    if not slots:
        raise UserError(f"{KEY}: '{SITES}' needs a strategy with slots, and '{name}' has none; {OTHERS}")
    if STATISTICS in slots:
        raise UserError(f"strategy '{name}': the slot '{STATISTICS}' has the name of the framework's own; rename it")
    return {**slots, STATISTICS: Sum()}


@dataclass(frozen=True, eq=False)
class Cohort:
    """Sites that answered with one masked sum. `sums` is empty if too few of them remain."""

    sums: State
    names: Sequence[str]


class FeatureStatistics:
    """The mean and deviation of one run, and the sums of the sites that they follow from.

    Attributes:
        way: How the run standardises, one of NONE, SITE and SITES.
    """

    def __init__(self, experiment: Experiment, slots: Slots) -> None:
        self.experiment, self.slots, self.way = experiment, slots, experiment.standardise
        self._last: tuple[str, Standardisation | None] = ("", None)  # by digest of the sums

    def current(self) -> Standardisation | None:
        """Return the mean and deviation now, with those that came in this round; None before any site has answered.

        Raises:
            UserError: Only sites know them.
        """
        if self.way == SITE:
            raise UserError(f"{KEY}={SITE}: only a site knows its mean and deviation, so the server cannot use its examples")
        if self.way == NONE:
            return None
        if self.masked:
            saved = [cohort.sums for cohort in self._cohorts() if cohort.sums]
            totals = {name: torch.stack([sums[name] for sums in saved]).sum(0) for name in (saved[0] if saved else ())}
            return Standardisation.from_sums(totals) if saved else None
        total: ExactSum = self.slots.total(STATISTICS)
        if new := [sums for name, sums in self.slots.arriving.items() if self.slots.arrives(name)]:
            total = total.copy()
            for sums in new:
                total.add(sums)
        if not total.addends:
            return None
        if (key := digest(total.totals)) != self._last[0]:
            self._last = key, Standardisation.from_sums(total.totals)
        return self._last[1]

    def records(self) -> dict[str, State]:
        """Return the record for every message that makes a site read its examples; empty if the run needs none."""
        by = self.current() if self.way == SITES else None
        return {STANDARDISATION: by.state()} if by is not None else {}

    def ask(self, context: RoundContext) -> None:
        """Ask the round's participants that have not answered yet. A site without an answer does not participate.

        An answer counts once the site contributes something in this round. Otherwise the site is asked again.
        """
        if self.way != SITES:
            return
        if self.masked:
            self._ask_masked(context)
            return
        new = [site for site in context.participants if not self.slots.has(STATISTICS, site.name)]
        if not new:
            return

        def expected(site: Site) -> dict[str, RecordSpec]:
            return self._expected(site, context.most_samples(site))  # raises ReplyError for a site that did not enrol

        for reply in context.ask(STATISTICS, {}, expected, new, metrics=["samples"], needed=False):
            self.slots.arriving[reply.site.name] = reply[STATISTICS]
        silent = {site.name for site in new} - self.slots.arriving.keys()
        context.participants = [site for site in context.participants if site.name not in silent]

    @property
    def masked(self) -> bool:
        """Whether the server reads sums over several sites only (federation.secure_aggregation)."""
        return self.way == SITES and self.experiment.federation.secure_aggregation

    def has_summed(self, names: Sequence[str]) -> bool:
        """Return whether one of these sites is in a masked sum, so that without it the rest of its cohort answers again."""
        return self.masked and any(cohort.sums and not set(names).isdisjoint(cohort.names) for cohort in self._cohorts())

    def check_forgetting(self, names: Sequence[str]) -> None:
        """Raise UserError if without these sites no masked sum would be left, and too few new sites to read one."""
        if not self.has_summed(names):
            return
        cohorts = self._cohorts()
        new = {site.name for site in self.slots.members}.difference(*(cohort.names for cohort in cohorts))
        groups = [new, *(cohort.names for cohort in cohorts if cohort.sums)]
        if all(len(set(group) - set(names)) < MIN_MASKED_SITES for group in groups):
            raise UserError(f"{KEY}={SITES}: without {', '.join(names)}, no {MIN_MASKED_SITES} sites are left that first "
                            f"answered in the same round; start a new run without it, or with {KEY}={NONE}")  # fmt: skip

    def _cohorts(self) -> list[Cohort]:
        """Return the saved cohorts."""
        roster, saved = self.experiment.config.roster, dict[str, State]()
        for name, tensor in self.slots.keeps().get(STATISTICS, {}).items():
            number, _, part = name.partition(".")
            saved.setdefault(number, {})[part] = tensor
        return [Cohort(sums, [roster[place].name for place in sums.pop(PLACES).tolist()]) for sums in saved.values()]

    def _ask_masked(self, context: RoundContext) -> None:
        """Ask the rest of each cohort that a site leaves, and the new sites, each for one masked sum.

        Raises FailedError if a rest does not answer, or no sum would be left.
        """
        cohorts = [self._without(context, cohort) for cohort in self._cohorts()]
        known = {name for cohort in cohorts for name in cohort.names}
        new, summed = [site for site in context.participants if site.name not in known], any(each.sums for each in cohorts)
        if context.participants and (len(new) >= MIN_MASKED_SITES or not summed):
            try:
                cohorts.append(self._asked(context, new))
                silent = {site.name for site in new} - set(cohorts[-1].names)
                context.participants = [site for site in context.participants if site.name not in silent]
            except FailedError as error:
                if not summed:
                    raise
                context.message(f"{error}: new sites use the mean and deviation of the others ({KEY})")
        places = {site.name: site.index for site in self.experiment.config.roster}
        state: State = {}
        for number, cohort in enumerate(cohorts):
            parts = {**cohort.sums, PLACES: torch.tensor([places[name] for name in cohort.names], dtype=torch.int64)}
            state |= {f"{number}.{part}": tensor for part, tensor in parts.items()}
        self.slots.keep(STATISTICS, state)

    def _without(self, context: RoundContext, cohort: Cohort) -> Cohort:
        """Return a cohort without leaving sites, with a new sum over the rest, or with none if the rest is too small."""
        rest = [name for name in cohort.names if name not in context.leaving]
        if not cohort.sums or len(rest) == len(cohort.names):
            return Cohort(cohort.sums, rest)
        if len(rest) < MIN_MASKED_SITES:
            return Cohort({}, rest)
        return self._asked(context, [site for site in context.participants if site.name in rest], needed=rest)

    def _asked(self, context: RoundContext, sites: Sequence[Site], needed: Sequence[str] = ()) -> Cohort:
        """Ask sites for one masked sum; none is read without a `needed` one. Raises FailedError if too few answer."""
        sums, names = context.masked_sum(STATISTICS, self._expected(self.experiment.config.roster[0], 0), sites, needed)
        self._check_total(context, sums, names)
        return Cohort(sums, names)

    def _check_total(self, context: RoundContext, sums: State, names: Sequence[str]) -> None:
        """Raise FailedError for a sum that no examples have. Brings its digits into range."""
        for name, tensor in sums.items():
            if not name.endswith(COUNT):
                carry(tensor)
        most = [context.most_samples(site) for site in self.experiment.config.roster if site.name in names]
        try:
            check_sums(sums, first_schema(self.experiment.config), sum(most) if all(most) else 0)
        except ValueError as error:
            raise FailedError(f"round {context.number}: record '{STATISTICS}': {error}. The masks hide which site is at "
                              "fault") from None  # fmt: skip

    def _expected(self, site: Site, most: int) -> dict[str, RecordSpec]:
        outs, config = outputs(self.experiment.config, site.spec), self.experiment.config
        schema = first_schema(config)

        def possible(sums: State) -> None:
            try:
                check_sums(sums, schema, most)
            except ValueError as error:
                raise ReplyError(f"record '{STATISTICS}': {error}") from None

        like = empty_sums(schema, outs.stop - outs.start)
        return {STATISTICS: RecordSpec(like, mean=ONCE, bounded=False, integers=True, check=possible)}
