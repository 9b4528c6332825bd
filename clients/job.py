"""One message to a site, with all that the site has at hand for it: data alone. What is done with it: clients.work."""

import functools
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import portalocker
import torch
from flwr.app import Context, Message, RecordDict

from fedloom.clients.data import Images, site_images
from fedloom.clients.data.listing import at_round
from fedloom.clients.objectives import Experiment, resolve
from fedloom.clients.privacy.guard import SIMULATED
from fedloom.clients.privacy.policy import Policy
from fedloom.clients.protocol.configurations import configuration, parsed
from fedloom.clients.protocol.messages import BEFORE, ENROL, OWN, SUBSET, TaskInstructions, read_order
from fedloom.clients.storage.store import SiteStore
from fedloom.clients.training.device import memory_share, pick_device
from fedloom.clients.training.torch_defaults import ordinary
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site

if TYPE_CHECKING:
    from fedloom.clients.privacy.memory import Memory

LOCK = "site.lock"  # in a site's store
MOST_EXPERIMENTS = 8  # resolved, that a process holds
STORE = "fedloom-store"  # folder, below where the site was started, if its node-config says nothing


@dataclass(frozen=True, eq=False)
class Job:
    """All that the ClientApp has at hand for a message; `content` is the message's.

    `simulated`: the site is one of an engine on the user's own machines.
    """

    order: TaskInstructions
    experiment: Experiment
    store: SiteStore
    content: RecordDict
    policy: Policy = field(default_factory=Policy)
    simulated: bool = True

    @property
    def config(self) -> Config:
        """The configuration, as the site follows it."""
        return self.experiment.config

    @property
    def memory(self) -> "Memory":
        """What the site remembers over all runs."""
        from fedloom.clients.privacy.memory import Memory  # a database: only where something is disclosed

        return Memory(self.store.root, self.site.name if self.simulated else "")

    @property
    def charged(self) -> bool:
        """Whether a privacy budget bounds what sums tell."""
        return bool(self.config.privacy.noise and (self.simulated or self.policy.epsilon))

    @property
    def masks_alone(self) -> bool:
        """Whether nothing but masks hides what the site gives: then no chosen site, part or image may be alone in a sum."""
        return bool(self.order.secure) and not self.simulated and not self.charged

    @property
    def tells_scores(self) -> bool:
        """Whether the server hears of losses and accuracies."""
        return self.simulated or self.policy.tells_scores(self.config)

    @property
    def site(self) -> Site:
        """Who is asked."""
        return self.config.roster[self.order.site]

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return pick_device(self.config.engine.device, self.policy.gpu)

    def images(self) -> Images:
        """What it trains on."""
        return site_images(self.config, self.policy.source(self.config, self.site))


def read_job(message: Message, context: Context) -> Job:
    """The job of a message, for the site whose context this is; the site's own policy is applied before anything is done."""
    order, here = read_order(message.content), context.node_config
    simulated, root = bool(here.get(SIMULATED)), store_of(context)
    policy = Policy() if simulated else Policy.of(here)
    policy.check_message_size(message.content)
    policy.check_secure_aggregation(order)
    text = configuration(order.config, message.content, None if simulated else root)
    if order.secure and {OWN, BEFORE} & message.content.array_records.keys():
        raise UserError("order.secure: under masks nobody but the site has what it gave; takes no record of it")
    if order.secure and any(name.startswith(SUBSET) for name in message.content.array_records):
        raise UserError("order.secure: a record for single sites would have them train differently; takes none")
    experiment = _resolved(text, order.run, order.rounds, None if simulated else (policy, order.site))
    policy.check_privacy_budget(order, experiment.config)
    if not simulated:
        policy.check_question(order, experiment.config)
    policy = replace(policy, gpu=memory_share(experiment.config.engine)) if simulated else policy
    store = SiteStore(root, order.run, asked_site(order, experiment.config).name)
    return Job(order, experiment, store, message.content, policy, simulated)


@functools.lru_cache(maxsize=MOST_EXPERIMENTS)
def _resolved(text: str, run: str, rounds: int, follow: tuple[Policy, int] | None) -> Experiment:
    """The configuration of a run of so many rounds, resolved. `follow`: a site's policy and its place."""
    config = parsed(text, run)
    if follow is not None:
        policy, place = follow
        config = policy.apply(config, place)
    return resolve(config if rounds == config.rounds else replace(config, rounds=rounds))


def asked_site(order: TaskInstructions, config: Config) -> Site:
    """The site that an order is for. UserError for one that the configuration has not."""
    sites = config.roster
    if not 0 <= order.site < len(sites):
        raise UserError(f"order.site: is no place among the configuration's {len(sites)} sites")
    return sites[order.site]


@contextmanager
def alone(context: Context) -> Generator[None]:
    """Within, no other process answers for this site: of two answers at once, each might not know of the other."""
    if context.node_config.get(SIMULATED):
        yield
        return
    root = store_of(context)
    root.mkdir(parents=True, exist_ok=True)
    with portalocker.Lock(root / LOCK, "a", flags=portalocker.LockFlags.EXCLUSIVE):
        yield


def store_of(context: Context) -> Path:
    """The folder of what a site keeps."""
    return Path(str(context.node_config.get("store") or STORE)).expanduser()


@contextmanager
def moment(message: Message) -> Generator[None]:
    """Within, the site's files are as they are in the message's round, and torch is as usual."""
    order = read_order(message.content)
    with ordinary(), at_round(order.run, order.round, afresh=order.kind == ENROL):
        yield
