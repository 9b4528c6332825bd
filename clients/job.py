"""One site's work on one message, from the order to the reply."""

import contextlib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedloom.clients.data import Images, class_names, class_things, outputs, own_images, site_images, site_size
from fedloom.clients.data.own import left_out
from fedloom.clients.evaluation.accuracy import Score, score, score_numbers
from fedloom.clients.evaluation.statistics import CLASS_STATISTICS, MOMENTS, class_statistics, moments
from fedloom.clients.networks import Architecture, HeadView, Network, architecture_of
from fedloom.clients.networks.initial import alike
from fedloom.clients.objectives import Answer, Session, Task, objective_of
from fedloom.clients.objectives.components.objective import COMPONENTS
from fedloom.clients.privacy.changes import changes, keep_sent
from fedloom.clients.privacy.differential import private, spend
from fedloom.clients.privacy.guard import LOG
from fedloom.clients.privacy.limits import RefusedError
from fedloom.clients.privacy.memory import Memory
from fedloom.clients.privacy.policy import Policy
from fedloom.clients.privacy.secure_aggregation import ANSWERS, Ready, bounded, masked, noise_share, ready
from fedloom.clients.privacy.secure_aggregation.site import BlamedError
from fedloom.clients.protocol.messages import (
    BASES,
    BEFORE,
    CLASSES,
    ENROL,
    EVALUATE,
    IDLE,
    LIFT,
    MEAN,
    METRICS,
    MODEL,
    OWN,
    SECURE_SHARES,
    TRAIN,
    TaskInstructions,
    right_of,
    to_arrays,
    to_states,
)
from fedloom.clients.protocol.packing import NONE, as_sent
from fedloom.clients.protocol.signatures import SIGNED, update_payload
from fedloom.clients.storage.store import LostStateError, SiteStore
from fedloom.clients.training.device import pick_device
from fedloom.clients.training.learner import Outcome, learn
from fedloom.conf.errors import UserError
from fedloom.conf.once import once
from fedloom.conf.randomness import drawing, torch_generator
from fedloom.conf.schema import Config
from fedloom.conf.sites import Site, roster
from fedloom.fusion.exact import dequantise, quantise
from fedloom.fusion.state import State


class HiddenError(RuntimeError):
    """Something failed at a site that hides what it trains: the kind of failure would tell of its images."""

    def __init__(self) -> None:
        super().__init__("it failed; a site that hides what it trains says no more")


