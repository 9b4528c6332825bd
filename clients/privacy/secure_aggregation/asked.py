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
    """Return bytes by site, as the server passes them on. Raise UserError for invalid content."""
    state = state_of(job, record)
    known = {site.name for site in job.config.roster}
    valid = state.keys() <= known and len(state) <= MOST_SITES and all(one.dtype == torch.uint8 for one in state.values())
    content = {name: bytes(one.flatten().numpy()) for name, one in state.items()} if valid else {}
    if not valid or any(size and len(one) != size for one in content.values()):
        raise UserError(f"secure aggregation: the record '{record}' cannot be read")
    return content


def check_enough(attempt: Attempt, sites: int) -> None:
    """Raise UserError if so few sites are left that a sum over them would reveal too much."""
    if not 2 <= attempt.threshold <= sites:
        raise UserError(
            f"secure aggregation: {sites} sites are too few; at least {max(2, attempt.threshold)} must participate"
        )


def words(job: Job) -> tuple[str, str, str]:
    """Return what keys of an attempt are derived for: run, round and attempt."""
    return job.order.run, str(job.order.round), job.order.secure


def attempt_of(job: Job) -> Attempt:
    """Return the attempt that an order continues. Raise UserError for another attempt, or one begun by another order."""
    attempt = Secrets(job.store).attempt(attempt_id(job))
    if attempt.order != fixed(job.order):
        raise UserError("order: the masked round was begun with another configuration, run or round; all of its "
                        "steps need the same")  # fmt: skip
    return attempt


def attempt_id(job: Job) -> str:
    """Return the attempt that an order names. Raise UserError if it names none."""
    if not job.order.secure:
        raise UserError("order.secure: has no attempt at a round")
    return job.order.secure


def fixed(order: TaskInstructions) -> str:
    """Return what must be equal in all steps of an attempt, so that checks of one step hold in the next."""
    return json.dumps([order.config, order.run, order.site, order.round, order.rounds, order.members])


def to_tensor(content: bytes) -> Tensor:
    """Return bytes as a uint8 tensor [n]."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
