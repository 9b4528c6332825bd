"""What a job gives its objective: a task, with a network object that the process reuses for all sites."""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from fedloom.clients.data.standardise import STANDARDISATION
from fedloom.clients.job import Job
from fedloom.clients.networks import Architecture, Network, Reused
from fedloom.clients.objectives import OBJECTIVES, Experiment, Session, Task
from fedloom.clients.protocol.messages import BASES, BEFORE, LIFT, MEAN, OWN, SECURE_SHARES, sent_states
from fedloom.clients.training.loss import LOSSES, loss_section
from fedloom.clients.training.optimizers import OPTIMIZERS, optimizer_section
from fedloom.clients.training.schedules import SCHEDULES, schedule_section
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.state import State

_RENEWALS: WeakKeyDictionary[Experiment, Callable[[], None]] = WeakKeyDictionary()
_NETWORKS: WeakKeyDictionary[Experiment, dict[tuple[Architecture, int], Reused]] = WeakKeyDictionary()


def task_of(job: Job, place: int = 0) -> Task:
    """Return the objective's task for this job, with a reused network in training mode.

    The user's own objective, loss, optimiser and schedule have the attributes that they had before the first task.
    `place`: which network object (`scratch_model`).
    """
    order, config, site = job.order, job.config, job.site
    renew(job.experiment)
    incoming = sent_states(job.content)
    lost = incoming.pop(OWN, None)
    for record in (SECURE_SHARES, LIFT, BASES, BEFORE, STANDARDISATION):
        incoming.pop(record, None)

    def load_local_state() -> State | None:
        if lost is not None:  # a site that lost its own state starts from its contribution and the shared parts
            return {**incoming.get(MEAN, {}), **lost}
        return job.store.load(order.base) if order.base else None

    return Task(
        experiment=job.experiment,
        site=site,
        round=order.round,
        members=order.members,
        restoring=bool(order.restoring),
        back=order.back,
        network=scratch_model(job, place),
        incoming=incoming,
        load_local_state=load_local_state,
        generator=torch_generator(config.seed, site.name, *order.words, "objective"),
        held_out=job.held_out,
        targets=lambda: job.raw_examples().y,
    )


def renew(experiment: Experiment) -> None:
    """Give the user's own objects their attributes of the first task: what one site leaves there, no other site reads."""
    if experiment not in _RENEWALS:
        _RENEWALS[experiment] = _renewal(own_objects(experiment))
    _RENEWALS[experiment]()


def end_task(experiment: Experiment) -> None:
    """Undo what tasks have left in the user's own objects, which the next run of this process may use, too."""
    if experiment in _RENEWALS:
        _RENEWALS[experiment]()


def _renewal(objects: tuple[object, ...]) -> Callable[[], None]:
    if not objects:
        return lambda: None
    from fedloom.fusion.graph.undisturbed import Snapshot  # imported only for users' objects

    return Snapshot(objects, values=True).restore


def own_objects(experiment: Experiment) -> tuple[object, ...]:
    """Return the objective, loss, optimiser and schedule of a configuration, without those that this project ships."""
    training, recipe = experiment.config.training, experiment.training
    parts = [
        (OBJECTIVES, experiment.config.objective, lambda: experiment.objective),
        (OPTIMIZERS, optimizer_section(training), lambda: recipe.optimizer),
        (SCHEDULES, schedule_section(training), lambda: recipe.schedule),
        (LOSSES, loss_section(training), lambda: experiment.loss),
    ]
    return tuple(made() for registry, section, made in parts if not registry.shipped(str(section["name"])))


def session_of(job: Job, place: int = 0) -> Session:
    """Return the objective's session for this job: the site's state is loaded, nothing is trained yet."""
    return job.experiment.objective.session(task_of(job, place))


def scratch_model(job: Job, place: int = 0) -> Network:
    """Return the network object that this process reuses for all sites, as new, in training mode. Sessions load all weights.

    `place`: which of several objects, for sites that are trained together.
    """
    known, architecture = _NETWORKS.setdefault(job.experiment, {}), job.experiment.architecture(job.site)
    if (architecture, place) not in known:
        known[architecture, place] = Reused(architecture.build().to(job.device))
    return known[architecture, place].as_new().train()
