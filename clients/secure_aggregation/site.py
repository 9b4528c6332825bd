"""The site's side of secure aggregation, first steps: keys, shares, the masked contribution.

Bonawitz et al. 2017, Fig. 4, with the consistency check against an active server. A site answers only while more than two
thirds of those that began the round are with it. It signs one list of the sites that count, with what determined its
training; it takes masks off when as many have signed the same. It does so once in an attempt, and of no other site both
kinds: it helps to rebuild either the mask that is that site's alone (its contribution counts) or its common masks (it
dropped out). Wrong shares are known by their hashes.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from clients.messages import (
    BASES,
    COMMITMENTS,
    IDLE,
    LIFT,
    MASKED,
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_TRAINED,
    to_arrays,
    to_states,
)
from clients.objectives import Answer
from clients.partial import SAMPLES
from clients.secure_aggregation.asked import attempt_id, check_enough, incoming, state_of, to_tensor, words
from clients.secure_aggregation.members import check_members
from clients.secure_aggregation.primitives import (
    KEY,
    PUBLIC,
    SECRET,
    PublicKeys,
    agreed,
    check_room,
    mask,
    places,
    seal,
    share_commitment,
    shared_out,
    sign,
    signature,
    threshold_of,
    trained_words,
    unseal,
)
from clients.secure_aggregation.secrets import Attempt, Secrets
from clients.sent import Sent
from conf.errors import UserError
from fusion.exact import State, digest, quantise

if TYPE_CHECKING:
    from flwr.app import ArrayRecord
    from numpy.typing import NDArray

    from clients.job import Job

DEFAULT_WEIGHT = 1e4  # of a configuration that sets no largest_weight
OWN_AFFAIR = (SECURE_SHARES, LIFT)  # records of an order that differ from site to site


class BlamedError(UserError):
    """A site's shares for this one cannot be used."""

    def __init__(self, site: str, why: str) -> None:
        super().__init__(f"secure aggregation: {site}'s shares cannot be used: {why}")
        self.site = site


def keys(job: "Job") -> Answer:
    """Begin an attempt: draw four secrets; the answer has the public keys (128 bytes) and a signature of them."""
    attempt = Attempt.begin(attempt_id(job))
    Secrets(job.store).save(attempt)
    public = attempt.public().packed()
    return Answer(
        {SECURE_KEYS: {"keys": to_tensor(public + job.policy.identity.signed(_claim(job, job.site.name, public)))}}
    )


def shares(job: "Job") -> Answer:
    """Hear of every site's keys; share out two secrets among all, each share sealed for the site that it is for.

    The answer has the sealed shares, and for the server the commitments to all of them, in the order of the sites' names.
    """
    secrets = Secrets(job.store)
    attempt, mine = secrets.attempt(attempt_id(job)), job.site.name
    if attempt.peers:
        raise UserError("secure aggregation: this attempt's secrets were shared out")
    given = incoming(job, SECURE_KEYS)
    for name, one in given.items():
        _check_signed(job, name, one)
    public = {name: PublicKeys.read(one[:PUBLIC]) for name, one in given.items()}
    if public.get(mine) != attempt.public():
        raise UserError("secure aggregation: the keys that the server passes on as this site's are not its own")
    if len({one.pair for one in public.values()}) < len(public):
        raise UserError("secure aggregation: two sites have the same keys")
    attempt.peers = {name: one.packed().hex() for name, one in public.items()}
    attempt.threshold = threshold_of(job.config.federation.secure_threshold, len(attempt.peers))
    check_enough(attempt, len(attempt.peers))
    if not job.simulated:
        check_members(job.policy, attempt.peers)
    return Answer(_dealt(job, attempt, secrets))


def _check_signed(job: "Job", name: str, keys: bytes) -> None:
    """BlamedError for keys that the site of this name has not signed."""
    try:
        job.policy.identity.check(name, _claim(job, name, keys[:PUBLIC]), keys[PUBLIC:])
    except UserError as error:
        if name == job.site.name:
            raise
        raise BlamedError(name, str(error)) from None


