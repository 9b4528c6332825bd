"""Name the user's own code, and the site, in an error that this code raised while a site trained or answered."""

import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fedloom.clients.job import Job
from fedloom.clients.networks import Network
from fedloom.clients.networks.base import NETWORKS
from fedloom.clients.objectives import OBJECTIVES, Objective, Session
from fedloom.clients.training.loss import LOSSES, Loss, loss_section
from fedloom.clients.training.loss import WHERE as LOSS
from fedloom.clients.training.optimizers import OPTIMIZERS, optimizer_section
from fedloom.clients.training.optimizers import WHERE as OPTIMIZER
from fedloom.clients.training.schedules import SCHEDULES, Schedule, schedule_section
from fedloom.clients.training.schedules import WHERE as SCHEDULE
from fedloom.conf.errors import UserError
from fedloom.conf.plugins import error_summary, place_of
from fedloom.conf.registry import Registry


class OwnCodeError(UserError):
    """The user's own code failed at a site."""


def named(error: BaseException, job: Job) -> BaseException:
    """Return an error as OwnCodeError if the user's own code raised it while the site worked; else return it unchanged."""
    if isinstance(error, UserError) or not (key := next(_keys(error, job), "")):
        return error
    place = place_of(error)
    cause = f"{error_summary(error)}{f'; {place}' if place else ''}"
    return OwnCodeError(f"{key} failed at site '{job.site.name}' ({cause})")


def _keys(error: BaseException, job: Job) -> Iterator[str]:
    """Yield "key: 'name'" of each part of the user's own that the error passed, the innermost first."""
    training, network = job.config.training, job.experiment.architecture(job.site).options
    parts = [
        (Loss, LOSSES, LOSS, loss_section(training, job.experiment.task)),
        (Network, NETWORKS, "network", network),
        (Schedule, SCHEDULES, SCHEDULE, schedule_section(training)),
        (torch.optim.Optimizer, OPTIMIZERS, OPTIMIZER, optimizer_section(training)),
        (Session | Objective, OBJECTIVES, "objective", job.config.objective),
    ]
    for frame in reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]):
        owner = frame.f_locals.get("self")
        for kind, registry, key, section in parts:
            name = _own_name(registry, section)
            if name and isinstance(owner, kind):
                yield f"{key}: '{name}'"


def _own_name(registry: Registry[Any], section: Mapping[str, Any]) -> str:
    """Return the name of a section, or of the network that it cuts (`of`), if it is from outside this project."""
    inner = section.get("of")
    names = [str(each.get("name")) for each in (section, inner) if isinstance(each, Mapping)]
    return next((name for name in names if not registry.shipped(name)), "")
