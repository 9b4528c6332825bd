"""From a message to a site's job: the order is read, and the site's own policy is applied, before anything is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import portalocker
from flwr.app import Context, Message, MetricRecord, RecordDict

from fedloom.clients.data.listing import at_round
from fedloom.clients.job import Job
from fedloom.clients.privacy.guard import SIMULATED
from fedloom.clients.privacy.policy import Policy, followed
from fedloom.clients.protocol.configurations import configuration, parsed
from fedloom.clients.protocol.messages import BEFORE, ENROL, ERASE, ERASED, METRICS, OWN, SUBSET, read_order
from fedloom.clients.protocol.signatures import SIGNED, erased_words
from fedloom.clients.storage.store import SiteStore
from fedloom.clients.training.device import memory_share
from fedloom.clients.training.torch_defaults import ordinary
from fedloom.conf.errors import UserError
from fedloom.conf.once import once
from fedloom.conf.schema import Config
from fedloom.conf.sites import roster

LOCK = "site.lock"  # in a site's store
MOST_LENGTHS = 16  # of runs whose configuration is kept
STORE = "fedloom-store"  # folder, below where the site was started, if its node-config says nothing


@contextmanager
def alone(context: Context) -> Iterator[None]:
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
def moment(message: Message) -> Iterator[None]:
    """Within, the site's files are as they are in the message's round, and torch is as usual."""
    order = read_order(message.content)
    with ordinary(), at_round(order.run, order.round, afresh=order.kind == ENROL):
        yield


def read_job(message: Message, context: Context) -> Job:
    """The job of a message, for the site whose context this is."""
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
    config = parsed(text, order.run)
    config = config if simulated else followed(config, policy, order.site)
    policy.check_privacy_budget(order, config)
    if not simulated:
        policy.check_question(order, config)
    config = config if order.rounds == config.rounds else stretched(config, order.rounds)
    policy = replace(policy, gpu=memory_share(config.engine)) if simulated else policy
    sites = roster(config)
    if not 0 <= order.site < len(sites):
        raise UserError(f"order.site: is no place among the configuration's {len(sites)} sites")
    return Job(order, config, SiteStore(root, order.run, sites[order.site].name), message.content, policy, simulated)


def erased(message: Message, context: Context) -> RecordDict | None:
    """What a site of a real federation says that it deleted, if that is what the message wants; whatever its policy is."""
    order = read_order(message.content)
    if order.kind != ERASE:
        return None
    if context.node_config.get(SIMULATED):
        raise UserError("order.kind: simulated sites keep nothing of their own to erase")
    root = store_of(context)
    sites = roster(parsed(configuration(order.config, message.content, root)))
    if not 0 <= order.site < len(sites):
        raise UserError(f"order.site: is no place among the configuration's {len(sites)} sites")
    name = sites[order.site].name
    numbers = SiteStore(root, order.run, name).erase()
    reply = RecordDict({METRICS: MetricRecord(dict(zip(ERASED, numbers, strict=True)))})
    if word := Policy.of(context.node_config).identity.sign(*erased_words(order.run, name, *numbers, order.request)):
        reply[SIGNED] = word
    return reply


def stretched(config: Config, rounds: int) -> Config:
    """The same with another number of rounds, made once."""
    known = _stretched(config)
    if rounds not in known and len(known) >= MOST_LENGTHS:
        known.clear()
    return known.setdefault(rounds, replace(config, rounds=rounds))


@once
def _stretched(config: Config) -> dict[int, Config]:
    return {}
