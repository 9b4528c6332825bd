"""The site's side of secure aggregation, last steps: a signed list of the sites that count, and masks off.

A site takes masks off once, and only when as many sites as must answer have signed the same list as it has (Bonawitz et al.
2017, the consistency check against an active server), and the same training.
"""

from typing import TYPE_CHECKING

import numpy as np

from clients.memory import Disclosure
from clients.messages import SECURE_CONFIRM, SECURE_UNMASK
from clients.objectives import Answer
from clients.secure_aggregation.asked import attempt_id, check_enough, incoming, to_tensor
from clients.secure_aggregation.members import check_members
from clients.secure_aggregation.primitives import SECRET, SIGNATURE, is_signature, signature
from clients.secure_aggregation.secrets import Attempt, Secrets
from conf.errors import UserError

if TYPE_CHECKING:
    from clients.job import Job


def confirm(job: "Job") -> Answer:
    """Sign which sites' contributions count (1) and which dropped out (0), together with what determined the training.

    One list in an attempt. SummedBeforeError if this sum and an earlier one would differ by what few sites gave.
    """
    secrets = Secrets(job.store)
    attempt, mine = secrets.attempt(attempt_id(job)), job.site.name
    counts = {name: bool(one[0]) for name, one in incoming(job, SECURE_CONFIRM, 1).items()}
    counted = sorted(name for name, one in counts.items() if one)
    if not attempt.sent or counts.keys() != attempt.held.keys() | {mine} or mine not in counted:
        raise UserError("secure aggregation: the list of the sites that count is not one of this attempt")
    if attempt.counted not in ([], counted):
        raise UserError("secure aggregation: this site has signed another list of the sites that count")
    if staying := sorted(set(attempt.leaving) & set(counted)):
        raise UserError(f"secure aggregation: {staying[0]} leaves, and its contribution is in the list of those that count")
    check_enough(attempt, len(counted))
    if not job.simulated:
        check_members(job.policy, counted)
    job.memory.check(_disclosure(job, attempt, counted))
    attempt.counted = counted
    secrets.save(attempt)
    return Answer({SECURE_CONFIRM: {"signature": to_tensor(signature(bytes.fromhex(attempt.signing), _statement(attempt)))}})


def unmask(job: "Job") -> Answer:
    """Shares of each site's secret: of those whose contribution counts, of the mask that is theirs alone; of those that
    dropped out, of their common masks. Once in an attempt, if enough sites have signed the same list as this one.
    """
    secrets = Secrets(job.store)
    attempt, mine = secrets.attempt(attempt_id(job)), job.site.name
    if not attempt.counted or attempt.unmasked:
        raise UserError("secure aggregation: the masks of this attempt cannot be taken off now")
    signatures, agree = incoming(job, SECURE_UNMASK, SIGNATURE), 0
    for name in attempt.counted:
        good = name in signatures and is_signature(attempt.keys(name).signing, _statement(attempt), signatures[name])
        if (agree := agree + good) >= attempt.threshold:
            break
    if agree < attempt.threshold:
        raise UserError(f"secure aggregation: {agree} sites have signed this site's list, and {attempt.threshold} must: "
                        "the server told sites of different lists, or had them train differently")  # fmt: skip
    job.memory.add(_disclosure(job, attempt, attempt.counted))
    attempt.unmasked = True
    secrets.save(attempt)
    found = {mine: to_tensor(bytes.fromhex(attempt.shares))}
    for name, text in ((name, bytes.fromhex(both)) for name, both in attempt.held.items()):
        found[name] = to_tensor(text[:SECRET] if name in attempt.counted else text[SECRET:])
    return Answer({SECURE_UNMASK: found})


def _statement(attempt: Attempt) -> bytes:
    """What a site signs: over whom the sum is, and what determined its training."""
    return "\n".join(("fedloom counted", attempt.id, attempt.statement, *attempt.counted)).encode()


def _disclosure(job: "Job", attempt: Attempt, counted: list[str]) -> Disclosure:
    seen = np.frombuffer(bytes.fromhex(attempt.sketch), np.float32)
    return Disclosure(job.order.run, job.order.round, counted, seen, attempt.leaving, attempt.idle)
