"""Same-shape sites as one: their weights stacked, [k, ...], and trained by one SGD on a vmapped loss.

Every site keeps its own batches, random choices, gradients and clipping. The result agrees with training the sites one
after the other up to rounding, not bit by bit: k convolutions as one grouped convolution add up in another order.
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
from fedloom.clients.work import protection_of, session_of, started, train, update
from fedloom.fusion.state import State

T = TypeVar("T")


@runtime_checkable
class Functional(Protocol):
    """What a session offers beside clients.objectives.Session so that it can be stacked with others."""

    def weights(self) -> dict[str, nn.Parameter]:
        """What the optimiser moves, by name; the same names and shapes for all sites of a configuration."""
        ...

    def per_step_inputs(self) -> tuple[State, ...]:
        """What the loss of the next batch needs beside the weights, random choices made."""
        ...

    def loss_of(self, weights: Mapping[str, Tensor], drawn: tuple[State, ...], images: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch: a pure function, the same one for all sites of a configuration and round."""
        ...


def same_shape(jobs: Sequence[Job], most: int) -> list[list[int]]:
    """The places of `jobs` in groups of at most `most` that train_cohort can train as one.

    Together go sites of one configuration, round, network, outputs and number of images: all their batches are of one size.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, job in enumerate(jobs):
        images = _attempt(job.images)
        alone = isinstance(images, Exception)  # it will say so when it is trained
        outs = () if alone else (outputs(job.config, job.site.spec).start, outputs(job.config, job.site.spec).stop)
        order, architecture = job.order, job.experiment.architecture(job.site)
        one = order.config, order.round, order.again, order.rounds, order.members, order.kind, architecture
        shape = place if alone or job.config.privacy.noise else (*one, len(images), outs)
        groups.setdefault(shape, []).append(place)
    return [group[start : start + most] for group in groups.values() for start in range(0, len(group), most)]


def train_cohort(jobs: Sequence[Job]) -> list[RecordDict | Exception]:
    """The replies of jobs of one shape (same_shape), as clients.work.train gives them, agreeing up to rounding; all saved.

    In the place of a site that fails is its exception; the others are not touched by it. A job that is the only one, or
    whose session is not Functional or trains in stages, is trained alone; so are all whose network vmap refuses, such as one
    with Dropout.
    """
    torch.set_num_threads(jobs[0].config.engine.threads)
    if len(jobs) == 1:
        return [_attempt(train, jobs[0])]
    opened = [_attempt(session_of, job) for job in jobs]
    starts = [None if isinstance(session, Exception) else started(job, session)
              for job, session in zip(jobs, opened, strict=True)]  # fmt: skip
    pairs = [(job, session) for job, session in zip(jobs, opened, strict=True) if _stackable(session)]
    found = _attempt(_learn, *zip(*pairs, strict=True)) if pairs else torch.empty(0, 0)
    if isinstance(found, Exception):  # each will say so itself
        return [_attempt(train, job) for job in jobs]
    losses = iter(found.T)  # one row per stacked site
    replies: list[RecordDict | Exception] = []
    for place, (job, session) in enumerate(zip(jobs, opened, strict=True)):
        if isinstance(session, Exception):
            replies.append(session)
        elif _stackable(session):
            replies.append(_attempt(_close, job, session, next(losses), starts[place]))
        else:
            replies.append(_attempt(train, job))
    return replies


def _stackable(session: object) -> TypeGuard[Functional]:
    """Whether a session trains all of its weights in all steps, by a loss that can be stacked."""
    if not isinstance(session, Functional) or not isinstance(session, Session):
        return False
    stages = session.stages()
    return len(stages) == 1 and len(stages[0][1]) == len(session.weights())


def _close(job: Job, session: Session, losses: Tensor, start: Mapping[str, State] | None) -> RecordDict:
    return update(job, session, outcome(losses, len(job.images()), job.site, job.order.round), start, protection_of(job))


def _learn(jobs: Sequence[Job], sessions: Sequence[Functional]) -> Tensor:
    """Train k sessions in place; the losses, [steps, k]."""
    first = jobs[0]
    each = [session.weights() for session in sessions]
    stacked = {name: nn.Parameter(weight, each[0][name].requires_grad) for name, weight in _stack(each).items()}
    of_each = vmap(sessions[0].loss_of)

    def loss(images: Tensor, labels: Tensor) -> Tensor:
        drawn = tuple(_stack(parts) for parts in zip(*(session.per_step_inputs() for session in sessions), strict=True))
        return of_each(stacked, drawn, images, labels)

    losses = descend(list(stacked.values()), loss, _stacked_batches(jobs), first.experiment.training, clip_each)
    with torch.no_grad():
        for place, session in enumerate(sessions):
            for name, weight in session.weights().items():
                weight.copy_(stacked[name][place])
    return losses


def _stacked_batches(jobs: Sequence[Job]) -> Iterator[tuple[float, Tensor, Tensor]]:
    """The steps of all jobs: the learning rate that they share, images [k, b, c, h, w], labels [k, b]."""
    streams = [batches(job.images(), job.experiment, job.site, job.order.round, job.device, job.order.words) for job in jobs]
    for steps in zip(*streams, strict=True):
        rates, images, labels = zip(*steps, strict=True)
        yield rates[0], torch.stack(images), torch.stack(labels)


def clip_each(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """clients.training.learner.clip_all for each of the k networks whose gradients are stacked, [k, ...]."""
    norms = torch.stack([gradient.flatten(1).norm(dim=1) for gradient in gradients]).norm(dim=0)
    factors = (limit / (norms + 1e-6)).clamp(max=1.0)
    return [gradient * factors.view(-1, *[1] * (gradient.ndim - 1)) for gradient in gradients]


def _stack(states: Sequence[Mapping[str, Tensor]]) -> State:
    """k states of one shape as one whose tensors are [k, ...]."""
    return {name: torch.stack([state[name].detach() for state in states]) for name in states[0]}


def _attempt(make: Callable[..., T], *given: object) -> T | Exception:
    try:
        return make(*given)
    except SystemExit as error:  # of the user's own code
        return RuntimeError(f"SystemExit: {error}")
    except Exception as error:
        return error
