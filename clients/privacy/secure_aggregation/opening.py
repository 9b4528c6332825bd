"""What a masked order is held against before the site is charged, or trains: its shares, sums, and what it goes on from."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedloom.clients.job import Job
from fedloom.clients.privacy.secure_aggregation.asked import attempt_of, check_enough, state_of
from fedloom.clients.privacy.secure_aggregation.secrets import Agreed, Attempt, Secrets
from fedloom.clients.privacy.secure_aggregation.site import opened
from fedloom.clients.protocol.failures import LostStateError
from fedloom.clients.protocol.messages import BASES, LIFT
from fedloom.clients.protocol.partial_sums import ONCE
from fedloom.conf.errors import UserError

LEAST_BITS = 20  # of scale_bits: coarser units would make what is repeated look new


@dataclass(frozen=True)
class Ready:
    """An attempt whose shares are opened. `base`: what was agreed on in the round that it goes on from. `lifts`: by name of
    a site that leaves, the rounds of the masks in common with it. `bases`: by name of a site, the round that it goes on
    from."""

    attempt: Attempt
    base: Agreed
    lifts: Mapping[str, list[int]]
    bases: dict[str, int]


def ready(job: Job) -> Ready:
    """UserError, or BlamedError for wrong shares, for an order that this site does not train by."""
    attempt = attempt_of(job)
    _check_sums(job)
    attempt.held = opened(job, attempt)
    check_enough(attempt, len(attempt.held) + 1)
    return Ready(attempt, _agreed_base(job), _lifts(job), _bases(job, attempt))


def _check_sums(job: Job) -> None:
    """UserError unless each site counts once: two sums of the same that differ by weights are two equations."""
    order, bits = job.order, job.config.federation.scale_bits
    if {*order.sums.values()} != {ONCE}:
        raise UserError("order.sums: under masks each site counts once")
    if order.slot not in ("", *order.sums) or (not order.slot and LIFT in job.content.array_records):
        raise UserError("order.slot: is not a record that is summed")
    if not job.simulated and bits < LEAST_BITS:
        raise UserError(f"federation.scale_bits: got {bits}, and masked sums of real sites take at least {LEAST_BITS}")


def _agreed_base(job: Job) -> Agreed:
    """What the sites have agreed on in the round that this one goes on from.

    UserError for a round whose list this site has not signed: only there all that count trained by the same. With a budget
    for what has been replaced before, too, unless all of the noise is the site's own (`noise_share`): that of the others
    can be averaged away.
    """
    secrets, base = Secrets(job.store), job.order.base
    if not base:
        return Agreed()
    if (found := secrets.agreed(base)) is None and secrets.is_new():
        raise LostStateError(f"{job.site.name}: its own state is lost: that after round {base}", base)
    if found is None:
        raise UserError(f"order.base: this site has not signed which sites count in round {base}; forget and readmit it")
    shared = job.config.privacy.noise and job.policy.epsilon and not job.simulated and not job.order.slot
    if shared and secrets.last_read() > base:
        raise UserError(f"order.base: the sum of round {secrets.last_read()} is read, and under noise a contribution is "
                        "replaced once; begin a new run")  # fmt: skip
    return found


def _lifts(job: Job) -> dict[str, list[int]]:
    """By name of a site that leaves, the rounds of the masks that this one has in common with it."""
    found = state_of(job, LIFT)
    most = len(Secrets(job.store).masks()) if found else 0
    if any(rounds.numel() > most for rounds in found.values()):
        raise UserError("secure aggregation: the server names more rounds than this site has masks of")
    lifts = {name: sorted({int(one) for one in rounds.flatten().tolist()}) for name, rounds in found.items()}
    before = Secrets(job.store).lifted() if lifts else {}
    for name, rounds in lifts.items():
        if again := [one for one in rounds if before.get(f"{name} {one}", job.order.round) != job.order.round]:
            raise UserError(f"secure aggregation: the mask of round {again[0]} in common with {name} was taken out before")
    return lifts


def _bases(job: Job, attempt: Attempt) -> dict[str, int]:
    """By name of a site of this attempt, the round that it goes on from, as the server tells all of them."""
    found = state_of(job, BASES)
    here = attempt.held.keys() | {job.site.name}
    if not here <= found.keys() or any(one.dtype != torch.int64 or one.shape != (1,) for one in found.values()):
        raise UserError(f"secure aggregation: the record '{BASES}' cannot be read")
    bases = {name: int(found[name]) for name in here}
    if bases[job.site.name] != job.order.base:
        raise UserError("order.base: is not the round that the other sites hear of")
    return bases
