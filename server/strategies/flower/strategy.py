"""A strategy of Flower's at work in our round loop: it says who is asked and what the next network is, the rest is ours.

Its rule may be no sum (a median, say), so that a site's part in an earlier round cannot be subtracted. Of the last round it
can: what sites sent is kept, each by itself, beside what the strategy remembered when the round began, and aggregated again
without a site that is forgotten.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import strategy as flower

from fedloom.clients.networks import Model
from fedloom.clients.objectives import Experiment
from fedloom.clients.protocol.messages import MEAN, SITE, TRAIN
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.plugins import call, told
from fedloom.conf.sites import Site
from fedloom.fusion.state import State
from fedloom.server.ledger.declared import PerClientSlot, Slot
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.view import Models, View
from fedloom.server.strategies.averaging import NETWORK, NETWORKS, ROUND, counted, shared
from fedloom.server.strategies.base import STRATEGIES, ResidualInfluence, Strategy, check_objective
from fedloom.server.strategies.flower.memory import arrays_of, put_back, remembered, state_of
from fedloom.server.strategies.flower.nodes import Nodes, drawing, quiet, take_identity

ARRAYS, MEMORY, DRAWN = "arrays", "memory", "flower"
SAMPLES, LOSS = "num-examples", "train_loss"  # what sites report
TOLD = "told/"  # before the name of a number in a contribution
ROUND_KEY, MU = "server-round", "proximal-mu"  # of what a strategy tells the sites
TREES = (flower.FedXgbBagging, flower.FedXgbCyclic)
NOISY = tuple(one for name, one in vars(flower).items() if name.startswith("DifferentialPrivacy"))


@dataclass(frozen=True, eq=False)
class FlowerStrategy(Strategy):
    """`make(**options)` gives the strategy, as Flower's documentation says."""

    name: str
    make: Callable[..., Any]
    options: Mapping[str, Any]
    where: str

    def fresh(self) -> Any:
        """The strategy, newly made. UserError for an option that it does not take."""
        return call(self.make, self.options, {}, self.name, self.where)

    @property
    def default_objective(self) -> str:  # type: ignore[override]  # of an instance
        """FedProx's sites hold to its rule."""
        return "fedprox" if issubclass(self.make, flower.FedProx) else "fedavg"  # type: ignore[arg-type]

    @property
    def objective_defaults(self) -> Mapping[str, Any]:
        """Options of the objective that follow from those of the strategy."""
        return {"mu": self.fresh().proximal_mu} if self.default_objective == "fedprox" else {}

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        """What each site sent last; no sum."""
        return {NETWORKS: PerClientSlot()}

    def check(self, experiment: Experiment) -> None:
        """UserError for another sites' half, fewer sites than it waits for, numbers that nobody reports."""
        check_objective(experiment, self.default_objective)
        experiment.common_architecture()
        self._check_options()
        inner, sites = self.fresh(), len(experiment.sites)
        for key in ("min_available_nodes", "min_train_nodes"):
            if getattr(inner, key, 0) > sites:
                why = f"got {getattr(inner, key)}, there are {sites} sites, and it would wait for others"
                raise UserError(f"{self.where}.{key}: {why}; set it to {sites} or less")
        if getattr(inner, "fraction_train", 1.0) == 0:
            raise UserError(f"{self.where}.fraction_train: got 0: no site would train")
        if (key := getattr(inner, "weighted_by_key", SAMPLES)) not in (SAMPLES, LOSS):
            raise UserError(f"{self.where}.weighted_by_key: got '{key}', sites report {SAMPLES} and {LOSS}")
        for option, here in self.objective_defaults.items():
            if experiment.config.objective.get(option, here) != here:
                raise UserError(
                    f"objective.{option}: got {experiment.config.objective[option]}, the strategy says {here}; leave it out"
                )

    def _check_options(self) -> None:
        for key, option in self.options.items():
            if key.endswith("_fn") or key in ("selection_rule", "accountant", "strategy"):
                raise UserError(f"{self.where}.{key}: got {option!r}, takes an object of Python, which no configuration "
                                "holds; derive a strategy in a module of yours and name that")  # fmt: skip

    def warnings(self, experiment: Experiment) -> Sequence[str]:
        """What forgetting is with it."""
        ours = self.make.__name__.lower()
        instead = f"; strategy.name={ours} is ours, with exact sums" if ours in STRATEGIES.names() else ""
        return [
            f"strategy '{self.name}': its networks are no exact sums: of a site that is forgotten what it sent is deleted, "
            f"and the last round aggregated again without it; what it left in earlier rounds stays{instead}"
        ]

    def begin(self, context: RoundContext) -> None:
        """The network starts at theta_0."""
        context.save_server_state(NETWORK, context.initial())
        context.save_server_state(ARRAYS, shared(context.experiment, context.initial()))
        context.save_server_state(MEMORY, {})
        context.save_server_state(ROUND, {"number": torch.tensor(0)})

    def round(self, context: RoundContext) -> None:
        """Ask whom it asks; put what they send."""
        inner, arrays = self._after(context)
        config, sites = ConfigRecord(), Nodes(context.participants)
        self._check_enough(inner, len(context.participants))
        with drawing(context.rng(DRAWN)):
            messages = self._guarded(lambda: list(inner.configure_train(context.number, arrays_of(arrays), config, sites)))
        context.save_server_state(ARRAYS, arrays)
        context.save_server_state(MEMORY, remembered(inner, self.fresh()))
        context.save_server_state(ROUND, {"number": torch.tensor(context.number)})
        sent = {sites.sites[one.metadata.dst_node_id].name: self._sent(context, one) for one in messages}
        asked = [site for site in context.participants if site.name in sent]
        like = shared(context.experiment, context.server_state(NETWORK))
        for reply in context.ask(TRAIN, lambda site: {MEAN: sent[site.name]}, {SITE: RecordSpec(like)}, asked):
            numbers = {TOLD + LOSS: torch.tensor(reply.metrics["loss"], dtype=torch.float32)}
            context.put(NETWORKS, reply.site, {**reply[SITE], **numbers}, reply.samples)

    def models(self, view: View) -> Models:
        """Its network, under its name."""

        def model() -> Model:
            return Model(view.architecture(), _whole(view, self._after(view)[1]))

        return Models({self.make.__name__.lower(): model})

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        """All that comes from rounds before the last one."""
        if view.rounds_with(names) < 2:
            return ()
        why = "made of rounds in which the forgotten sites took part; the last round alone is aggregated again without them"
        return (ResidualInfluence("the network, what the strategy remembers, and the other sites' networks", why),)

    def _after(self, view: View) -> tuple[Any, State]:
        """The strategy as it is after the last round, and what it made of it."""
        inner, arrays = put_back(self.fresh(), view.server_state(MEMORY)), view.server_state(ARRAYS)
        replies = [self._reply(view, site) for site in counted(view).sites]
        if not replies:
            return inner, arrays
        number = int(view.server_state(ROUND)["number"])
        made = self._guarded(lambda: _network(*inner.aggregate_train(number, replies)))
        return inner, arrays if made is None else made

    def _reply(self, view: View, site: Site) -> Message:
        """What a site sent last, as Flower's ClientApps send it."""
        one, sent = view.slots.contributions.here(site.name), view.slots.contributions.floats(site.name, NETWORKS)
        assert one is not None
        numbers = {name.removeprefix(TOLD): float(sent.pop(name)) for name in list(sent) if name.startswith(TOLD)}
        metrics = MetricRecord({SAMPLES: one.samples, **numbers})
        take_identity()
        asked = Message(RecordDict(), site.index + 1, TRAIN)
        return Message(RecordDict({ARRAYS: arrays_of(sent), "metrics": metrics}), reply_to=asked)

    def _sent(self, view: View, message: Message) -> State:
        """The network in a message to a site. FailedError for what no site of ours reads."""
        keys = [key for record in message.content.config_records.values() for key in record]
        if odd := next((key for key in keys if key not in (ROUND_KEY, MU)), ""):
            raise FailedError(f"strategy '{self.name}': tells the sites '{odd}', which their objective does not read; what "
                              "sites do is said by objective and training")  # fmt: skip
        records = list(message.content.array_records.values())
        if len(records) != 1:
            raise FailedError(f"strategy '{self.name}': sends {len(records)} records of arrays, sites take one")
        return _whole(view, state_of(records[0]))

    def _check_enough(self, inner: Any, sites: int) -> None:
        needed = max(getattr(inner, key, 0) for key in ("min_available_nodes", "min_train_nodes"))
        if needed > sites:
            raise FailedError(f"{self.where}.min_available_nodes: {needed} sites are waited for, and {sites} take part")

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """What a strategy gives; FailedError for whatever it raises."""
        try:
            with quiet():
                return work()
        except (UserError, FailedError):
            raise
        except Exception as error:
            raise FailedError(f"strategy '{self.name}': failed ({told(error)})") from error


