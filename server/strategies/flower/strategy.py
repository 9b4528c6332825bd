"""A Flower strategy in our round loop: it chooses the sites and computes the next network, and Fedloom does the rest.

Its rule may not be a sum (a median, for example), so a site's part in an earlier round cannot be subtracted. But the last
round can be repeated: the ledger stores each site's contribution and the strategy's state at the start of the round.
Without a forgotten site, the contributions are aggregated again.
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
from fedloom.conf.plugins import call, error_summary
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
SAMPLES, LOSS = "num-examples", "train_loss"  # metrics that sites report
METRIC = "told/"  # prefix of a number's name in a contribution
ROUND_KEY, MU = "server-round", "proximal-mu"  # keys of the config that a strategy sends to sites
TREES = (flower.FedXgbBagging, flower.FedXgbCyclic)
NOISY = tuple(one for name, one in vars(flower).items() if name.startswith("DifferentialPrivacy"))


@dataclass(frozen=True, eq=False)
class FlowerStrategy(Strategy):
    """A Flower strategy as a Fedloom strategy. `make(**options)` creates it, as in Flower's documentation."""

    name: str
    make: Callable[..., Any]
    options: Mapping[str, Any]
    where: str

    def fresh(self) -> Any:
        """Return a new instance of the strategy. Raise UserError for an unknown option."""
        return call(self.make, self.options, {}, self.name, self.where)

    @property
    def default_objective(self) -> str:  # type: ignore[override]  # depends on the instance
        """The objective: `fedprox` for Flower's FedProx, else `fedavg`."""
        return "fedprox" if issubclass(self.make, flower.FedProx) else "fedavg"  # type: ignore[arg-type]

    @property
    def objective_defaults(self) -> Mapping[str, Any]:
        """The value of `mu` for Flower's FedProx."""
        return {"mu": self.fresh().proximal_mu} if self.default_objective == "fedprox" else {}

    def slots(self, experiment: Experiment) -> Mapping[str, Slot]:
        return {NETWORKS: PerClientSlot()}

    def check(self, experiment: Experiment) -> None:
        check_objective(experiment, self, self.default_objective)
        experiment.common_architecture()
        self._check_options()
        inner, sites = self.fresh(), len(experiment.sites)
        for key in ("min_available_nodes", "min_train_nodes"):
            if getattr(inner, key, 0) > sites:
                problem = f"got {getattr(inner, key)}, but there are {sites} sites, and it would wait for more"
                raise UserError(f"{self.where}.{key}: {problem}; set it to {sites} or less")
        if getattr(inner, "fraction_train", 1.0) == 0:
            raise UserError(f"{self.where}.fraction_train: got 0, so no site would train; take more than 0")
        if (key := getattr(inner, "weighted_by_key", SAMPLES)) not in (SAMPLES, LOSS):
            raise UserError(f"{self.where}.weighted_by_key: got '{key}', but sites report only {SAMPLES} and {LOSS}")
        for option, own in self.objective_defaults.items():
            if experiment.config.objective.get(option, own) != own:
                raise UserError(
                    f"objective.{option}: got {experiment.config.objective[option]}, the strategy needs {own}; leave it out"
                )

    def _check_options(self) -> None:
        for key, option in self.options.items():
            if key.endswith("_fn") or key in ("selection_rule", "accountant", "strategy"):
                raise UserError(f"{self.where}.{key}: got {option!r}, needs a Python object, which a configuration cannot "
                                "hold; write a subclass of the strategy in your module, and name that")  # fmt: skip

    def warnings(self, experiment: Experiment) -> Sequence[str]:
        """Warn that forgetting is not exact with this strategy."""
        ours = self.make.__name__.lower()
        instead = f"; Fedloom's strategy.name={ours} has exact sums" if ours in STRATEGIES.names() else ""
        return [
            f"strategy '{self.name}': its networks are not exact sums. Forgetting a site deletes its contribution, and "
            f"repeats the last round's aggregation without it; its influence on earlier rounds stays{instead}"
        ]

    def begin(self, context: RoundContext) -> None:
        context.save_server_state(NETWORK, context.initial(exact=True))
        context.save_server_state(ARRAYS, shared(context.experiment, context.initial()))
        context.save_server_state(MEMORY, {})
        context.save_server_state(ROUND, {"number": torch.tensor(0)})

    def round(self, context: RoundContext) -> None:
        """Ask the sites that the strategy chooses, and store their contributions."""
        inner, arrays = self._after(context)
        config, sites = ConfigRecord(), Nodes(context.participants)
        self._check_enough(inner, len(context.participants))
        with drawing(context.rng(DRAWN)):
            messages = self._guarded(lambda: list(inner.configure_train(context.number, arrays_of(arrays), config, sites)))
        context.save_server_state(ARRAYS, arrays)
        context.save_server_state(MEMORY, remembered(inner, self.fresh()))
        context.save_server_state(ROUND, {"number": torch.tensor(context.number)})
        sent = {sites.sites[message.metadata.dst_node_id].name: self._sent(context, message) for message in messages}
        asked = [site for site in context.participants if site.name in sent]
        like = shared(context.experiment, context.server_state(NETWORK))
        for reply in context.ask(TRAIN, lambda site: {MEAN: sent[site.name]}, {SITE: RecordSpec(like)}, asked):
            numbers = {METRIC + LOSS: torch.tensor(reply.metrics["loss"], dtype=torch.float32)}
            context.put(NETWORKS, reply.site, {**reply[SITE], **numbers}, reply.samples)

    def models(self, view: View) -> Models:

        def model() -> Model:
            return Model(view.architecture(), _complete(view, self._after(view)[1]))

        return Models({self.make.__name__.lower(): model})

    def residue(self, view: View, names: Sequence[str] = ()) -> Sequence[ResidualInfluence]:
        if view.rounds_with(names) < 2:
            return ()
        reason = "computed from rounds of the forgotten sites; only the last round is repeated without them"
        return (ResidualInfluence("the network, the strategy's saved state, and the other sites' networks", reason),)

    def _after(self, view: View) -> tuple[Any, State]:
        """Return the strategy after the last round, and the network that it computed."""
        inner, arrays = put_back(self.fresh(), view.server_state(MEMORY)), view.server_state(ARRAYS)
        replies = [self._reply(view, site) for site in counted(view).sites]
        if not replies:
            return inner, arrays
        number = int(view.server_state(ROUND)["number"])
        network = self._guarded(lambda: _network(*inner.aggregate_train(number, replies)))
        return inner, arrays if network is None else network

    def _reply(self, view: View, site: Site) -> Message:
        """Return a site's last contribution as a message, as Flower's ClientApps send it."""
        contribution, sent = view.slots.contributions.here(site.name), view.slots.contributions.floats(site.name, NETWORKS)
        assert contribution is not None
        numbers = {name.removeprefix(METRIC): float(sent.pop(name)) for name in list(sent) if name.startswith(METRIC)}
        metrics = MetricRecord({SAMPLES: contribution.samples, **numbers})
        take_identity()
        question = Message(RecordDict(), site.index + 1, TRAIN)
        return Message(RecordDict({ARRAYS: arrays_of(sent), "metrics": metrics}), reply_to=question)

    def _sent(self, view: View, message: Message) -> State:
        """Return the network in a message to a site. Raise FailedError if sites here cannot read the message."""
        keys = [key for record in message.content.config_records.values() for key in record]
        if unread := next((key for key in keys if key not in (ROUND_KEY, MU)), ""):
            raise FailedError(f"strategy '{self.name}': it sends the sites '{unread}', which their objective does not read; "
                              "set options of `objective` and `training` instead")  # fmt: skip
        records = list(message.content.array_records.values())
        if len(records) != 1:
            raise FailedError(f"strategy '{self.name}': it sends {len(records)} records of arrays, but sites take one")
        return _complete(view, state_of(records[0]))

    def _check_enough(self, inner: Any, sites: int) -> None:
        needed = max(getattr(inner, key, 0) for key in ("min_available_nodes", "min_train_nodes"))
        if needed > sites:
            raise FailedError(f"{self.where}.min_available_nodes: it waits for {needed} sites, and {sites} participate")

    def _guarded(self, work: Callable[[], Any]) -> Any:
        """Return what a call of the strategy returns. Raise FailedError if it fails."""
        try:
            with quiet():
                return work()
        except (UserError, FailedError):
            raise
        except Exception as error:
            raise FailedError(f"strategy '{self.name}': failed ({error_summary(error)})") from error


