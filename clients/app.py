"""The Flower ClientApp: it says which site it is, and trains when it is told to."""

import functools
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from clients.data import num_classes, site_images
from clients.device import pick_device
from clients.learner import learn
from clients.messages import METRICS, WHO, Order, read_order, to_arrays, to_states
from clients.networks import build_network
from clients.objectives import Task, objective_of
from clients.randomness import torch_generator
from clients.store import SiteStore
from conf import from_json
from conf.errors import UserError
from conf.schema import Config
from conf.sites import roster

app = ClientApp()

# The same configuration comes with every message.
parsed = functools.lru_cache(maxsize=8)(from_json)


@app.query()
def identify(message: Message, context: Context) -> Message:
    """Answer the site's name (node-config `site`) or its place (node-config `partition-id`)."""
    who = {key: str(context.node_config[key]) for key in ("site", "partition-id") if key in context.node_config}
    if not who:
        raise UserError("node-config has neither site nor partition-id: start the node with one of them")
    return Message(RecordDict({WHO: ConfigRecord({**who})}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round at this site: load the own state, train, save it, answer with the contribution."""
    order = read_order(message.content)
    config = parsed(order.config)
    torch.set_num_threads(config.engine.threads)
    store = SiteStore(_store_root(context, config), order.run, roster(config)[order.site].name)
    return Message(_train(order, config, store, message.content), reply_to=message)


def _train(order: Order, config: Config, store: SiteStore, content: RecordDict) -> RecordDict:
    site = roster(config)[order.site]
    device = pick_device(config.engine.device)
    task = Task(
        config=config,
        site=site,
        round=order.round,
        members=order.members,
        network=build_network(config, num_classes(config)).to(device),
        incoming=to_states(content),
        own=store.load(order.base) if order.base else None,
        generator=torch_generator(config.seed, site.name, str(order.round), "objective"),
    )
    session = objective_of(config).session(task)
    outcome = learn(session, site_images(config, site), config, site, order.round, device)
    if (own := session.own()) is not None:
        store.save(order.round, order.base, own)
    reply = RecordDict({name: to_arrays(state) for name, state in session.contribution().items()})
    reply[METRICS] = MetricRecord({"loss": outcome.loss, "samples": outcome.samples})
    return reply


def _store_root(context: Context, config: Config) -> Path:
    given = context.node_config.get("store")
    return Path(str(given)) if given else Path(config.run.root) / config.run.name / "sites"
