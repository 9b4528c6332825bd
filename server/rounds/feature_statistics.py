"""Mean and deviation over all sites' training examples, by which every site standardises its own (data.standardise=sites).

Each site answers one question in the round in which it first trains: exact sums over its examples (fusion.wide). They are
in a slot of their own, so the ledger holds them, and forgetting a site subtracts them. Mean and deviation follow from the
sum, so they equal those of a run without the site, bit for bit.
"""

from collections.abc import Mapping

from fedloom.clients.data import outputs
from fedloom.clients.data.standardise import (
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
from fedloom.clients.protocol.reply_checks import ReplyError
from fedloom.conf.errors import UserError
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State, digest
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.ledger.slots import Slots
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec

OTHERS = f"set {KEY}={SITE} or {NONE}"


def check(experiment: Experiment) -> None:
    """Raise UserError for a way to standardise that the run's other options exclude."""
    way, federation = experiment.standardise, experiment.federation
    hidden = {"federation.secure_aggregation": federation.secure_aggregation, "privacy.noise": experiment.privacy.noise}
    if way == SITES and (key := next((key for key, item in hidden.items() if item), "")):
        raise UserError(f"{KEY}: '{SITES}' reads sums over each site's features, which {key} hides; {OTHERS}")
    if way == SITES and federation.partial_sums:
        raise UserError(f"{KEY}: '{SITES}' needs a slot of its own, and federation.partial_sums takes only one; {OTHERS}")
    if way == SITE and experiment.evaluation.where == "server":
        raise UserError(f"{KEY}: with '{SITE}', only a site knows its mean and deviation; set evaluation.where=sites")


def with_statistics(experiment: Experiment, slots: Mapping[str, Slot]) -> Mapping[str, Slot]:
    """Return a method's slots, and the one of the sites' sums if the run needs it. Raises UserError if it has no place."""
    if experiment.standardise != SITES:
        return slots
    check(experiment)
    name = experiment.config.strategy.get("name")
    if not slots:
        raise UserError(f"{KEY}: '{SITES}' needs a strategy with slots, and '{name}' has none; {OTHERS}")
    if STATISTICS in slots:
        raise UserError(f"strategy '{name}': the slot '{STATISTICS}' has the name of the framework's own; rename it")
    return {**slots, STATISTICS: Sum()}


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
        new = [site for site in context.participants if not self.slots.has(STATISTICS, site.name)]
        if not new:
            return
        expected = {site.name: self._expected(site, context.most_samples(site)) for site in new}
        for reply in context.ask(STATISTICS, {}, lambda site: expected[site.name], new, metrics=["samples"], needed=False):
            self.slots.arriving[reply.site.name] = reply[STATISTICS]
        silent = {site.name for site in new} - self.slots.arriving.keys()
        context.participants = [site for site in context.participants if site.name not in silent]

    def _expected(self, site: Site, most: int) -> dict[str, RecordSpec]:
        outs, config = outputs(self.experiment.config, site.spec), self.experiment.config
        schema = first_schema(config)

        def possible(sums: State) -> None:
            try:
                check_sums(sums, schema, most)
            except ValueError as error:
                raise ReplyError(f"record '{STATISTICS}': {error}") from None

        like = empty_sums(schema, outs.stop - outs.start)
        return {STATISTICS: RecordSpec(like, bounded=False, integers=True, check=possible)}