def _network(arrays: ArrayRecord | None, metrics: Any) -> State | None:
    """Return the network that aggregate_train returned, or None."""
    return None if arrays is None else state_of(arrays)


@STRATEGIES.adapter
def flower_strategy(name: str, found: Any, options: Mapping[str, Any], where: str) -> Strategy:
    """Return the adapter of a Flower strategy (the class `found`). Raises UserError, naming `where`, for other classes."""
    if not (isinstance(found, type) and issubclass(found, flower.Strategy)):
        kind = f"the class {found.__name__}" if isinstance(found, type) else f"of the type {type(found).__name__}"
        raise UserError(f"{where}.name: '{name}' is {kind}, takes a dataclass derived from fedloom.Strategy, or a "
                        "class derived from flwr.serverapp.strategy.Strategy")  # fmt: skip
    if issubclass(found, TREES):
        raise UserError(f"{where}.name: '{name}' collects XGBoost's trees, but sites here train networks")
    if issubclass(found, NOISY):
        raise UserError(f"{where}.name: '{name}' wraps another strategy and draws noise that a resumed run cannot repeat; "
                        "use privacy.clip and privacy.noise with strategy.name=fedavg")  # fmt: skip
    return FlowerStrategy(name, found, dict(options), where)


def _complete(view: View, arrays: State) -> State:
    """Return the complete network. Tensors that the strategy does not see keep their initial values."""
    network = view.server_state(NETWORK)
    if wrong := next(
        (name for name, tensor in arrays.items() if name not in network or tensor.shape != network[name].shape), ""
    ):
        raise FailedError(
            f"strategy: its tensor '{wrong}' does not fit the network; it must return the tensors that it received"
        )
    return {**network, **{name: tensor.to(network[name].dtype) for name, tensor in arrays.items()}}
