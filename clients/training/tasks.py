"""What a job gives its objective: a task, with a network object that the process reuses for all sites."""

from weakref import WeakKeyDictionary

from fedloom.clients.data.standardise import STANDARDISATION
from fedloom.clients.job import Job
from fedloom.clients.networks import Architecture, Network, Reused
from fedloom.clients.objectives import Experiment, Session, Task
from fedloom.clients.protocol.messages import BASES, BEFORE, LIFT, MEAN, OWN, SECURE_SHARES, sent_states
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.state import State

_NETWORKS: WeakKeyDictionary[Experiment, dict[tuple[Architecture, int], Reused]] = WeakKeyDictionary()


def task_of(job: Job, place: int = 0) -> Task:
    """Return the objective's task for this job, with a reused network in training mode.

    `place`: which network object (`scratch_model`).
    """
    order, config, site = job.order, job.config, job.site
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
