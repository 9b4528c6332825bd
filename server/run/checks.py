"""Check an experiment before it starts: data, sites, networks and method."""

import dataclasses

from fedloom.clients.data import site_sizes
from fedloom.clients.data.domains import DOMAINS, find, known
from fedloom.clients.data.found import function_of
from fedloom.clients.data.listing import held
from fedloom.clients.evaluation.metrics import metrics_of
from fedloom.clients.networks import NETWORKS, Architecture, architecture_of
from fedloom.clients.networks.architecture import check_own_networks, check_own_options
from fedloom.clients.networks.base import WEIGHT_OPTIONS, SelfStarting
from fedloom.clients.networks.head_view import BATCH, MIN_BATCH
from fedloom.clients.objectives import Experiment, resolve
from fedloom.clients.training.checks import check_handed_on, check_sizes, check_training, check_weights
from fedloom.clients.training.loss import LOSSES, loss_section
from fedloom.clients.training.loss import WHERE as LOSS
from fedloom.clients.training.optimizers import SGD
from fedloom.conf.errors import UserError
from fedloom.conf.machine import uncollected
from fedloom.conf.metrics import TARGETS
from fedloom.conf.plugins import is_reference
from fedloom.conf.schema import Config, StoppingConfig
from fedloom.conf.sites import BEST
from fedloom.fusion.exact import ExactSumError, check_range
from fedloom.server.evaluation.evaluator import RECOMPUTED, has_data
from fedloom.server.rounds.feature_statistics import check as check_standardise
from fedloom.server.rounds.privacy import check_batches, check_hidden
from fedloom.server.rounds.schedules import check_asked
from fedloom.server.strategies import STRATEGIES, slots_of
from fedloom.server.strategies.base import check_named


def check_settings(config: Config) -> None:
    """Check what needs no data: names, options, and keys that exclude each other. Raises UserError for what cannot work."""
    _check_method(config)
    for domain in config.domains:
        if not known(domain) and not (config.engine.name == "flower" or is_reference(function_of(domain))):
            find(domain)  # an unknown name
    if config.network:
        NETWORKS.build({key: value for key, value in config.network.items() if key not in WEIGHT_OPTIONS}, "network")
    check_own_options(config)
    training = config.training
    LOSSES.build(loss_section(training), LOSS)
    if not isinstance(resolve(config).training.optimizer, SGD):
        check_handed_on(training)
    STRATEGIES.build(config.strategy, "strategy")
    check_hidden(config)
    _check_evaluation(config)
    if all(domain in DOMAINS for domain in config.domains):  # their targets are known without data
        metrics_of(config)
    check_asked(config)


@held()
@uncollected()
def check(config: Config) -> None:
    """Check data, sites and method before anything starts. Raises UserError for what cannot work."""
    check_settings(config)
    if has_data(config):
        site_sizes(config)
    check_own_networks(config)
    experiment = resolve(config)
    _check_task(experiment)
    for index, mode in enumerate(config.baselines):
        try:
            slots_of(resolve(with_mode(config, mode)))
        except UserError as error:
            raise UserError(f"baselines[{index}]: '{mode}' cannot run ({error})") from error
    architectures = experiment.architectures
    for architecture in architectures:
        _check_start(architecture, config.federation.scale_bits)
    check_standardise(experiment)
    check_training(experiment, architectures)
    if has_data(config):
        check_sizes(experiment)
        check_batches(config)
    if config.network:
        NETWORKS.build(architecture_of(config).options, "network")  # checked even if no site has it
    check_weights(experiment)
    STRATEGIES.build(config.strategy, "strategy").check(experiment)
    slots_of(experiment)
    if config.stopping != StoppingConfig() or config.evaluation.keep == BEST:
        from fedloom.server.run.stopping import check_stopping  # imported only where it is used

        check_stopping(experiment)
    metrics_of(config)


def _check_evaluation(config: Config) -> None:
    """Raise UserError for statistics of BatchNorm that the other settings do not allow."""
    if config.evaluation.statistics == RECOMPUTED and not config.data.validation:
        raise UserError(f"evaluation.statistics={RECOMPUTED} needs validation examples; set data.validation above 0")
    if config.evaluation.statistics == BATCH and config.evaluation.batch < MIN_BATCH:
        raise UserError(
            f"evaluation.batch: got {config.evaluation.batch}, but statistics={BATCH} needs at least {MIN_BATCH}"
        )


def _check_task(experiment: Experiment) -> None:
    """Raise UserError if the method or the loss does not take the targets of the data."""
    if experiment.task not in (fitting := experiment.objective.targets):
        name, takes = experiment.config.objective.get("name"), " or ".join(TARGETS[task] for task in fitting)
        raise UserError(f"objective.name: '{name}' takes {takes}, but the targets here are {TARGETS[experiment.task]}; "
                        "choose another method, such as fedavg or sum_aggregation")  # fmt: skip
    _ = experiment.loss


def _check_start(architecture: Architecture, bits: int) -> None:
    """Raise UserError if a user's network starts with values that the exact sums cannot hold."""
    network = architecture.build()
    if isinstance(network, SelfStarting):
        try:
            check_range(network.state_dict(), bits)
        except ExactSumError as error:
            fault = f"network: '{architecture.options['name']}': {error}, so it cannot be summed"
            raise UserError(f"{fault}; register it with persistent=False if it is constant, or scale it") from None


def _check_method(config: Config) -> None:
    """Raise UserError for unknown names, and for partial sums without workers that can add them up."""
    check_named(config)
    if config.federation.partial_sums and config.engine.name == "flower":
        raise UserError("federation.partial_sums: needs the run's own workers (engine.name=ray); leave it off")
    if config.federation.node_store and not (config.federation.partial_sums and config.engine.name == "ray"):
        raise UserError("federation.node_store: nodes store what their workers add up; set federation.partial_sums=true "
                        "and engine.name=ray")  # fmt: skip


def with_mode(config: Config, mode: str) -> Config:
    """Return the configuration of a baseline: the same experiment with objective.mode=`mode`."""
    own = {"initialisation": "own"} if mode == "independent" else {}
    return dataclasses.replace(config, objective={**config.objective, "mode": mode, **own}, baselines=[])
