"""The site's side of secure aggregation, first steps: keys and shares of secrets.

Bonawitz et al. 2017, Fig. 4, with the consistency check against an active server. A site answers only while more than
two thirds of the sites that began the round respond. It signs what determined its training. It signs one list of the
sites that count, if these have signed the same training. It helps to remove masks once in an attempt, when enough
sites have signed the same list. For each other site it helps to rebuild only one kind: the site's individual mask
(its contribution counts) or its common masks (it dropped out). Wrong shares are detected by their hashes.
"""

import hashlib

from fedloom.clients.job import Job
from fedloom.clients.objectives import Answer
from fedloom.clients.privacy.secure_aggregation.asked import (
    attempt_id,
    attempt_of,
    check_enough,
    fixed,
    incoming,
    to_tensor,
    words,
)
from fedloom.clients.privacy.secure_aggregation.members import check_alike, check_members
from fedloom.clients.privacy.secure_aggregation.primitives import (
    KEY,
    PUBLIC,
    SECRET,
    PublicKeys,
    agreed,
    places,
    seal,
    share_commitment,
    shared_out,
    threshold_of,
    unseal,
)
from fedloom.clients.privacy.secure_aggregation.secrets import Attempt, Secrets
from fedloom.clients.protocol.failures import BlamedError
from fedloom.clients.protocol.messages import (
    COMMITMENTS,
    SECURE_KEYS,
    SECURE_SHARES,
)
from fedloom.conf.errors import UserError
from fedloom.fusion.state import State


def keys(job: Job) -> Answer:
    """Answer SECURE_KEYS: begin an attempt, draw four secrets, and return the public keys (128 bytes) and a signature."""
    attempt = Attempt.begin(attempt_id(job), fixed(job.order))
    Secrets(job.store).save(attempt)
    public = attempt.public().packed()
    return Answer(
        {SECURE_KEYS: {"keys": to_tensor(public + job.policy.identity.signed(_claim(job, job.site.name, public)))}}
    )


def shares(job: Job) -> Answer:
    """Answer SECURE_SHARES: receive all sites' keys, and split two secrets into shares, each sealed for its recipient.

    The answer has the sealed shares, and for the server the commitments to all of them, in the order of the sites'
    names.
    """
    secrets = Secrets(job.store)
    attempt, mine = attempt_of(job), job.site.name
    if attempt.peers:
        raise UserError("secure aggregation: this attempt's secrets are already shared")
    keys_by_site = incoming(job, SECURE_KEYS)
    for name, packed_keys in keys_by_site.items():
        _check_signed(job, name, packed_keys)
    public = {name: PublicKeys.read(packed_keys[:PUBLIC]) for name, packed_keys in keys_by_site.items()}
    if public.get(mine) != attempt.public():
        raise UserError("secure aggregation: the server passes on wrong keys for this site")
    if len({packed_keys.pair for packed_keys in public.values()}) < len(public):
        raise UserError("secure aggregation: two sites have the same keys")
    attempt.peers = {name: packed_keys.packed().hex() for name, packed_keys in public.items()}
    attempt.threshold = threshold_of(job.config.federation.secure_threshold, len(attempt.peers))
    check_enough(attempt, len(attempt.peers))
    if not job.simulated:
        check_members(job.policy, attempt.peers)
        check_alike(job, attempt.peers)
    return Answer(_dealt(job, attempt, secrets))


def _check_signed(job: Job, name: str, keys: bytes) -> None:
    """Raise BlamedError for keys without a signature of the site with this name."""
    try:
        job.policy.identity.check(name, _claim(job, name, keys[:PUBLIC]), keys[PUBLIC:])
    except UserError as error:
        if name == job.site.name:
            raise
        raise BlamedError(name, str(error)) from None


def _dealt(job: Job, attempt: Attempt, secrets: Secrets) -> dict[str, State]:
    """Return two secrets as sealed shares, with the commitments to all shares; save this site's own share."""
    two, count, mine = (bytes.fromhex(attempt.own), bytes.fromhex(attempt.pair)), len(attempt.peers), job.site.name
    own, pair = (shared_out(one, attempt.threshold, count) for one in two)
    about, sealed = _about(job, attempt), State()
    for name, place in places(attempt.peers).items():
        if name == mine:
            attempt.shares = own[place - 1].hex()
        else:
            text = own[place - 1] + pair[place - 1]
            sealed[name] = to_tensor(seal(_channel(job, attempt, name, mine, name), text, "\n".join((about, mine, name))))
    secrets.save(attempt)
    committed = {kind: to_tensor(b"".join(map(share_commitment, dealt))) for kind, dealt in (("own", own), ("pair", pair))}
    return {SECURE_SHARES: sealed, COMMITMENTS: committed}


def _channel(job: Job, attempt: Attempt, other: str, sender: str, receiver: str) -> bytes:
    """Return the key with which one site seals shares for another."""
    return agreed(bytes.fromhex(attempt.channel), attempt.keys(other).channel, *words(job), sender, receiver)


def _about(job: Job, attempt: Attempt) -> str:
    """Return the context that shares are sealed with: a site that received other sites or keys cannot open them."""
    digest = hashlib.sha256("\n".join(f"{name} {one}" for name, one in sorted(attempt.peers.items())).encode())
    return "\n".join((*words(job), digest.hexdigest()))


def opened(job: Job, attempt: Attempt) -> dict[str, str]:
    """Open the sealed shares that the other sites of this round sent to this one.

    A share opens only if its sender received the same list of sites. With two lists, the server could ask for the shares
    of both of a site's secrets.

    Args:
        job: The order. Its record SECURE_SHARES has, by site, the sealed text and the server's commitment (64 bytes).
        attempt: The current attempt, with all sites' public keys.

    Returns:
        By site, its two shares for this site (of its own mask's secret, then of its key pair's secret), as hex.

    Raises:
        UserError: A share comes from a site outside of this round.
        BlamedError: A share cannot be opened, or does not match its commitment.
    """
    messages, mine, about, shares = incoming(job, SECURE_SHARES), job.site.name, _about(job, attempt), dict[str, str]()
    if not messages.keys() <= attempt.peers.keys() - {mine}:
        raise UserError("secure aggregation: shares are from sites that did not begin this round")
    for name, message in messages.items():
        sealed, committed = message[: -2 * KEY], message[-2 * KEY :]
        text = unseal(_channel(job, attempt, name, name, mine), sealed, "\n".join((about, name, mine)))
        if text is None or len(text) != 2 * SECRET:
            raise BlamedError(name, "they cannot be opened, or it received other sites")
        if share_commitment(text[:SECRET]) + share_commitment(text[SECRET:]) != committed:
            raise BlamedError(name, "they do not match the commitments that the server has")
        shares[name] = text.hex()
    return shares


def _claim(job: Job, name: str, public: bytes) -> bytes:
    """Return what a site signs: its keys in this attempt."""
    return "\n".join((*words(job), name, public.hex())).encode()
