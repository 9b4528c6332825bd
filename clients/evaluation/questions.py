"""How a site answers questions: scores, statistics, sums, and what a method asks. Training is in `clients.work`."""

from dataclasses import replace

from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedloom.clients.data import Examples, class_meanings, class_names, column_names, outputs, own_examples, site_size
from fedloom.clients.data.own import left_out
from fedloom.clients.data.schema import hidden_categories
from fedloom.clients.data.standardise import FEWEST, KEY, SITE, SITES, STANDARDISATION, STATISTICS
from fedloom.clients.evaluation.accuracy import Score, score, score_numbers
from fedloom.clients.evaluation.metrics import Metrics, metrics_of
from fedloom.clients.evaluation.statistics import CLASS_STATISTICS, MOMENTS, class_statistics, moments
from fedloom.clients.job import Job
from fedloom.clients.networks import HeadView
from fedloom.clients.objectives import Answer
from fedloom.clients.privacy.guard import LOG
from fedloom.clients.protocol.failures import RefusedError, UntrainedError
from fedloom.clients.protocol.messages import (
    CLASSES,
    COMPONENTS,
    ENROL,
    EVALUATE,
    METRICS,
    MODEL,
    SECURE_KINDS,
    right_of,
    sums_of,
    to_arrays,
)
from fedloom.clients.training.tasks import task_of
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import drawing, torch_generator


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
