"""How a site answers a message: it trains, or answers a question. Start reading at `answer`."""

import contextlib
import math
from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedloom.clients.data import Examples, class_meanings, class_names, column_names, outputs, own_examples, site_size
from fedloom.clients.data.own import left_out
from fedloom.clients.data.schema import hidden_categories
from fedloom.clients.data.standardise import FEWEST, KEY, SITE, SITES, STANDARDISATION, STATISTICS
from fedloom.clients.evaluation.accuracy import Score, score, score_numbers
from fedloom.clients.evaluation.metrics import Metrics, metrics_of
from fedloom.clients.evaluation.statistics import CLASS_STATISTICS, MOMENTS, class_statistics, moments
from fedloom.clients.job import Job, alone, asked_site, moment, read_job, store_of
from fedloom.clients.networks import HeadView
from fedloom.clients.networks.initial import alike
from fedloom.clients.objectives import Answer, Session
from fedloom.clients.privacy.guard import LOG, SIMULATED, failed
from fedloom.clients.privacy.policy import Policy
from fedloom.clients.protocol.configurations import configuration, parsed
from fedloom.clients.protocol.failures import BlamedError, DropoutError, LostStateError, RefusedError, UntrainedError
from fedloom.clients.protocol.messages import (
    CLASSES,
    COMPONENTS,
    ENROL,
    ERASE,
    ERASED,
    EVALUATE,
    IDLE,
    METRICS,
    MODEL,
    PROTOCOL,
    SECURE_KINDS,
    TRAIN,
    WHEN,
    WHO,
    read_order,
    right_of,
    sums_of,
    to_arrays,
)
from fedloom.clients.protocol.packing import NONE, as_sent
from fedloom.clients.protocol.signatures import SIGNED, erased_words, update_payload
from fedloom.clients.storage.store import SiteStore
from fedloom.clients.training.learner import Outcome, learn
from fedloom.clients.training.tasks import end_task, task_of
from fedloom.conf.errors import UserError
from fedloom.conf.machine import threads
from fedloom.conf.randomness import drawing, torch_generator
from fedloom.fusion.state import State

if TYPE_CHECKING:
    from fedloom.clients.privacy.protection import Protection


BEFORE_TRAINING, DURING, _ = WHEN


class HiddenError(RuntimeError):
    """A failure whose details the site hides, because they could disclose something about its images."""

    def __init__(self) -> None:
        super().__init__("the site failed; it hides the reason, since that could disclose something about its data")


def answer(message: Message, context: Context) -> Message:
    """Answer a message: train and reply with the contribution, or answer a question. An error becomes an error reply."""
    try:
        with alone(context):
            if (done := erased(message, context)) is not None:
                return Message(done, reply_to=message)
            with moment(message, context):
                job = read_job(message, context)
                _use_threads(threads(job.config.engine.threads))
                return Message(respond(job), reply_to=message)
    except (Exception, SystemExit) as error:  # a site's own code may call exit
        return failed(error, message, context.node_config)


def _use_threads(number: int) -> None:
    if torch.get_num_threads() != number:
        torch.set_num_threads(number)


def respond(job: Job) -> RecordDict:
    """Return the content of the reply to a job's message. Raises OwnCodeError where the user's own code fails."""
    with naming(job):
        try:
            return train(job) if job.order.kind == TRAIN else answer_question(job)
        finally:
            end_task(job.experiment)


@contextlib.contextmanager
def naming(job: Job) -> Generator[None]:
    """Raise an error of the user's own code as OwnCodeError, which names the code and the site."""
    try:
        yield
    except (Exception, SystemExit) as error:
        from fedloom.clients.training.own_code import named  # imported only here: few runs fail

        if (known := named(error, job)) is error:
            raise
        raise known from error


def identify(message: Message, context: Context) -> Message:
    """Reply with the site's name (node-config `site`) or index (`partition-id`), and the protocol's version."""
    who = {key: str(context.node_config[key]) for key in ("site", "partition-id") if key in context.node_config}
    if not who:
        error = UserError("node-config has neither site nor partition-id. Start the node with one of them.")
        return failed(error, message, context.node_config)
    return Message(RecordDict({WHO: ConfigRecord({**who, "protocol": PROTOCOL})}), reply_to=message)


def erased(message: Message, context: Context) -> RecordDict | None:
    """Delete the site's data of the run if the message is an ERASE order, whatever the site's policy is.

    Returns the signed numbers of files and bytes deleted, or None for any other order.
    """
    order = read_order(message.content)
    if order.kind != ERASE:
        return None
    if context.node_config.get(SIMULATED):
        raise UserError("order.kind: simulated sites have no store to erase")
    root = store_of(context)
    name = asked_site(order, parsed(configuration(order, message.content, root), order.run)).name
    numbers = SiteStore(root, order.run, name).erase()
    reply = RecordDict({METRICS: MetricRecord(dict(zip(ERASED, numbers, strict=True)))})
    if word := Policy.of(context.node_config).identity.sign(*erased_words(order.run, name, *numbers, order.request)):
        reply[SIGNED] = word
    return reply


