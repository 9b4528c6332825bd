"""What a question of secure aggregation brings to a site, and what the question is about."""

import json

import torch
from torch import Tensor

from fedloom.clients.job import Job
from fedloom.clients.privacy.secure_aggregation.secrets import Attempt, Secrets
from fedloom.clients.protocol.messages import TaskInstructions
from fedloom.clients.protocol.packing import unpacked
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State

MOST_SITES = 1000  # of one secure sum: every two of them agree on a mask


def state_of(job: Job, record: str) -> State:
    """The state that the message has in one record; empty if it has none."""
    return unpacked(job.content.array_records[record]) if record in job.content.array_records else {}


def incoming(job: Job, record: str, size: int = 0) -> dict[str, bytes]:
    """Bytes by name of a site, as the server passes them on. UserError for what cannot be that."""
    found = state_of(job, record)
    known = {site.name for site in job.config.roster}
    good = found.keys() <= known and len(found) <= MOST_SITES and all(one.dtype == torch.uint8 for one in found.values())
    passed = {name: bytes(one.flatten().numpy()) for name, one in found.items()} if good else {}
    if not good or any(size and len(one) != size for one in passed.values()):
        raise UserError(f"secure aggregation: the record '{record}' cannot be read")
    return passed


def check_enough(attempt: Attempt, sites: int) -> None:
    """UserError if so few sites are left that a sum over them tells too much."""
    if not 2 <= attempt.threshold <= sites:
        raise UserError(f"secure aggregation: {sites} sites are too few; {max(2, attempt.threshold)} must take part")


def words(job: Job) -> tuple[str, str, str]:
    """What keys of an attempt are derived for: run, round and attempt."""
    return job.order.run, str(job.order.round), job.order.secure


def attempt_of(job: Job) -> Attempt:
    """The attempt that an order goes on with. UserError if it is another one, or one that was begun by another order."""
    attempt = Secrets(job.store).attempt(attempt_id(job))
    if attempt.order != fixed(job.order):
        raise UserError("order: an attempt at a masked round was begun with another configuration, run or round; all of its "
                        "steps need the same")  # fmt: skip
    return attempt


def attempt_id(job: Job) -> str:
    """The attempt that an order names. UserError if it names none."""
    if not job.order.secure:
        raise UserError("order.secure: names no attempt at a round")
    return job.order.secure


def fixed(order: TaskInstructions) -> str:
    """What is the same in all steps of an attempt: what was checked in one step holds in the next."""
    return json.dumps([order.config, order.run, order.site, order.round, order.rounds, order.members])


def to_tensor(content: bytes) -> Tensor:
    """Bytes as a uint8 tensor [n]."""
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
