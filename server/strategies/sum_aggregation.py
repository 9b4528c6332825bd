"""Sum aggregation at the server: S = N_1 + ... + N_n in exact integers, and forgetting by subtraction.

Source: sum aggregation, Sec. 3. The aggregated network is the sum of the sites' networks (Eq. 1), and forgetting a site
subtracts its network. A site's first contribution is its initial network. The server also saves averages over each round's
replies: the shared head and, in the paper's own mode (`regularised`), the free network N*.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from fedloom.clients.networks import Model
from fedloom.clients.networks.base import EXTRACTOR, HEAD
from fedloom.clients.objectives import Experiment
from fedloom.clients.objectives.modes import AGGREGATE, Mode, mode_of
from fedloom.clients.protocol.messages import MEAN, ROUND, SITE, STAR, SUBSET, TRAIN
from fedloom.clients.protocol.partial_sums import ONCE, SAMPLES
from fedloom.conf.errors import UserError
from fedloom.conf.typed import option
from fedloom.fusion.exact import ExactSum, dequantise, quantise
from fedloom.fusion.state import State, moved_back
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import sample_size
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence, Strategy, check_objective, counter

NETWORKS = "sum"  # the slot
LOW = 0.5  # up to this share of sites in a round, warn that the sum moves slowly
SHARED = "shared"  # the saved averages over each round's replies
WEIGHTINGS = {"equal": ONCE, "samples": SAMPLES}
STAR_NORMS, SITE_NORMS = "star", "sites"


@STRATEGIES.register("sum_aggregation")
@dataclass(frozen=True)
class SumAggregationStrategy(Strategy):
    """The sum of the sites' networks, from which any site can be subtracted. Its objective is `sum_aggregation`."""

    default_objective: ClassVar[str] = "sum_aggregation"

    subsets: int = option(
        16, "number of leave-one-out means to send per round, at most (if objective.subset_probability > 0)", low=1
    )
    weighting: str = option(
        "equal", "weights of the replies in round averages (head, N*, fedavg)", choices=tuple(WEIGHTINGS)
    )
    norms: str = option(
        STAR_NORMS,
        "mode=regularised: scale and shift of the sum's norms: those of N* (as in the paper), or the mean over the sites",
        choices=(STAR_NORMS, SITE_NORMS),
    )

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """Return one sum of networks: all layers or, by mode, only convolutions; with norms=sites also the norms."""
        mode = mode_of(experiment.objective)
        summed = partial(_part, prefix=EXTRACTOR) if self.norms == SITE_NORMS else mode.summed_part
        return {NETWORKS: Sum(summed, resumable=True)} if mode.sums else {}

    def check(self, experiment: Experiment) -> None:
        check_objective(experiment, self, "sum_aggregation")
        if (
            experiment.federation.secure_aggregation
            and mode_of(experiment.objective).subsets
            and experiment.config.objective.get("subset_probability")
        ):
            raise UserError("objective.subset_probability: a mean without one site needs that site's network, which "
                            "federation.secure_aggregation hides; set it to 0")  # fmt: skip
        if experiment.federation.secure_aggregation and WEIGHTINGS[self.weighting] == SAMPLES:
            raise UserError("federation.secure_aggregation: masked sums have no sample counts; set strategy.weighting=equal")
        if not mode_of(experiment.objective).subsets and experiment.config.objective.get("initialisation") == AGGREGATE:
            raise UserError(f"objective.initialisation: {AGGREGATE} works only with mode=exact; take shared or own")
        if self.norms == SITE_NORMS and not mode_of(experiment.objective).star:
            raise UserError("strategy.norms: sites works only with objective.mode=regularised; leave it out")
        experiment.common_architecture()
        if name := counter(experiment):
            if name.endswith(".num_batches_tracked"):
                raise UserError(f"network.norm: the counter '{name}' cannot be averaged; take norm=group or norm=none")
            raise UserError(f"network: '{name}' holds whole numbers, which cannot be averaged; register it with "
                            "persistent=False if it is a constant")  # fmt: skip

    def warnings(self, experiment: Experiment) -> Sequence[str]:
        """Warn that a sum over many sites moves slowly if few of them are asked in a round."""
        mode, sites = mode_of(experiment.objective), len(experiment.sites)
        if not mode.sums or (asked := sample_size(experiment.config, sites)) > LOW * sites:
            return ()
        begin_text = f"federation.fraction={experiment.federation.fraction:g}: a round asks {asked} of {sites} sites, and"
        advice = "a larger fraction or more rounds may help"
        if mode.star:
            return (f"{begin_text} sites that have not trained yet slow down the sum; {advice}",)
        if experiment.config.objective.get("initialisation") == AGGREGATE:
            return ()
        slow = "the aggregate, the mean over all sites that have trained, changes more slowly than with fedavg"
        begin = f"objective.initialisation={AGGREGATE} (sites that join start from it, but more of a forgotten site remains)"
        return (f"{begin_text} {slow}; {begin}, {advice}",)

    def begin(self, context: RoundContext) -> None:
        """Set the first sum S_0 to that of the sites' initial networks. The seed draws the head and N*.

        If a round does not ask all sites, S_0 is empty. A site then enters the sum with its first trained network.
        """
        mode, shared = mode_of(context.experiment.objective), context.initial()
        if mode.sums and _all_begin(context):
            if _own_start(context):
                for site in context.sites:
                    context.put(NETWORKS, site, _start(context, site.name))
            else:
                context.put_all(NETWORKS, mode.site_part(context.initial()))
        shared = dequantise(quantise(shared, context.bits), context.bits)
        if mode.star:
            shared = {**shared, **mode.summed_part(context.sum(NETWORKS))}
        context.save_server_state(SHARED, shared if mode.star or not mode.sums else _part(shared, HEAD))

    def round(self, context: RoundContext) -> None:
        """Send the mean network (and N*). Replace the N_i of each site that answers, and average the heads (and N*)."""
        mode, shared = mode_of(context.experiment.objective), context.server_state(SHARED)
        entering = [site.name for site in context.participants if mode.sums and not context.has(NETWORKS, site.name)]
        mean = {**(_mean(context, entering) if mode.sums else shared), **_part(shared, HEAD)}
        if context.restoration and context.restoration.back:
            mean = moved_back(mean, _initial_mean(context), context.restoration.back)
        content = {MEAN: mean}
        if mode.star:
            content[STAR] = _part(shared, EXTRACTOR)
        expected = {ROUND: RecordSpec(shared, mean=WEIGHTINGS[self.weighting])}
        if mode.sums:
            expected[SITE] = RecordSpec(slot=NETWORKS, first=_starts(context) if entering else None)
        context.save_server_state(
            SHARED, context.gather(TRAIN, {**content, **self._leave_one_out(context, mode, entering)}, expected)[ROUND]
        )

    def models(self, view: View) -> Models:
        """Return the aggregate, the free network N* and every site's N_i.

        The aggregate is the paper's sum with N*'s other weights, or our mean, or the round average, by mode.
        """
        mode, shared = mode_of(view.experiment.objective), view.server_state(SHARED)

        def aggregate() -> State:
            if not mode.sums:
                return shared
            if not mode.star:
                return {**shared, **_mean(view)}
            norms = view.mean(NETWORKS) if self.norms == SITE_NORMS else {}
            return {**shared, **norms, **mode.summed_part(view.sum(NETWORKS))}

        def own(site: str) -> State:
            return {**_part(shared, HEAD), **view.contribution(NETWORKS, site)}

        makers = {mode.display_name: aggregate, **({"star": lambda: shared} if mode.star else {})}
        readable = mode.sums and not view.config.federation.secure_aggregation
        names = [site.name for site in view.sites if readable and view.has(NETWORKS, site.name)]
        makers |= {name: partial(own, name) for name in names}
        return Models({name: partial(_model, view, state) for name, state in makers.items()})

    def initial_contribution(self, view: View, site: str) -> Mapping[str, State]:
        """Return the site's initial network, its own or the shared one, if the sum holds initial networks."""
        return {NETWORKS: _start(view, site)} if _all_begin(view) else {}

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        if not view.rounds_with(names):
            return ()  # no training yet
        averaged = "averaged over rounds in which the forgotten sites participated; subtraction does not change"
        others = "they were trained while the forgotten sites' networks were in the sum; subtraction does not change them"
        if _initialisation(view) == AGGREGATE:
            others += ". Sites that joined later started from an aggregate that included the forgotten sites' networks"
        traces = [
            ResidualInfluence("head", f"the shared head was {averaged} it"),
            ResidualInfluence("other sites' networks", others),
        ]
        if mode_of(view.experiment.objective).star:
            kept = f"they were {averaged} them, and the ledger stores them"
            traces.append(ResidualInfluence("N* and all tensors that are not summed", kept))
        return traces

    def no_restoration(self, experiment: Experiment) -> str:
        if not mode_of(experiment.objective).subsets:
            return f"objective.mode={experiment.objective.mode} has no restoration, only exact has"
        limited = experiment.federation.clip_change > 0.0
        return "federation.clip_change limits how far a site's network may move back" if limited else ""

    def _leave_one_out(self, context: RoundContext, mode: Mode, entering: Sequence[str]) -> dict[str, State]:
        """Return means without one site, for randomly drawn sites, if sites train on such means."""
        sites = [site for site in context.sites if context.has(NETWORKS, site.name)] if mode.sums else []
        if (
            context.restoration
            or not context.config.objective.get("subset_probability")
            or not mode.subsets
            or len(sites) < 2
        ):
            return {}
        chosen = context.rng("subsets").choice(len(sites), size=min(self.subsets, len(sites)), replace=False)
        names = [sites[int(index)].name for index in np.sort(chosen)]
        return {SUBSET + name: _mean(context.without([name]), entering) for name in names}