# Training


def train(job: Job) -> RecordDict:
    """Train the site for one round. Returns the reply's content. Raises HiddenError if the site hides its errors."""
    images = job.images()
    job.policy.limits.check_examples(len(images), job.experiment, job.site)
    protection = protection_of(job)
    if protection:
        protection.begin()
    try:
        with alike() if job.order.secure and not job.simulated else contextlib.nullcontext():
            return _trained(job, images, protection)
    except (BlamedError, DropoutError, LostStateError, RefusedError):  # the server must receive these
        raise
    except Exception as error:
        if job.simulated or not job.policy.hides(job.config):
            raise
        raise HiddenError from error


def _trained(job: Job, images: Examples, protection: "Protection | None") -> RecordDict:
    order, least, task = job.order, job.policy.limits.batch, task_of(job)
    if order.fails == BEFORE_TRAINING:
        raise DropoutError(order.fails)
    begin, session = task.generator.get_state(), job.experiment.objective.session(task)
    start = started(job, session)
    if order.secure and order.again == IDLE:
        return update(job, session, Outcome(math.nan, len(images)), start, protection)
    job.policy.limits.check_examples(len(session.training_examples(images)), job.experiment, job.site)
    share = 0.5 if order.fails == DURING else 1.0
    noted = protection.draws.note if protection else None
    outcome = learn(
        session, images, job.experiment, job.site, order.schedule_round, job.device, order.words, least, share, noted
    )
    if order.fails == DURING:
        raise DropoutError(order.fails)
    if job.masks_alone and (outcome.drew or not torch.equal(task.generator.get_state(), begin)):
        raise RefusedError("objective: the objective or the network draws random numbers (Dropout, for example) from the "
                           "run's seed. A server could choose a seed so that only one image of one site counts. "
                           "Remove the random draws under masks, or set privacy.noise and the site's epsilon")  # fmt: skip
    reply = update(job, session, outcome, start, protection)
    if order.fails:  # the reply is lost
        raise DropoutError(order.fails)
    return reply


def protection_of(job: Job) -> "Protection | None":
    """Return the protection that hides the job's contribution, or None without noise and masks."""
    if not (job.config.privacy.noise or job.order.secure):
        return None
    from fedloom.clients.privacy.protection import Protection  # cryptography: imported only where it is used

    return Protection(job)


def started(job: Job, session: Session) -> dict[str, State] | None:
    """Return a copy of the session's contribution before training, the start for noise and masks; None without them."""
    if not (job.config.privacy.noise or job.order.secure):
        return None
    records = session.contribution()
    return {record: {name: tensor.detach().clone() for name, tensor in state.items()} for record, state in records.items()}


def update(
    job: Job, session: Session, outcome: Outcome, start: Mapping[str, State] | None, protection: "Protection | None"
) -> RecordDict:
    """Save the trained session's own state, and return the reply's content. `start`: result of `started` before training."""
    local, packing = session.local_state(), job.config.federation.packed
    records, numbers = session.contribution(), dict[str, float | int](samples=outcome.samples)
    if job.tells_scores and math.isfinite(outcome.loss):
        numbers["loss"] = outcome.loss
    if start is None or protection is None:
        sent = {name: to_arrays(state, packing) for name, state in records.items()}
        local = as_sent(local, records, sent) if local is not None and packing != NONE else local
    else:
        sent, cost = protection.protect(session, records, start, outcome.steps)
        numbers |= cost
    if local is not None:
        job.store.save(job.order.round, job.order.base, local)
    reply = RecordDict({**sent})
    reply[METRICS] = MetricRecord({**numbers})
    identity = job.policy.identity
    if identity.key and (word := identity.sign(*update_payload(job.order.run, job.site.name, job.order.round, reply))):
        reply[SIGNED] = word
    return reply


# Questions


def answer_question(job: Job) -> RecordDict:
    """Return the content of the reply to a question."""
    source, classes = job.policy.source(job.config, job.site, enrols=job.order.kind == ENROL), None
    if job.order.kind in SECURE_KINDS:
        from fedloom.clients.privacy.secure_aggregation.answers import ANSWERS

        result = ANSWERS[job.order.kind](job)
    elif job.order.kind == ENROL:
        result = Answer(metrics={"samples": site_size(job.config, source)})
        if line := left_out(source.spec.domain):
            LOG.warning(line)
        columns = column_names(source.spec)
        columns = hidden_categories(columns) if job.policy.hides(job.config) else columns
        names = {"names": class_names(source.spec), "things": class_meanings(source.spec), "columns": columns}
        classes = ConfigRecord({key: list(each) for key, each in names.items()})
    else:
        names = job.site.name, str(job.order.round), job.order.kind
        with drawing(torch_generator(job.config.seed, *names).initial_seed(), job.device):
            result = ANSWERERS.get(job.order.kind, _asked)(job)
    reply = RecordDict({name: to_arrays(state) for name, state in result.records.items()})
    reply[METRICS] = MetricRecord({**result.metrics})
    if classes is not None:
        reply[CLASSES] = classes
    return reply