def _dealt(job: "Job", attempt: Attempt, secrets: Secrets) -> dict[str, State]:
    """Two secrets as sealed shares, with the commitments to all shares; this site's own share is saved."""
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


def masked(
    job: "Job", contribution: Mapping[str, State], samples: int, sketch: "NDArray[np.float32]"
) -> "dict[str, ArrayRecord]":
    """What a site sends of a round's records: of each a vector, int64, that looks random; only the sum over sites does not.

    Of the contribution that the server keeps it is the change since the last one that counted. Masks that this site has in
    common with one that leaves (LIFT) are taken out of it in passing. `sketch`: of the change of the round. Beside them is
    a signed digest of what determined the training: only sites that trained by the same are summed.
    """
    secrets, order = Secrets(job.store), job.order
    attempt = secrets.attempt(order.secure)
    if attempt.sent:
        raise UserError("secure aggregation: this attempt's contribution was sent")
    attempt.held = _opened(job, attempt)
    check_enough(attempt, len(attempt.held) + 1)
    common = {name: agreed(bytes.fromhex(attempt.pair), attempt.keys(name).pair, *words(job)) for name in attempt.held}
    lifts, found = _lifts(job), {}
    for record, counted in order.sums.items():
        whole = quantise(contribution[record], job.config.federation.scale_bits)
        times = samples if counted == SAMPLES else 1
        vector = flat(whole)
        _check_room(job, vector, times * (len(common) + 1))
        vector *= times
        if record == order.slot:
            vector = vector - flat(Sent(job.store).summed(order.base)) if order.base else vector
            vector = vector - _lifted(job, lifts, record, len(vector))
        vector += mask(bytes.fromhex(attempt.own), record, len(vector))
        for name, key in common.items():
            vector.add_(mask(key, record, len(vector)), alpha=sign(job.site.name, name))
        found[record] = to_arrays({MASKED: vector})
    attempt.idle = order.again == IDLE
    attempt.sent, attempt.leaving = True, [name for name, rounds in lifts.items() if rounds]
    attempt.statement, attempt.bases, attempt.sketch = _trained(job), _bases(job, attempt), sketch.tobytes().hex()
    word = signature(bytes.fromhex(attempt.signing), trained_words(attempt.id, attempt.statement))
    found[SECURE_TRAINED] = to_arrays({"digest": to_tensor(bytes.fromhex(attempt.statement)), "signature": to_tensor(word)})
    secrets.masked(order.round, common)
    secrets.save(attempt)
    return found


def noise_share(job: "Job") -> float:
    """Of the variance of noise in the sum, what a site adds so that it is there if as few sites count as may.

    A site with a budget of its own relies on the noise of sites alone whose keys it knows.
    """
    attempt = Secrets(job.store).attempt(job.order.secure)
    known = len(attempt.peers.keys() & job.policy.identity.known().keys())
    if job.policy.epsilon and not job.simulated and known < attempt.threshold:
        return 1.0
    return 1.0 / max(1, attempt.threshold)