@dataclass(frozen=True, eq=False)
class Job:
    """All that the ClientApp has at hand for a message; `content` is the message's.

    `simulated`: the site is one of an engine on the user's own machines.
    """

    order: TaskInstructions
    config: Config
    store: SiteStore
    content: RecordDict
    policy: Policy = field(default_factory=Policy)
    simulated: bool = True

    @property
    def memory(self) -> Memory:
        """What the site remembers over all runs."""
        return Memory(self.store.root, self.site.name if self.simulated else "")

    @functools.cached_property
    def cost(self) -> float:
        """What the site's privacy has cost with this round, which is charged when this is asked first."""
        return spend(self)

    @functools.cached_property
    def ready(self) -> Ready:
        """A masked order whose shares are opened."""
        return ready(self)

    @functools.cached_property
    def sketch_key(self) -> bytes:
        """What sketches depend on; that a masked round begins is noted when this is asked first."""
        return self.memory.begin(self.order.run, self.order.round)

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
        return roster(self.config)[self.order.site]

    @property
    def device(self) -> torch.device:
        """Where it trains."""
        return pick_device(self.config.engine.device, self.policy.gpu)

    def images(self) -> Images:
        """What it trains on."""
        return site_images(self.config, self.policy.source(self.config, self.site))

    def task(self, network: Network | None = None) -> Task:
        """What its objective has at hand, in `network` or a new one, which is in training mode."""
        order, config, site = self.order, self.config, self.site
        incoming = to_states(self.content)
        lost = incoming.pop(OWN, None)
        for record in (SECURE_SHARES, LIFT, BASES, BEFORE):
            incoming.pop(record, None)
        return Task(
            config=config,
            site=site,
            round=order.round,
            members=order.members,
            network=(network or architecture_of(config, site).build().to(self.device)).train(),
            incoming=incoming,
            load_local_state=lambda: self._own(incoming, lost),
            generator=torch_generator(config.seed, site.name, *order.words, "objective"),
            held_out=lambda split: own_images(config, self.policy.source(config, site), split),
        )

    def session(self, network: Network | None = None) -> Session:
        """The objective at work on it: the own state loaded, nothing trained yet."""
        return objective_of(self.config).session(self.task(network))

    def _own(self, incoming: dict[str, State], contribution: State | None) -> State | None:
        """The state to go on from; a site that lost its own begins at its contribution, with what all share."""
        if contribution is not None:
            return {**incoming.get(MEAN, {}), **contribution}
        return self.store.load(self.order.base) if self.order.base else None

    def started(self, session: Session) -> dict[str, State] | None:
        """What a session would send without training, where privacy or masks count the change of a round; else None."""
        return copied(session.contribution()) if self.config.privacy.noise or self.order.secure else None

    def reply(self, session: Session, outcome: Outcome, start: Mapping[str, State] | None = None) -> RecordDict:
        """Save the trained session's own state; what goes to the server. `start`: `started`, before training."""
        own, packing = session.local_state(), self.config.federation.packed
        given, numbers = session.contribution(), dict[str, float | int](samples=outcome.samples)
        if self.tells_scores and math.isfinite(outcome.loss):
            numbers["loss"] = outcome.loss
        if start is None:
            sent = {name: to_arrays(state, packing) for name, state in given.items()}
            own = as_sent(own, given, sent) if own is not None and packing != NONE else own
        else:
            sent, more = self._hidden(session, given, start, outcome.steps)
            numbers |= more
        if own is not None:
            self.store.save(self.order.round, self.order.base, own)
        reply = RecordDict({**sent})
        reply[METRICS] = MetricRecord({**numbers})
        if word := self.policy.identity.sign(*update_payload(self.order.run, self.site.name, self.order.round, reply)):
            reply[SIGNED] = word
        return reply

    def _hidden(
        self, session: Session, given: dict[str, State], start: Mapping[str, State], steps: int
    ) -> tuple[dict[str, ArrayRecord], dict[str, float]]:
        """The records with noise, or under masks, or both; and what the noise has cost."""
        changed, privacy, bits = changes(self, session, start, given), self.config.privacy, self.config.federation.scale_bits
        cost = {"epsilon": self.cost} if privacy.noise else {}
        if privacy.noise:
            whole = private(changed, bits, privacy, noise_share(self) if self.order.secure else 1.0)
        else:
            changed = bounded(self, changed, given)
            whole = changed.whole()
        if self.order.secure:
            sent = masked(self, whole, changed, steps)
        else:
            floats = {record: dequantise(state, bits) for record, state in whole.items()}
            sent = {record: to_arrays(state, self.config.federation.packed) for record, state in floats.items()}
            whole = {record: quantise(state, bits) for record, state in floats.items()}
        keep_sent(self, changed, whole)
        return sent, cost

    def train(self) -> RecordDict:
        """The whole of a round, this site alone."""
        images = self.images()
        self.policy.limits.check_images(len(images), self.config, self.site)
        if self.order.secure:
            _ = self.ready, self.sketch_key
        if self.config.privacy.noise:
            _ = self.cost  # charged before anything is tried: that it fails tells something, too
        try:
            with alike() if self.order.secure and not self.simulated else contextlib.nullcontext():
                return self._trained(images)
        except (BlamedError, LostStateError, RefusedError):  # the server is to hear of these
            raise
        except Exception as error:
            if self.simulated or not self.policy.hides(self.config):
                raise
            raise HiddenError from error

    def _trained(self, images: Images) -> RecordDict:
        order, least = self.order, self.policy.limits.batch
        task = self.task(scratch_model(self.config, architecture_of(self.config, self.site)))
        begin, session = task.generator.get_state(), objective_of(self.config).session(task)
        start = self.started(session)
        if order.secure and order.again == IDLE:
            return self.reply(session, Outcome(math.nan, len(images)), start)
        self.policy.limits.check_images(len(session.training_images(images)), self.config, self.site)
        outcome = learn(session, images, self.config, self.site, order.round, self.device, order.words, least)
        if self.masks_alone and (outcome.drew or not torch.equal(task.generator.get_state(), begin)):
            raise RefusedError("objective: it or the network draws at random (Dropout, say), by the run's seed and the "
                               "site's name: a seed can be chosen so that one image of one site counts alone; leave that "
                               "out under masks, or set privacy.noise and the site's own epsilon")  # fmt: skip
        return self.reply(session, outcome, start)

    def answer(self) -> RecordDict:
        """What the site says to a question."""
        if self.order.kind == TRAIN:
            return self.train()
        source, classes = self.policy.source(self.config, self.site), None
        if self.order.kind in ANSWERS:
            found = ANSWERS[self.order.kind](self)
        elif self.order.kind == ENROL:
            found = Answer(metrics={"samples": site_size(self.config, source)})
            if line := left_out(source.spec.domain):
                LOG.warning(line)
            classes = ConfigRecord({"names": list(class_names(source.spec)), "things": list(class_things(source.spec))})
        else:
            words = self.site.name, str(self.order.round), self.order.kind
            with drawing(torch_generator(self.config.seed, *words).initial_seed(), self.device):
                known = {EVALUATE: self._measured, MOMENTS: self._told, CLASS_STATISTICS: self._told}
                found = known.get(self.order.kind, self._asked)()
        reply = RecordDict({name: to_arrays(state) for name, state in found.records.items()})
        reply[METRICS] = MetricRecord({**found.metrics})
        if classes is not None:
            reply[CLASSES] = classes
        return reply

    def _asked(self) -> Answer:
        """What the objective says to a question of its method; components only as far as the site's policy lets them go."""
        task = self._ready()
        found = objective_of(self.config).answer(self.order.kind, task, self.images())
        if COMPONENTS in found.records:
            found.records[COMPONENTS] = self.policy.filter_published(found.records[COMPONENTS])
            if self.order.base != self.order.round and task.own is not None:  # what is put counts as of this round
                self.store.save(self.order.round, self.order.base, task.own)
        return found

    def _ready(self) -> Task:
        return self.task(scratch_model(self.config, architecture_of(self.config, self.site)))

    def _measured(self) -> Answer:
        """Right answers on the site's own images: of each network that was sent, or of the site's own."""
        if self.order.split not in ("validation", "test"):
            raise UserError("order.split: takes validation or test")
        images = own_images(self.config, self.policy.source(self.config, self.site), self.order.split)
        sent = {name: record for name, record in self.content.array_records.items() if name.startswith(MODEL)}
        each = {name: replace(self, content=RecordDict({MODEL: record})) for name, record in sent.items()} or {MODEL: self}
        told = self.simulated or (self.config.evaluation.classes and self.policy.tells_classes(self.config))
        found = {right_of(name): job._score(images) for name, job in each.items()}
        return Answer(metrics=score_numbers(found, len(images), told))

    def _told(self) -> Answer:
        """Statistics of the network that was sent, on the site's training images."""
        task, images, batch = self._ready(), self.images(), self.config.evaluation.batch
        if (state := task.incoming.get(MODEL)) is None:
            raise UserError(f"order.kind: '{self.order.kind}' needs a network, and none was sent")
        task.network.load_state_dict(state)
        task.network.eval()
        try:
            if self.order.kind == MOMENTS:
                found = moments(task.network, images, batch, self.device)
            else:
                first = outputs(self.config, self.site.spec).start
                found = class_statistics(task.network, images, first, batch, self.device)
        finally:
            task.network.train()  # the next site trains in it
        return Answer({self.order.kind: found}, {"samples": len(images)})

    def _score(self, images: Images) -> Score:
        """How many of the images the network MODEL, or else the site's own, classifies rightly."""
        task = self._ready()
        state = objective_of(self.config).network(task, self.images())
        if state is None:
            raise UserError(f"{self.site.name}: has no network of its own yet; it has not trained")
        task.network.load_state_dict(state)
        view = HeadView(task.network, outputs(self.config, self.site.spec), self.config.evaluation.statistics).eval()
        try:
            return score(view, images, self.config.evaluation.batch, self.device)
        finally:
            view.train()  # the next site trains in it


def copied(records: Mapping[str, State]) -> dict[str, State]:
    """The same with memory of their own."""
    return {record: {name: one.detach().clone() for name, one in state.items()} for record, state in records.items()}


@once
def _benches(config: Config) -> dict[Architecture, Network]:
    return {}


def scratch_model(config: Config, architecture: Architecture) -> Network:
    """A network that this process trains one site after the other in; every session loads all of its weights first."""
    benches = _benches(config)
    if architecture not in benches:
        benches[architecture] = architecture.build().to(pick_device(config.engine.device))
    return benches[architecture]