def _images_to_fit(job: Job) -> Examples:
    """Return the site's training examples, to which some objectives fit a network before they answer.

    Raises RefusedError if this may cost more than the site allows for a round.
    """
    images = job.images()
    job.policy.limits.check_examples(len(images), job.experiment, job.site)
    return images


def _asked(job: Job) -> Answer:
    """Return the objective's answer to a question of its method. The site's policy filters published components."""
    task = task_of(job)
    result = job.experiment.objective.answer(job.order.kind, task, _images_to_fit(job))
    if COMPONENTS in result.records:
        result.records[COMPONENTS] = job.policy.filter_published(result.records[COMPONENTS])
        if job.order.base != job.order.round and task.own is not None:  # the state now belongs to this round
            job.store.save(job.order.round, job.order.base, task.own)
    return result


def _measured(job: Job) -> Answer:
    """Count right answers on the site's own images, of each network in the message or else of the site's own."""
    if job.order.split not in ("validation", "test"):
        raise UserError(f"order.split: got '{job.order.split}', takes validation or test")
    images = own_examples(job.config, job.source, job.order.split)  # HeadView standardises them
    sent = {name: record for name, record in job.content.array_records.items() if name.startswith(MODEL)}
    beside = {name: record for name, record in job.content.array_records.items() if name == STANDARDISATION}
    jobs = {name: replace(job, content=RecordDict({MODEL: record, **beside})) for name, record in sent.items()}
    jobs = jobs or {MODEL: job}
    tells = job.simulated or job.policy.tells_classes(job.config)
    metrics = metrics_of(job.config, own=job.simulated)
    metrics = replace(metrics, totals=not tells)
    scores = {name: _score(each, images, metrics) for name, each in jobs.items()}
    by_class = tells and (job.simulated or job.config.evaluation.classes)
    numbers = score_numbers({right_of(name): score for name, score in scores.items()}, len(images), by_class)
    return Answer({sums_of(name): dict(score.sums) for name, score in scores.items() if score.sums}, numbers)


def _score(job: Job, images: Examples, metrics: Metrics) -> Score:
    """Score the network MODEL, or else the site's own, on the images."""
    task = task_of(job)
    state = job.experiment.objective.network(task, _images_to_fit(job))
    if state is None:
        raise UntrainedError(job.site.name, "measure")
    task.network.load_state_dict(state)
    outs, statistics = outputs(job.config, job.site.spec), job.config.evaluation.statistics
    view = HeadView(task.network, outs, statistics, job.standardisation).eval()
    try:
        return score(view, images, job.config.evaluation.batch, job.device, metrics)
    finally:
        view.train()  # the next site trains in it


def _statistics(job: Job) -> Answer:
    """Return statistics of the message's network on the site's training examples."""
    task, images, batch = task_of(job), job.images(), job.config.evaluation.batch
    if (state := task.incoming.get(MODEL)) is None:
        raise UserError(f"order.kind: '{job.order.kind}' needs a network, but the message has none")
    task.network.load_state_dict(state)
    task.network.eval()
    try:
        if job.order.kind == MOMENTS:
            statistics = moments(task.network, images, batch, job.device)
        else:
            first = outputs(job.config, job.site.spec).start
            statistics = class_statistics(task.network, images, first, batch, job.device)
    finally:
        task.network.train()  # the next site trains in it
    return Answer({job.order.kind: statistics}, {"samples": len(images)})


def _sums(job: Job) -> Answer:
    """Return sums over the site's training examples, by which all sites standardise theirs (data.standardise=sites)."""
    if job.experiment.standardise != SITES:
        raise UserError(f"order.kind: '{STATISTICS}' needs a run with {KEY}={SITES}")
    images = job.raw_examples()
    if not job.simulated:
        job.policy.limits.check_examples(len(images), job.experiment, job.site)
        if len(images) < FEWEST:
            raise RefusedError(f"{KEY}={SITES}: needs sums over the site's examples, and sums of fewer than {FEWEST} "
                               f"would disclose single ones; set {KEY}={SITE} with evaluation.where=sites")  # fmt: skip
    if job.order.secure:
        from fedloom.clients.privacy.secure_aggregation.contribution import masked_sums

        return Answer(masked_sums(job), {"samples": len(images)})
    return Answer({STATISTICS: job.sums()}, {"samples": len(images)})


ANSWERERS = {STATISTICS: _sums, EVALUATE: _measured, MOMENTS: _statistics, CLASS_STATISTICS: _statistics}
