"""Read the parts of a secure aggregation question."""

import json

import torch
from torch import Tensor

from fedloom.clients.job import Job
from fedloom.clients.privacy.secure_aggregation.secrets import Attempt, Secrets
from fedloom.clients.protocol.messages import TaskInstructions
from fedloom.clients.protocol.packing import unpacked
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

MOST_SITES = 1000  # in one secure sum: every two of them agree on a mask


def state_of(job: Job, record: str) -> State:
    """Return the state in one record of the message; empty without one."""
    return unpacked(job.content.array_records[record]) if record in job.content.array_records else {}


def incoming(job: Job, record: str, size: int = 0) -> dict[str, bytes]:
    """Return bytes by site from one record of the message. Raise UserError if invalid, or not `size` bytes each (0: any)."""
    state = state_of(job, record)
    known = {site.name for site in job.config.roster}
    valid = state.keys() <= known and len(state) <= MOST_SITES and all(one.dtype == torch.uint8 for one in state.values())
    content = {name: bytes(one.flatten().numpy()) for name, one in state.items()} if valid else {}
    if not valid or any(size and len(one) != size for one in content.values()):
        raise UserError(f"secure aggregation: the record '{record}' cannot be read")
    return content


def check_enough(attempt: Attempt, sites: int) -> None:
    """Raise UserError if `sites`, the number of sites left, is below the attempt's threshold, or the threshold below 2."""
    if not 2 <= attempt.threshold <= sites:
        raise UserError(
            f"secure aggregation: {sites} sites are too few; at least {max(2, attempt.threshold)} must participate"
        )


def words(job: Job) -> tuple[str, str, str]:
    """Return the words that an attempt's keys derive from: run, round and id of the attempt."""
    return job.order.run, str(job.order.round), job.order.secure


def attempt_of(job: Job) -> Attempt:
    """Return the stored attempt that an order continues. Raise UserError for another attempt, or one with another order."""
    attempt = Secrets(job.store).attempt(attempt_id(job))
    if attempt.order != fixed(job.order):
        raise UserError("order: the masked round was begun with another configuration, run or round; all of its "
                        "steps need the same")  # fmt: skip
    return attempt


def attempt_id(job: Job) -> str:
    """Return the id of the attempt that an order names. Raise UserError if it names none."""
    if not job.order.secure:
        raise UserError("order.secure: has no attempt at a round")
    return job.order.secure


def fixed(order: TaskInstructions) -> str:
    """Return the parts of an order that must be equal in all steps of an attempt, as JSON, so that checks still hold."""
    parts = [order.config, order.run, order.site, order.round, order.rounds, order.members, order.restoring, order.back]
    return json.dumps(parts)


def to_tensor(content: bytes) -> Tensor:
    """Return bytes as a uint8 tensor [n]."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
