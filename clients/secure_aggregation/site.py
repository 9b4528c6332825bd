"""The site's side of secure aggregation, question by question: keys, shares, the masked contribution, taking masks off.

A site answers only while more than two thirds of those that began the round are with it and heard of the same sites, takes
masks off once in an attempt, and of no other site both kinds: it helps to rebuild either the mask that is that site's alone
(its contribution counts) or its common masks (it dropped out). Bonawitz et al. 2017, Fig. 4, with hashes of the secrets, by
which wrong shares are known.
"""

import hashlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clients.messages import LIFT, MASKED, SECURE_KEYS, SECURE_SHARES, SECURE_UNMASK, to_arrays, to_states
from clients.objectives import Answer
from clients.partial import SAMPLES
from clients.secure_aggregation.primitives import (
    KEY,
    SECRET,
    agreed,
    check_room,
    commitment,
    mask,
    places,
    public_key,
    seal,
    secret,
    shared_out,
    sign,
    threshold_of,
    unseal,
)
from clients.secure_aggregation.secrets import Attempt, Secrets
from conf.errors import UserError
from conf.sites import roster
from fusion.exact import State, quantise

if TYPE_CHECKING:
    from flwr.app import ArrayRecord

    from clients.job import Job

MOST_SITES = 1000  # of one secure sum: every two of them agree on a mask


def keys(job: "Job") -> Answer:
    """Begin an attempt: draw three secrets; what goes out are two public keys, a commitment (96 bytes) and a signature."""
    attempt = Attempt(_attempt_id(job), channel=secret().hex(), pair=secret().hex(), own=secret().hex())
    Secrets(job.store).save(attempt)
    public = _public(attempt)
    return Answer({SECURE_KEYS: {"keys": _tensor(public + job.policy.identity.signed(_claim(job, job.site.name, public)))}})


def shares(job: "Job") -> Answer:
    """Hear of every site's keys; share out two secrets among all, each share sealed for the site that it is for."""
    secrets = Secrets(job.store)
    attempt, mine = secrets.attempt(_attempt_id(job)), job.site.name
    if attempt.peers:
        raise UserError("secure aggregation: this attempt's secrets were shared out")
    given = _incoming(job, SECURE_KEYS)
    for name, one in given.items():
        job.policy.identity.check(name, _claim(job, name, one[: 3 * KEY]), one[3 * KEY :])
    attempt.peers = {name: one[: 3 * KEY].hex() for name, one in given.items()}
    if attempt.peers.get(mine) != _public(attempt).hex():
        raise UserError("secure aggregation: the keys that are said to be this site's are not")
    if len(set(attempt.peers.values())) < len(attempt.peers):
        raise UserError("secure aggregation: two sites have the same keys")
    attempt.threshold = threshold_of(job.config.federation.secure_threshold, len(attempt.peers))
    _enough(attempt, len(attempt.peers))
    two, count = (bytes.fromhex(attempt.own), bytes.fromhex(attempt.pair)), len(attempt.peers)
    own, pair = (shared_out(one, attempt.threshold, count) for one in two)
    about, sealed = _about(job, attempt), State()
    for name, place in places(attempt.peers).items():
        if name == mine:
            attempt.shares = own[place - 1].hex()
        else:
            text = own[place - 1] + pair[place - 1]
            sealed[name] = _tensor(seal(_channel(job, attempt, name, mine, name), text, "\n".join((about, mine, name))))
    secrets.save(attempt)
    return Answer({SECURE_SHARES: sealed})


def masked(job: "Job", contribution: Mapping[str, State], samples: int) -> "dict[str, ArrayRecord]":
    """What goes out of a round's records: of each one vector, int64, that looks random; only the sum over sites does not.

    Of the contribution that the server keeps it is the change since the last one that counted. Masks that this site has in
    common with one that leaves (LIFT) are taken out of it in passing.
    """
    secrets, order = Secrets(job.store), job.order
    attempt = secrets.attempt(order.secure)
    if attempt.sent:
        raise UserError("secure aggregation: this attempt's contribution was sent")
    attempt.held = _opened(job, attempt)
    _enough(attempt, len(attempt.held) + 1)
    common = {name: agreed(bytes.fromhex(attempt.pair), bytes.fromhex(attempt.peers[name])[KEY : 2 * KEY], *_words(job))
              for name in attempt.held}  # fmt: skip
    found = {}
    for record, counted in order.sums.items():
        whole = quantise(contribution[record], job.config.federation.scale_bits)
        times = samples if counted == SAMPLES else 1
        check_room(flat(whole), times * max(len(common) + 1, job.order.members))
        vector = flat(whole) * times
        if record == order.slot:
            vector = vector - flat(secrets.summed(order.base)) if order.base else vector
            secrets.keep(order.round, order.base, whole)
            vector = vector - _lifted(job, record, len(vector))
        vector = vector + mask(bytes.fromhex(attempt.own), record, len(vector))
        for name, key in common.items():
            vector += sign(job.site.name, name) * mask(key, record, len(vector))
        found[record] = to_arrays({MASKED: vector})
    attempt.sent, attempt.leaving = True, LIFT in job.content.array_records
    secrets.masked(order.round, common)
    secrets.save(attempt)
    return found


def noise_share(job: "Job") -> float:
    """Of the variance of noise in the sum, what a site adds so that it is there if as few sites count as may."""
    return 1.0 / max(1, Secrets(job.store).attempt(job.order.secure).threshold)


