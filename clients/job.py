"""One site's work in one round, from the message to the reply."""

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict

from clients.data import Images, num_classes, site_images
from clients.device import pick_device
from clients.learner import Outcome, learn
from clients.messages import MEAN, METRICS, OWN, Order, read_order, to_arrays, to_states
from clients.networks import Network, build_network
from clients.objectives import Session, Task, objective_of
from clients.randomness import torch_generator
from clients.store import SiteStore
from conf import from_json
from conf.once import once
from conf.schema import Config
from conf.sites import Site, roster
from fusion.exact import State

# The same configuration comes with every message.
parsed = functools.lru_cache(maxsize=8)(from_json)


@dataclass(frozen=True, eq=False)
class Job:
    """All that the ClientApp has at hand for a train message; `content` is the message's."""

    order: Order
    config: Config
    store: SiteStore
    content: RecordDict

    @property
    def site(self) -> Site:
        """Who trains."""
        return roster(self.config)[self.order.site]

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return pick_device(self.config.engine.device)

    def images(self) -> Images:
        """What it trains on."""
        return site_images(self.config, self.site)

    def session(self, network: Network | None = None) -> Session:
        """The objective at work on it, in `network` or a new one: the own state loaded, nothing trained yet."""
        order, config, site = self.order, self.config, self.site
        incoming = to_states(self.content)
        task = Task(
            config=config,
            site=site,
            round=order.round,
            members=order.members,
            network=network or build_network(config, num_classes(config)).to(self.device),
            incoming=incoming,
            own=self._own(incoming),
            generator=torch_generator(config.seed, site.name, str(order.round), "objective"),
        )
        return objective_of(config).session(task)

    def _own(self, incoming: dict[str, State]) -> State | None:
        """The state to go on from; a site that lost its own begins at its contribution, with what all share."""
        if OWN in incoming:
            return {**incoming[MEAN], **incoming.pop(OWN)}
        return self.store.load(self.order.base) if self.order.base else None

    def reply(self, session: Session, outcome: Outcome) -> RecordDict:
        """Save the trained session's own state; what goes to the server."""
        if (own := session.own()) is not None:
            self.store.save(self.order.round, self.order.base, own)
        reply = RecordDict({name: to_arrays(state) for name, state in session.contribution().items()})
        reply[METRICS] = MetricRecord({"loss": outcome.loss, "samples": outcome.samples})
        return reply

    def train(self) -> RecordDict:
        """The whole of it, this site alone."""
        session = self.session(workbench(self.config))
        return self.reply(session, learn(session, self.images(), self.config, self.site, self.order.round, self.device))


@once
def workbench(config: Config) -> Network:
    """A network that this process trains one site after the other in; every session loads all of its weights first."""
    return build_network(config, num_classes(config)).to(pick_device(config.engine.device))


def read_job(message: Message, context: Context) -> Job:
    """The job of a train message, for the site whose context this is."""
    order = read_order(message.content)
    config = parsed(order.config)
    given = context.node_config.get("store")
    root = Path(str(given)) if given else Path(config.run.root) / config.run.name / "sites"
    return Job(order, config, SiteStore(root, order.run, roster(config)[order.site].name), message.content)
