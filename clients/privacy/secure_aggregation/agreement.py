"""The site's side of secure aggregation, last steps: sign the list of the sites that count, and remove masks.

A site signs a list if every site in it signed the same training. It helps to remove masks once, and only if enough
sites have signed the same list (Bonawitz et al. 2017, the consistency check against an active server).
"""

from fedloom.clients.job import Job
from fedloom.clients.objectives import Answer
from fedloom.clients.privacy.memory import Disclosure
from fedloom.clients.privacy.secure_aggregation.asked import attempt_of, check_enough, incoming, to_tensor
from fedloom.clients.privacy.secure_aggregation.members import check_members
from fedloom.clients.privacy.secure_aggregation.primitives import (
    SECRET,
    SIGNATURE,
    counted_words,
    history_words,
    is_signature,
    signature,
    trained_words,
)
from fedloom.clients.privacy.secure_aggregation.secrets import Agreed, Attempt, Secrets
from fedloom.clients.privacy.sketch import unpacked
from fedloom.clients.protocol.messages import SECURE_CONFIRM, SECURE_TRAINED, SECURE_UNMASK
from fedloom.conf.errors import UserError


def confirm(job: Job) -> Answer:
    """Answer SECURE_CONFIRM: sign the server's list of the sites whose contributions count (1) or that dropped out (0).

    A site signs one list in an attempt, of sites that have signed the same training. If one site trained differently,
    the server could know its contribution, and the difference to a second sum would reveal the rest. Raise
    SummedBeforeError if this sum minus an earlier one would reveal what a few sites sent.
    """
    secrets = Secrets(job.store)
    attempt, mine = attempt_of(job), job.site.name
    counts = {name: bool(flag[0]) for name, flag in incoming(job, SECURE_CONFIRM, 1).items()}
    counted = sorted(name for name, flag in counts.items() if flag)
    if not attempt.sent or counts.keys() != attempt.held.keys() | {mine} or mine not in counted:
        raise UserError("secure aggregation: the list of the sites that count is not one of this attempt")
    if attempt.counted not in ([], counted):
        raise UserError("secure aggregation: this site has signed another list of the sites that count")
    if staying := sorted(attempt.lifts.keys() & set(counted)):
        raise UserError(f"secure aggregation: {staying[0]} leaves, but is in the list of the sites that count")
    check_enough(attempt, len(counted))
    if not job.simulated:
        check_members(job.policy, counted)
    _check_trained(job, attempt, counted)
    job.memory.check(_disclosure(job, attempt, counted))
    attempt.counted = counted
    if attempt.trains:
        secrets.save_agreement(job.order.round, attempt.bases[mine], Agreed(attempt.statement, counted))
    secrets.save(attempt)
    return Answer({SECURE_CONFIRM: {"signature": to_tensor(signature(bytes.fromhex(attempt.signing), _statement(attempt)))}})


def _check_trained(job: Job, attempt: Attempt, counted: list[str]) -> None:
    """Raise UserError unless all sites that count have signed the same training as this one.

    Sites that continue from the same round must also have signed the same agreement in it. If a site was prepared
    differently, the server could know its contribution.
    """
    mine, bases = job.site.name, attempt.bases
    signatures, text = incoming(job, SECURE_TRAINED, 2 * SIGNATURE), trained_words(attempt.id, attempt.statement)
    base = (Secrets(job.store).agreement(bases[mine]) if bases[mine] else None) or Agreed()
    history = history_words(attempt.id, base.digest)
    for name in (name for name in counted if name != mine):
        pair, signing = signatures.get(name, b""), attempt.keys(name).signing
        if not is_signature(signing, text, pair[:SIGNATURE]):
            raise UserError(f"secure aggregation: {name} has not signed the same training as this site")
        if bases[name] == bases[mine] and not is_signature(signing, history, pair[SIGNATURE:]):
            raise UserError(f"secure aggregation: {name} has not signed that it continues from the same state as this site")


def unmask(job: Job) -> Answer:
    """Answer SECURE_UNMASK, once in an attempt: a share of one secret of each site, if enough sites signed the same list.

    For sites whose contributions count, these are shares of the individual mask; for sites that dropped out, of their
    common masks.
    """
    secrets = Secrets(job.store)
    attempt, mine = attempt_of(job), job.site.name
    if not attempt.counted or attempt.unmasked:
        raise UserError("secure aggregation: the masks of this attempt cannot be removed now")
    signatures, agree = incoming(job, SECURE_UNMASK, SIGNATURE), 0
    for name in attempt.counted:
        good = name in signatures and is_signature(attempt.keys(name).signing, _statement(attempt), signatures[name])
        if (agree := agree + good) >= attempt.threshold:
            break
    if agree < attempt.threshold:
        raise UserError(f"secure aggregation: {agree} sites have signed this site's list, but {attempt.threshold} must: "
                        "the server sent sites different lists, or had them train differently")  # fmt: skip
    job.memory.add(_disclosure(job, attempt, attempt.counted))
    attempt.unmasked = True
    secrets.record_read(job.order.round)
    secrets.save_removed_masks(attempt, job.order.round)
    secrets.save(attempt)
    shares = {mine: to_tensor(bytes.fromhex(attempt.shares))}
    for name, text in ((name, bytes.fromhex(shares_hex)) for name, shares_hex in attempt.held.items()):
        shares[name] = to_tensor(text[:SECRET] if name in attempt.counted else text[SECRET:])
    return Answer({SECURE_UNMASK: shares})


def _statement(attempt: Attempt) -> bytes:
    """Return what a site signs: the sites of the sum."""
    return counted_words(attempt.id, attempt.statement, attempt.counted)


def _disclosure(job: Job, attempt: Attempt, counted: list[str]) -> Disclosure:
    bases, mine = attempt.bases, attempt.bases[job.site.name]
    same_base = [name for name in counted if bases[name] == mine or not attempt.trains]
    first = not (attempt.trains and any(bases[name] for name in counted))
    about = job.order.run, job.order.round, counted, same_base, first, attempt.config, unpacked(attempt.sketches)
    return Disclosure(*about, list(attempt.lifts), attempt.idle, attempt.draws)
