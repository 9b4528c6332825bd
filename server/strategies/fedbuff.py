"""FedBuff (Nguyen et al. 2022, Federated Learning with Buffered Asynchronous Aggregation), simulated in the round loop.

Every site trains all the time, and the server takes a step for every K contributions that arrive. A contribution is the
change from the network that its site began with, which may be s steps old. It counts with the weight 1/sqrt(1 + s).

The rounds stay synchronous: the seed draws how long each site takes, and from that follows which K sites a round waits for,
and which earlier network each of them began with. They train when their round comes, so a run takes no less time than
FedAvg with K sites, but has the staleness, bit by bit the same on all engines. A site that has sent its contribution waits
for the step that uses it.
"""

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fedloom.clients.objectives import Experiment
from fedloom.clients.protocol.messages import MEAN, SITE, TRAIN
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import generator
from fedloom.conf.sites import Site
from fedloom.conf.typed import option
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import Slot, Sum
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import Participation, Schedule
from fedloom.server.rounds.view import View
from fedloom.server.strategies.averaging import NETWORK, NETWORKS, ROUND, Averaging, counted, number_state, shared
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence


@STRATEGIES.register("fedbuff")
@dataclass(frozen=True)
class FedBuff(Averaging):
    """Buffered asynchronous averaging, with seeded speeds of sites: w <- w + rate mean of D_k / sqrt(1 + s_k) (Alg. 1)."""

    reads_contributions: ClassVar[bool] = True

    weighting: str = option(
        "equal", "weights of the sites in the mean: equal, or by their images", choices=("samples", "equal")
    )
    buffer: int = option(0, "contributions of a round (K); 0: half of the sites", low=0)
    rate: float = option(1.0, "learning rate of the server", low=0.0)
    spread: float = option(
        1.0, "of the sites' durations: standard deviation of their logarithm; 0: all equal", low=0.0, high=10.0
    )
    most_stale: int = option(10, "a slower site begins with the network of so many rounds ago", low=0, high=100)

    def check(self, experiment: Experiment) -> None:
        super().check(experiment)
        federation, sites = experiment.federation, len(experiment.sites)
        for key, on in {
            "federation.secure_aggregation": federation.secure_aggregation,
            "federation.partial_sums": federation.partial_sums,
            "privacy.noise": experiment.privacy.noise,
        }.items():
            if on:
                reads = "the server reads each contribution to weight it by its age"
                raise UserError(f"{key}: strategy fedbuff excludes it, because {reads}; switch it off, or use fedavg")
        if federation.fraction < 1.0:
            raise UserError(
                "federation.fraction: with strategy fedbuff all sites train; set strategy.buffer, and fraction to 1"
            )
        if self.buffer > sites or federation.min_replies > self._size(sites):
            raise UserError(f"strategy.buffer: got {self.buffer}, takes at most the number of sites ({sites}) and at least "
                            f"federation.min_replies ({federation.min_replies})")  # fmt: skip

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        return {NETWORKS: Sum(weighted=self.weighting == "samples")}

    def schedule(self, experiment: Experiment) -> Schedule:
        return Arrivals(experiment.seed, self._size(len(experiment.sites)), self.spread)

    def no_restoration(self, experiment: Experiment) -> str:
        return "slow sites still train from networks of before the subtraction"

    def round(self, context: RoundContext) -> None:
        """Let the sites whose contributions arrive train from the networks that they began with, and store their changes."""
        network = self.next_state(context)[NETWORK]
        context.save_server_state(NETWORK, network)
        context.save_server_state(ROUND, number_state(context.number))
        context.save_server_state(self._version(context.number - 1), network)
        began = self._began(context)
        starts = {version: context.server_state(self._version(version)) for version in set(began.values())}
        likes = {version: shared(context.experiment, start) for version, start in starts.items()}

        def expected(site: Site) -> dict[str, RecordSpec]:
            return {SITE: RecordSpec(likes[began[site.name]])}

        for reply in context.ask(TRAIN, lambda site: {MEAN: starts[began[site.name]]}, expected):
            version = began[reply.site.name]
            weight = 1 / math.sqrt(context.number - version)  # 1 + s
            change = {name: weight * (tensor - likes[version][name]) for name, tensor in reply[SITE].items()}
            context.put(NETWORKS, reply.site, change, reply.samples)

    def next_state(self, view: View) -> dict[str, State]:
        """Return the network after the contributions of the last round."""
        network, total = view.server_state(NETWORK), counted(view).total(NETWORKS)
        if not total.addends:
            return {NETWORK: network}
        step = total.mean()
        return {NETWORK: {**network, **{name: network[name] + self.rate * change for name, change in step.items()}}}

    def residue(self, view: View, names: Sequence[str] = ()) -> list[ResidualInfluence]:
        """Return where forgotten sites leave traces: all networks of earlier rounds, which slow sites still begin with."""
        traces = super().residue(view, tuple(names))
        reason = "they are the networks of earlier rounds, from which slow sites train; only the last step is repeated"
        return [*traces, ResidualInfluence("the networks that the server stores for slow sites", reason)] if traces else []

    def _size(self, sites: int) -> int:
        return self.buffer or -(-sites // 2)

    def _version(self, number: int) -> str:
        """Return the saved state of the network after a round. It replaces the oldest one."""
        return f"version-{number % (self.most_stale + 1)}"

    def _began(self, context: RoundContext) -> dict[str, int]:
        """Return, by participant, the round after which it received its network."""
        schedule = self.schedule(context.experiment)
        assert isinstance(schedule, Arrivals)
        oldest = max(0, context.number - 1 - self.most_stale)
        return {name: max(version, oldest) for name, version in schedule.arrivals(context.number, context.sites).items()}


@dataclass(frozen=True)
class Arrivals(Schedule):
    """Which sites' contributions fill the buffer of each round.

    Attributes:
        seed: Draws the sites' durations, each by (seed, site).
        buffer: The number of contributions of a round.
        spread: The standard deviation of the durations' logarithm.
    """

    seed: int
    buffer: int
    spread: float

    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        arriving = self.arrivals(round, members)
        return Participation([site for site in members if site.name in arriving], round)

    def arrivals(self, round: int, members: Sequence[Site]) -> dict[str, int]:
        """Return the sites whose contributions a round waits for, each with the round after which it began."""
        return _timeline(self, tuple(site.name for site in members)).round(round)


@dataclass
class _Timeline:
    """The simulated time of a fleet: when each site's contribution arrives."""

    seconds: dict[str, float]
    buffer: int
    _rounds: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    _under_way: list[tuple[float, str, int]] = field(default_factory=list[tuple[float, str, int]])

    def __post_init__(self) -> None:
        self._under_way = [(seconds, name, 0) for name, seconds in self.seconds.items()]
        heapq.heapify(self._under_way)

    def round(self, number: int) -> dict[str, int]:
        """Return the contributions of a round (from 1) by site, with the round after which the site began."""
        while len(self._rounds) < number:
            arrived = [heapq.heappop(self._under_way) for _ in range(min(self.buffer, len(self._under_way)))]
            self._rounds.append({name: began for _, name, began in arrived})
            for _, name, _ in arrived:  # they begin again when the last one has arrived
                heapq.heappush(self._under_way, (arrived[-1][0] + self.seconds[name], name, len(self._rounds)))
        return self._rounds[number - 1]


@functools.lru_cache(maxsize=8)
def _timeline(schedule: Arrivals, names: tuple[str, ...]) -> _Timeline:
    draws = {name: generator(schedule.seed, name, "speed").standard_normal() for name in names}
    return _Timeline({name: math.exp(schedule.spread * draw) for name, draw in draws.items()}, schedule.buffer)