def _network(arrays: ArrayRecord | None, metrics: Any) -> State | None:
    """Of what aggregate_train gave."""
    return None if arrays is None else state_of(arrays)


@STRATEGIES.adapter
def flower_strategy(name: str, found: Any, options: Mapping[str, Any], where: str) -> Strategy:
    """A strategy of Flower's, or one that is derived from them."""
    if not (isinstance(found, type) and issubclass(found, flower.Strategy)):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"of the type {type(found).__name__}"
        raise UserError(f"{where}.name: '{name}' is {what}, takes a dataclass derived from fedloom.Strategy, or a "
                        "class derived from flwr.serverapp.strategy.Strategy")  # fmt: skip
    if issubclass(found, TREES):
        raise UserError(f"{where}.name: '{name}' gathers trees of XGBoost, and sites here train networks")
    if issubclass(found, NOISY):
        raise UserError(f"{where}.name: '{name}' wraps another strategy and draws noise that no record can repeat; take "
                        "privacy.clip and privacy.noise with strategy.name=fedavg")  # fmt: skip
    return FlowerStrategy(name, found, dict(options), where)


def _whole(view: View, arrays: State) -> State:
    """All of the network: what the strategy does not see is as it began."""
    network = view.server_state(NETWORK)
    if odd := next((name for name, one in arrays.items() if name not in network or one.shape != network[name].shape), ""):
        raise FailedError(f"strategy: its tensor '{odd}' is none of the network's; it must give what it was given")
    return {**network, **{name: one.to(network[name].dtype) for name, one in arrays.items()}}
