"""A `Job`: one message to a site, with everything the site needs to answer it. `clients.work` answers it."""

import functools
import json
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import portalocker
import torch
from flwr.app import Context, Message, RecordDict

from fedloom.clients.data import Examples, own_examples, site_examples
from fedloom.clients.data.forms import schema_of, with_form
from fedloom.clients.data.listing import at_round
from fedloom.clients.data.standardise import (
    KEY,
    NONE,
    SITE,
    SITES,
    STANDARDISATION,
    Standardisation,
    standardised,
    sums_of,
)
from fedloom.clients.objectives import Experiment, resolve
from fedloom.clients.privacy.guard import SIMULATED
from fedloom.clients.privacy.policy import Policy
from fedloom.clients.protocol.configurations import configuration, parsed
from fedloom.clients.protocol.failures import RefusedError
from fedloom.clients.protocol.messages import (
    BEFORE,
    ENROL,
    MEAN,
    OWN,
    SUBSET,
    TRAIN,
    TaskInstructions,
    config_digest,
    read_order,
    to_states,
)
from fedloom.clients.storage.store import SiteStore
from fedloom.clients.training.torch_setup import memory_share, ordinary, pick_device
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import only
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site
from fedloom.fusion.state import State

if TYPE_CHECKING:
    from fedloom.clients.privacy.memory import Memory

LOCK = "site.lock"  # in a site's store
MOST_EXPERIMENTS = 8  # resolved experiments that a process caches
STORE = "fedloom-store"  # default folder, in the site's working directory, if its node-config sets no `store`


@dataclass(frozen=True, eq=False)
class Job:
    """Everything a site needs to answer one message.

    Attributes:
        order: The instructions in the message.
        experiment: The resolved configuration.
        store: The site's own state in this run.
        content: The message's content.
        policy: What the site allows (site.yaml).
        simulated: Whether the site runs in an engine on the user's own machines.
    """

    order: TaskInstructions
    experiment: Experiment
    store: SiteStore
    content: RecordDict
    policy: Policy = field(default_factory=Policy)
    simulated: bool = True

    @property
    def config(self) -> Config:
        """The run's configuration, with the changes that the site's policy makes."""
        return self.experiment.config

    @property
    def memory(self) -> "Memory":
        """The site's record of its disclosures in all runs."""
        from fedloom.clients.privacy.memory import Memory  # a database: imported only where something is disclosed

        return Memory(self.store.root, self.site.name if self.simulated else "")

    @property
    def charged(self) -> bool:
        """Whether noise is on and counts against a privacy budget (at a real site: its own `epsilon`)."""
        return bool(self.config.privacy.noise and (self.simulated or self.policy.epsilon))

    @property
    def masks_alone(self) -> bool:
        """Whether masks without noise hide a real site's contribution: sums over single sites or images are refused."""
        return bool(self.order.secure) and not self.simulated and not self.charged

    @property
    def tells_scores(self) -> bool:
        """Whether the site sends losses and accuracies to the server."""
        return self.simulated or self.policy.tells_scores(self.config)

    @property
    def site(self) -> Site:
        """The site that the message is for."""
        return self.config.roster[self.order.site]

    @property
    def device(self) -> torch.device:
        """The device that the site trains on."""
        return pick_device(self.config.engine.device, self.policy.gpu)

    @functools.cached_property
    def source(self) -> Site:
        """The site with the domain that it reads: the server's, or its own."""
        return self.policy.source(self.config, self.site)

    def raw_examples(self) -> Examples:
        """Return the site's training examples, as they are in its data."""
        return site_examples(self.config, self.source)

    def images(self) -> Examples:
        """Return the site's training examples, standardised as the run says."""
        return standardised(self.raw_examples(), self.standardisation)

    def held_out(self, split: str) -> Examples:
        """Return the site's validation or test examples, standardised as the run says."""
        return standardised(own_examples(self.config, self.source, split), self.standardisation)

    def sums(self) -> State:
        """Return the exact sums over the site's training examples, of which mean and deviation follow."""
        return sums_of(self.raw_examples(), schema_of(self.config, self.source.spec))

    @functools.cached_property
    def standardisation(self) -> Standardisation | None:
        """Mean and deviation by which the site standardises its images: its own, or the message's; None: it does not.

        Raises:
            RefusedError: They would be over all sites' images, but the site or the run hides what the site sends.
            UserError: The message lacks them.
        """
        way = self.experiment.standardise
        if way == NONE:
            return None
        if way == SITE:
            return Standardisation.from_sums(self.sums())
        if not (self.simulated or self.config.federation.secure_aggregation) and self.policy.hides(self.config):
            raise RefusedError(f"{KEY}={SITES}: needs sums over single sites, but this site hides what it sends, or the run "
                               f"does (masks or noise); set {KEY}={SITE} with evaluation.where=sites")  # fmt: skip
        if STANDARDISATION not in self.content.array_records:
            raise UserError(f"order: has no record '{STANDARDISATION}', which {KEY}={SITES} needs")
        return Standardisation.parsed(to_states(RecordDict({MEAN: self.content.array_records[STANDARDISATION]}))[MEAN])