def _all_begin(view: View) -> bool:
    """Return whether the sum holds all sites from the start.

    The run's record decides. Before the first round, the configuration decides.
    """
    start = next(view.ledger.events("round"), None)
    if start is not None:
        return bool(start.body["contributions"])
    everyone = sample_size(view.experiment.config, len(view.sites)) >= len(view.sites)
    return mode_of(view.experiment.objective).star or (everyone and _initialisation(view) != AGGREGATE)


def _start(view: View, site: str) -> State:
    """Return the state from which a site starts: its own initial network, the shared one, or the aggregate."""
    if _initialisation(view) == AGGREGATE:
        return _mean(view)
    return mode_of(view.experiment.objective).site_part(view.initial(site) if _own_start(view) else view.initial())


def _starts(view: View) -> Callable[[str], State]:
    """Return `_start` as a function of the site's name. A shared state is computed once."""
    if _own_start(view):
        return partial(_start, view)
    shared = _start(view, "")
    return lambda site: shared


def _mean(view: View, entering: Sequence[str] = ()) -> State:
    """Return the mean over the sites in the sum and the entering sites, which count with their initial networks.

    Without any site, return the initial network.
    """
    total, part = view.total(NETWORKS), mode_of(view.experiment.objective).summed_part
    if total.addends and (not entering or _initialisation(view) == AGGREGATE):
        return total.mean()
    total = total.copy()
    if entering and _own_start(view):
        for name in entering:
            total.add(quantise(part(_start(view, name)), view.bits))
    else:
        total.add(quantise(part(view.initial()), view.bits), times=max(1, len(entering)))
    return total.mean()


def _initial_mean(view: View) -> State:
    """Return the mean of the remaining sites' initial networks."""
    if not _own_start(view):
        return view.initial()
    total = ExactSum(view.bits)
    for site in view.sites:
        total.add(quantise(view.initial(site.name), view.bits))
    return {**view.initial(), **total.mean()}


def _initialisation(view: View) -> str:
    name = view.config.objective.get("initialisation", "shared")
    return name if name != AGGREGATE or mode_of(view.experiment.objective).subsets else "shared"


def _own_start(view: View) -> bool:
    return _initialisation(view) == "own"


def _model(view: View, state: Callable[[], State]) -> Model:
    return Model(view.architecture(), state())


def _part(state: State, prefix: str) -> State:
    return {name: tensor for name, tensor in state.items() if name.startswith(prefix)}
