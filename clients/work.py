"""How a site answers a message: it trains, or answers a question. Start reading at `answer`."""

import contextlib
import math
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING

import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedloom.clients.data import Examples
from fedloom.clients.job import Job, alone, asked_site, moment, read_job, store_of
from fedloom.clients.networks.initial import alike
from fedloom.clients.objectives import Session
from fedloom.clients.privacy.guard import SIMULATED, failed
from fedloom.clients.privacy.policy import Policy
from fedloom.clients.protocol.configurations import configuration, parsed
from fedloom.clients.protocol.failures import BlamedError, DropoutError, LostStateError, RefusedError
from fedloom.clients.protocol.messages import (
    ERASE,
    ERASED,
    IDLE,
    METRICS,
    PROTOCOL,
    TRAIN,
    WHEN,
    WHO,
    read_order,
    to_arrays,
)
from fedloom.clients.protocol.packing import NONE, as_sent
from fedloom.clients.protocol.signatures import SIGNED, erased_words, update_payload
from fedloom.clients.storage.store import SiteStore
from fedloom.clients.training.learner import Outcome, learn
from fedloom.clients.training.tasks import end_task, task_of
from fedloom.conf.errors import UserError
from fedloom.conf.machine import threads
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
            if job.order.kind == TRAIN:
                return train(job)
            from fedloom.clients.evaluation.questions import answer_question  # imported only here: many runs ask none

            return answer_question(job)
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
