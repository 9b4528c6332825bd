"""Check a masked order before the site is charged or trains: its shares, its sums, and the round that it continues from."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fedloom.clients.job import Job
from fedloom.clients.privacy.secure_aggregation.asked import attempt_of, check_enough, state_of
from fedloom.clients.privacy.secure_aggregation.secrets import Agreed, Attempt, Secrets
from fedloom.clients.privacy.secure_aggregation.site import opened
from fedloom.clients.protocol.failures import LostStateError
from fedloom.clients.protocol.messages import BASES, LIFT, TRAIN
from fedloom.clients.protocol.partial_sums import ONCE
from fedloom.conf.errors import UserError

LEAST_BITS = 20  # of scale_bits: with coarser units, repeated changes would look new


@dataclass(frozen=True)
class Ready:
    """A masked round that has passed all checks before training.

    Attributes:
        attempt: This site's attempt at the round, with the other sites' shares opened.
        base: What this site signed in the round that it continues from.
        lifts: By leaving site, the rounds whose shared masks to remove.
        bases: By site, the round that it continues from.
    """

    attempt: Attempt
    base: Agreed
    lifts: Mapping[str, list[int]]
    bases: dict[str, int]


def ready(job: Job) -> Ready:
    """Check an order for a masked round, and open the other sites' shares.

    Raises:
        UserError: The site refuses the order.
        BlamedError: Another site's shares are wrong.
    """
    attempt = attempt_of(job)
    _check_sums(job)
    attempt.held = opened(job, attempt)
    check_enough(attempt, len(attempt.held) + 1)
    return Ready(attempt, _agreed_base(job), _lifts(job), _bases(job, attempt))


def _check_sums(job: Job) -> None:
    """Raise UserError unless each site counts once: two sums with different weights are two equations."""
    order, bits = job.order, job.config.federation.scale_bits
    if {*order.sums.values()} != {ONCE}:
        raise UserError("order.sums: under masks each site counts once")
    lifts = order.kind == TRAIN and LIFT in job.content.array_records
    if order.slot not in ("", *order.sums) or (not order.slot and lifts):
        raise UserError("order.slot: is not a record that is summed")
    if not job.simulated and bits < LEAST_BITS:
        raise UserError(f"federation.scale_bits: got {bits}, but masked sums of real sites need at least {LEAST_BITS}")


def _agreed_base(job: Job) -> Agreed:
    """Return the agreement of the sites in the round that this one continues from.

    Raise UserError if this site has not signed the list of that round: only a signed list ensures that all its sites
    trained in the same way. Also raise it if a site with a budget would replace a contribution twice, and not all of
    the noise is its own (`noise_share`): the others' noise could be averaged away.
    """
    secrets, base = Secrets(job.store), job.order.base
    if not base:
        return Agreed()
    if (agreement := secrets.agreement(base)) is None and secrets.is_new():
        raise LostStateError(f"{job.site.name}: its own state is lost: that after round {base}", base)
    if agreement is None:
        raise UserError(f"order.base: this site has not signed which sites count in round {base}; forget and readmit it")
    shared = job.config.privacy.noise and job.policy.epsilon and not job.simulated and not job.order.slot
    if shared and secrets.last_read() > base:
        raise UserError(f"order.base: the sum of round {secrets.last_read()} is read, and under noise a contribution is "
                        "replaced only once; start a new run")  # fmt: skip
    return agreement


def _lifts(job: Job) -> dict[str, list[int]]:
    """Return, by leaving site, the rounds of the masks that this site has in common with it."""
    rounds_by_site = state_of(job, LIFT)
    most = len(Secrets(job.store).mask_keys()) if rounds_by_site else 0
    if any(rounds.numel() > most for rounds in rounds_by_site.values()):
        raise UserError("secure aggregation: the server names more rounds than this site has masks for")
    lifts = {name: sorted({int(one) for one in rounds.flatten().tolist()}) for name, rounds in rounds_by_site.items()}
    before = Secrets(job.store).removed_masks() if lifts else {}
    for name, rounds in lifts.items():
        if again := [one for one in rounds if before.get(f"{name} {one}", job.order.round) != job.order.round]:
            raise UserError(f"secure aggregation: the mask of round {again[0]} in common with {name} is already removed")
    return lifts


def _bases(job: Job, attempt: Attempt) -> dict[str, int]:
    """Return, by site of this attempt, the round that it continues from, as the server sends it to all sites."""
    state = state_of(job, BASES)
    members = attempt.held.keys() | {job.site.name}
    if not members <= state.keys() or any(one.dtype != torch.int64 or one.shape != (1,) for one in state.values()):
        raise UserError(f"secure aggregation: the record '{BASES}' cannot be read")
    bases = {name: int(state[name]) for name in members}
    if bases[job.site.name] != job.order.base:
        raise UserError("order.base: is not the round that the server sends to the other sites")
    return bases
