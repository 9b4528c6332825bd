"""engine.vectorise: train k sites of the same shape together, with stacked weights [k, ...] and a vmapped loss.

Every site has its own batches, random choices, gradients and clipping. The result equals training one site after another
up to rounding, but not bit by bit: one grouped convolution adds up in another order than k convolutions.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Protocol, TypeGuard, TypeVar, runtime_checkable

import torch
from flwr.app import RecordDict
from torch import Tensor, nn
from torch.func import vmap

from fedloom.clients.data import outputs
from fedloom.clients.job import Job
from fedloom.clients.objectives import Session
from fedloom.clients.training.learner import batches, descend, outcome
from fedloom.clients.training.tasks import session_of
from fedloom.clients.work import naming, protection_of, respond, started, update
from fedloom.conf.machine import threads
from fedloom.fusion.state import State

T = TypeVar("T")


@runtime_checkable
class Functional(Protocol):
    """The additional methods of a session that can be stacked with others."""

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the weights to train, by name. Names and shapes are the same for all sites of a configuration."""
        ...

    def per_step_inputs(self) -> tuple[State, ...]:
        """Return the inputs of the next batch's loss other than weights and images, with random choices already drawn."""
        ...

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a batch: a pure function, the same for all sites of a configuration and round."""
        ...


def same_shape(jobs: Sequence[Job], most: int) -> list[list[int]]:
    """Group the indices of `jobs` that train_cohort can train together, at most `most` per group.

    Sites of a group share configuration, round, network, outputs and number of images, so all batches have one size.
    """
    groups: dict[Hashable, list[int]] = {}
    for index, job in enumerate(jobs):
        images = _attempt(job.images)
        failed = isinstance(images, Exception)  # training it alone raises this error again
        alone = failed or job.experiment.loss.by_site or bool(job.config.privacy.noise or job.order.fails)
        outs = () if failed else (outputs(job.config, job.site.spec).start, outputs(job.config, job.site.spec).stop)
        order, architecture = job.order, job.experiment.architecture(job.site)
        common = (
            order.config,
            order.round,
            order.again,
            order.rounds,
            order.members,
            order.kind,
            architecture,
            order.restoring,
        )
        shape = index if failed or alone else (*common, len(images), outs)
        groups.setdefault(shape, []).append(index)
    return [group[start : start + most] for group in groups.values() for start in range(0, len(group), most)]


def train_cohort(jobs: Sequence[Job]) -> list[RecordDict | Exception]:
    """Train the jobs of one group (same_shape) together. Returns the reply of each job, or its exception if it fails.

    Replies equal those of clients.work.train up to rounding. A single job is trained alone. So is a job whose session is not
    Functional or has several stages. If vmap refuses the network (for example, with Dropout), all are trained alone.
    """
    torch.set_num_threads(threads(jobs[0].config.engine.threads))
    if len(jobs) == 1:
        return [_attempt(respond, jobs[0])]
    opened = [_attempt(session_of, job, place) for place, job in enumerate(jobs)]
    starts = [None if isinstance(session, Exception) else started(job, session)
              for job, session in zip(jobs, opened, strict=True)]  # fmt: skip
    pairs = [(job, session) for job, session in zip(jobs, opened, strict=True) if _stackable(session)]
    result = _attempt(_learn, *zip(*pairs, strict=True)) if pairs else torch.empty(0, 0)
    if isinstance(result, Exception):  # training each alone raises its error again
        return [_attempt(respond, job) for job in jobs]
    losses = iter(result.T)  # one row per stacked site
    replies: list[RecordDict | Exception] = []
    for index, (job, session) in enumerate(zip(jobs, opened, strict=True)):
        if isinstance(session, Exception):
            replies.append(_attempt(respond, job))  # raises its error again
        elif _stackable(session):
            replies.append(_attempt(_close, job, session, next(losses), starts[index]))
        else:
            replies.append(_attempt(respond, job))
    return replies


def _stackable(session: object) -> TypeGuard[Functional]:
    """Return whether a session trains all its weights in all steps, with a loss that can be stacked."""
    if not isinstance(session, Functional) or not isinstance(session, Session):
        return False
    stages = session.stages()
    return len(stages) == 1 and len(stages[0][1]) == len(session.weights())


def _close(job: Job, session: Session, losses: Tensor, start: Mapping[str, State] | None) -> RecordDict:
    with naming(job):
        done = outcome(losses, len(job.images()), job.site, job.order.round)
        return update(job, session, done, start, protection_of(job))


def _learn(jobs: Sequence[Job], sessions: Sequence[Functional]) -> Tensor:
    """Train k sessions in place. Returns their losses, [steps, k]."""
    first = jobs[0]
    weights_of_each = [session.weights() for session in sessions]
    stacked = {
        name: nn.Parameter(weight, weights_of_each[0][name].requires_grad)
        for name, weight in _stack(weights_of_each).items()
    }
    of_each = vmap(sessions[0].loss_of)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        drawn = tuple(_stack(parts) for parts in zip(*(session.per_step_inputs() for session in sessions), strict=True))
        return of_each(stacked, drawn, images, labels)

    losses = descend(list(stacked.values()), loss, _stacked_batches(jobs), first.experiment.training, clip_each)
    for index, session in enumerate(sessions):
        for name, weight in session.weights().items():
            weight.data = stacked[name].detach()[index]
    return losses


def _stacked_batches(jobs: Sequence[Job]) -> Iterator[tuple[float, Tensor, Tensor]]:
    """Yield the steps of all jobs: their common learning rate, images [k, b, c, h, w], labels [k, b]."""
    streams = [
        batches(job.images(), job.experiment, job.site, job.order.schedule_round, job.device, job.order.words)
        for job in jobs
    ]
    for steps in zip(*streams, strict=True):
        rates, images, labels = zip(*steps, strict=True)
        yield rates[0], torch.stack(images), torch.stack(labels)


def clip_each(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """Clip each of k networks on its own: scale its gradients to a joint norm of at most `limit`. Gradients are [k, ...]."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    return [gradient * factors.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients]


def _stack(states: Sequence[Mapping[str, Tensor]]) -> State:
    """Stack k states of one shape into one whose tensors are [k, ...]."""
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


def _attempt(make: Callable[..., T], *arguments: object) -> T | Exception:
    try:
        return make(*arguments)
    except SystemExit as error:  # from the user's code
        return RuntimeError(f"SystemExit: {error}")
    except Exception as error:
        return error