def unmask(job: "Job") -> Answer:
    """Shares of each site's secret: of those whose contribution counts (1), of the mask that is theirs alone; of those that
    dropped out (0), of their common masks. Once in an attempt, and over other sites than in an earlier attempt at the round
    only when sites leave.
    """
    secrets = Secrets(job.store)
    attempt, mine = secrets.attempt(_attempt_id(job)), job.site.name
    counts = {name: bool(one[0]) for name, one in _incoming(job, SECURE_UNMASK, 1).items()}
    if counts.keys() != attempt.held.keys() | {mine} or not counts[mine] or attempt.unmasked:
        raise UserError("secure aggregation: these masks are not to be taken off now")
    _enough(attempt, sum(counts.values()))
    if not attempt.leaving:
        secrets.tell(job.order.round, [name for name, one in counts.items() if one])
    attempt.unmasked = True
    secrets.save(attempt)
    found = {mine: _tensor(bytes.fromhex(attempt.shares))}
    for name, text in ((name, bytes.fromhex(both)) for name, both in attempt.held.items()):
        found[name] = _tensor(text[:SECRET] if counts[name] else text[SECRET:])
    return Answer({SECURE_UNMASK: found})


ANSWERS: "dict[str, Callable[[Job], Answer]]" = {SECURE_KEYS: keys, SECURE_SHARES: shares, SECURE_UNMASK: unmask}


def flat(state: State) -> Tensor:
    """All entries of an int64 state as one vector, its tensors in the order of their names."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(state[name].flatten() for name in sorted(state))])


def _lifted(job: "Job", record: str, size: int) -> Tensor:
    """The masks that this site's contribution has in common with sites that leave, from the rounds that count."""
    total, kept = torch.zeros(size, dtype=torch.int64), Secrets(job.store).masks()
    for name, rounds in to_states(job.content).get(LIFT, {}).items():
        for round in map(int, rounds.flatten().tolist()):
            if name not in kept.get(round, {}):
                raise UserError(f"secure aggregation: the mask in common with a site that leaves, of round {round}, is lost")
            total += sign(job.site.name, name) * mask(kept[round][name], record, size)
    return total


def _incoming(job: "Job", record: str, size: int = 0) -> dict[str, bytes]:
    """Bytes by name of a site, as the server passes them on. UserError for what cannot be that."""
    found = to_states(job.content).get(record, {})
    known = {site.name for site in roster(job.config)}
    good = found.keys() <= known and len(found) <= MOST_SITES and all(one.dtype == torch.uint8 for one in found.values())
    passed = {name: bytes(one.flatten().numpy()) for name, one in found.items()} if good else {}
    if not good or any(size and len(one) != size for one in passed.values()):
        raise UserError(f"secure aggregation: the record '{record}' cannot be read")
    return passed


def _enough(attempt: Attempt, sites: int) -> None:
    """UserError if so few sites are left that a sum over them tells too much."""
    if not 2 <= attempt.threshold <= sites:
        raise UserError(f"secure aggregation: {sites} sites are too few; {max(2, attempt.threshold)} must take part")


def _public(attempt: Attempt) -> bytes:
    pairs = b"".join(public_key(bytes.fromhex(seed)) for seed in (attempt.channel, attempt.pair))
    return pairs + commitment(bytes.fromhex(attempt.own))


def _channel(job: "Job", attempt: Attempt, other: str, sender: str, receiver: str) -> bytes:
    """The key with which one site seals shares for another."""
    public = bytes.fromhex(attempt.peers[other])[:KEY]
    return agreed(bytes.fromhex(attempt.channel), public, *_words(job), sender, receiver)


def _about(job: "Job", attempt: Attempt) -> str:
    """What shares are sealed with, beside who is to read them: whoever heard of other sites or keys cannot open them."""
    told = hashlib.sha256("\n".join(f"{name} {one}" for name, one in sorted(attempt.peers.items())).encode())
    return "\n".join((*_words(job), told.hexdigest()))


def _opened(job: "Job", attempt: Attempt) -> dict[str, str]:
    """Others' shares for this site, of both of their secrets, as hex. UserError unless all who sealed them heard of the same
    sites as this one: of sites that know of others, a server could ask for the other secret.
    """
    given, mine, about, found = _incoming(job, SECURE_SHARES), job.site.name, _about(job, attempt), dict[str, str]()
    if not given.keys() <= attempt.peers.keys() - {mine}:
        raise UserError("secure aggregation: shares are from sites that did not begin this round")
    for name, sealed in given.items():
        text = unseal(_channel(job, attempt, name, name, mine), sealed, "\n".join((about, name, mine)))
        if text is None or len(text) != 2 * SECRET:
            raise UserError(f"secure aggregation: {name}'s share cannot be opened, or {name} was told of other sites")
        found[name] = text.hex()
    return found


def _claim(job: "Job", name: str, public: bytes) -> bytes:
    """What a site signs: these are its keys in this attempt."""
    return "\n".join((*_words(job), name, public.hex())).encode()


def _words(job: "Job") -> tuple[str, str, str]:
    return job.order.run, str(job.order.round), job.order.secure


def _attempt_id(job: "Job") -> str:
    if not job.order.secure:
        raise UserError("order.secure: names no attempt at a round")
    return job.order.secure


def _tensor(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)