def read_job(message: Message, context: Context) -> Job:
    """Return the Job for a message to the site with this Flower context. Raises UserError if it is invalid or refused."""
    order, node_config = read_order(message.content), context.node_config
    simulated, root = bool(node_config.get(SIMULATED)), store_of(context)
    policy = Policy() if simulated else Policy.of(node_config)
    policy.limits.check_message(message.content)
    policy.check_secure_aggregation(order)
    text = configuration(order, message.content, None if simulated else root)
    if order.secure and {OWN, BEFORE} & message.content.array_records.keys():
        raise UserError("order.secure: only the site has its earlier contribution under masks; send no record of it")
    if order.secure and any(name.startswith(SUBSET) for name in message.content.array_records):
        raise UserError("order.secure: sites must receive the same records under masks; send no record for a single site")
    experiment = _resolved(text, order.run, order.rounds, None if simulated else (policy, order.site))
    policy.check_privacy_budget(order, experiment.config)
    if not simulated:
        policy.check_question(order, experiment.config)
        if order.kind == TRAIN:
            policy.limits.check_store(root)
    policy = replace(policy, gpu=memory_share(experiment.config.engine)) if simulated else policy
    objective = "" if simulated else config_digest(json.dumps(experiment.config.objective, sort_keys=True))
    store = SiteStore(root, order.run, asked_site(order, experiment.config).name, objective)
    return Job(order, experiment, store, message.content, policy, simulated)


@functools.lru_cache(maxsize=MOST_EXPERIMENTS)
def _resolved(text: str, run: str, rounds: int, follow: tuple[Policy, int] | None) -> Experiment:
    """Resolve the configuration of a run of `rounds` rounds. `follow`: a site's policy and its index in the roster."""
    config = parsed(text, run)
    if follow is not None:
        policy, index = follow
        config = with_form(policy.apply(config, index), index, bool(policy.domain))
    experiment = resolve(config if rounds == config.rounds else replace(config, rounds=rounds))
    if follow is not None:
        experiment.check_start()  # a site opens no file that a server names
    return experiment


def asked_site(order: TaskInstructions, config: Config) -> Site:
    """Return the site that an order is for. Raises UserError if the configuration has no site at its index."""
    sites = config.roster
    if not 0 <= order.site < len(sites):
        raise UserError(f"order.site: got {order.site}; the configuration has {len(sites)} sites, counted from 0")
    return sites[order.site]


@contextmanager
def alone(context: Context) -> Generator[None]:
    """Lock a real site's store, so that only one process answers for it at a time. Does nothing in a simulation."""
    if context.node_config.get(SIMULATED):
        yield
        return
    root = store_of(context)
    root.mkdir(parents=True, exist_ok=True)
    with portalocker.Lock(root / LOCK, "a", flags=portalocker.LockFlags.EXCLUSIVE):
        yield


def store_of(context: Context) -> Path:
    """Return the folder of a site's store: `store` in its node-config, or the default STORE."""
    return Path(str(context.node_config.get("store") or STORE)).expanduser()


@contextmanager
def moment(message: Message, context: Context) -> Generator[None]:
    """Enter a context to answer a message in.

    Torch's defaults are set, and data files are listed once per round. A real site imports only what its owner names.
    """
    order, simulated = read_order(message.content), bool(context.node_config.get(SIMULATED))
    own = nullcontext() if simulated else only(Policy.of(context.node_config).code)
    with ordinary(), at_round(order.run, order.round, afresh=order.kind == ENROL), own:
        yield