def flat(state: State) -> Tensor:
    """All entries of an int64 state as one vector, its tensors in the order of their names."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(state[name].flatten() for name in sorted(state))])


def bounded(job: "Job", contribution: Mapping[str, State]) -> dict[str, State]:
    """The records with no entry beyond federation.largest_weight: whether a sum fits must not depend on the site's images.

    Noise has hidden them already: then every entry stays as it is.
    """
    if job.config.privacy.noise:
        return dict(contribution)
    most = job.config.federation.largest_weight or DEFAULT_WEIGHT
    return {record: {name: one.clamp(-most, most) if one.dtype.is_floating_point else one for name, one in state.items()}
            for record, state in contribution.items()}  # fmt: skip


def _check_room(job: "Job", vector: Tensor, times: int) -> None:
    """UserError unless `times` vectors of `bounded` records add up in 64 bits."""
    federation = job.config.federation
    most = math.ceil((federation.largest_weight or DEFAULT_WEIGHT) * 2.0**federation.scale_bits)
    if job.config.privacy.noise and vector.numel():
        most = max(most, int(vector.abs().max()))
    check_room(most, times)


def _bases(job: "Job", attempt: Attempt) -> dict[str, int]:
    """By name of a site of this attempt, the round that it goes on from, as the server tells all of them."""
    found = state_of(job, BASES)
    here = attempt.held.keys() | {job.site.name}
    if not here <= found.keys() or any(one.dtype != torch.int64 or one.shape != (1,) for one in found.values()):
        raise UserError(f"secure aggregation: the record '{BASES}' cannot be read")
    bases = {name: int(found[name]) for name in here}
    if bases[job.site.name] != job.order.base:
        raise UserError("order.base: is not the round that the other sites hear of")
    return bases


def _trained(job: "Job") -> str:
    """A digest of what determined the training of all sites of the round: the order, the configuration, what was sent."""
    order = job.order
    sent = {record: digest(state) for record, state in sorted(to_states(job.content).items()) if record not in OWN_AFFAIR}
    parts = [order.config, order.run, order.round, order.rounds, order.members, order.kind, order.split, order.again,
             sorted(order.sums.items()), order.slot, sent]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _lifted(job: "Job", lifts: Mapping[str, list[int]], record: str, size: int) -> Tensor:
    """The masks that this site's contribution has in common with sites that leave, from the rounds that count."""
    total, kept = torch.zeros(size, dtype=torch.int64), Secrets(job.store).masks() if lifts else {}
    for name, rounds in lifts.items():
        for round in rounds:
            if name not in kept.get(round, {}):
                raise UserError(f"secure aggregation: the mask in common with a site that leaves, of round {round}, is lost")
            total.add_(mask(kept[round][name], record, size), alpha=sign(job.site.name, name))
    return total


def _lifts(job: "Job") -> dict[str, list[int]]:
    """By name of a site that leaves, the rounds of the masks that this one has in common with it."""
    found = state_of(job, LIFT)
    most = len(Secrets(job.store).masks()) if found else 0
    if any(rounds.numel() > most for rounds in found.values()):
        raise UserError("secure aggregation: the server names more rounds than this site has masks of")
    return {name: sorted({int(one) for one in rounds.flatten().tolist()}) for name, rounds in found.items()}


def _channel(job: "Job", attempt: Attempt, other: str, sender: str, receiver: str) -> bytes:
    """The key with which one site seals shares for another."""
    return agreed(bytes.fromhex(attempt.channel), attempt.keys(other).channel, *words(job), sender, receiver)


def _about(job: "Job", attempt: Attempt) -> str:
    """What shares are sealed with, beside who is to read them: whoever heard of other sites or keys cannot open them."""
    told = hashlib.sha256("\n".join(f"{name} {one}" for name, one in sorted(attempt.peers.items())).encode())
    return "\n".join((*words(job), told.hexdigest()))


def _opened(job: "Job", attempt: Attempt) -> dict[str, str]:
    """Others' shares for this site, of both of their secrets, as hex. UserError unless all who sealed them heard of the same
    sites as this one: of sites that know of others, a server could ask for the other secret. BlamedError for shares that
    are not those that the server has commitments to (64 bytes behind what is sealed).
    """
    given, mine, about, found = incoming(job, SECURE_SHARES), job.site.name, _about(job, attempt), dict[str, str]()
    if not given.keys() <= attempt.peers.keys() - {mine}:
        raise UserError("secure aggregation: shares are from sites that did not begin this round")
    for name, both in given.items():
        sealed, committed = both[: -2 * KEY], both[-2 * KEY :]
        text = unseal(_channel(job, attempt, name, name, mine), sealed, "\n".join((about, name, mine)))
        if text is None or len(text) != 2 * SECRET:
            raise BlamedError(name, "they cannot be opened, or it heard of other sites")
        if share_commitment(text[:SECRET]) + share_commitment(text[SECRET:]) != committed:
            raise BlamedError(name, "they are others than the server has commitments to")
        found[name] = text.hex()
    return found


def _claim(job: "Job", name: str, public: bytes) -> bytes:
    """What a site signs: these are its keys in this attempt."""
    return "\n".join((*words(job), name, public.hex())).encode()
