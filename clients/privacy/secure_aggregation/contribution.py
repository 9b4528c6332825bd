"""The site's side of secure aggregation: mask its contribution, and remember it.

For every summed record, the site stores a sketch of what the server does not know about it. It signs a digest of what
determined the training. See clients.privacy.memory and clients.privacy.secure_aggregation.agreement.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedloom.clients.data.standardise import STATISTICS, Standardisation
from fedloom.clients.job import Job
from fedloom.clients.privacy.changes import Changes
from fedloom.clients.privacy.secure_aggregation.asked import to_tensor, words
from fedloom.clients.privacy.secure_aggregation.opening import Ready, ready
from fedloom.clients.privacy.secure_aggregation.primitives import (
    agreed,
    check_room,
    history_words,
    mask,
    sign,
    signature,
    trained_words,
)
from fedloom.clients.privacy.secure_aggregation.secrets import Attempt, Secrets
from fedloom.clients.privacy.sketch import Sketch, packed, sketches
from fedloom.clients.protocol.messages import (
    IDLE,
    LIFT,
    MASKED,
    SECURE_SHARES,
    SECURE_TRAINED,
    TRAIN,
    config_digest,
    to_states,
)
from fedloom.clients.storage.sent import Sent
from fedloom.conf import to_json
from fedloom.conf.errors import UserError
from fedloom.conf.schema import Config, RunConfig
from fedloom.fusion.state import State

LARGEST_START = 1024  # largest weight that is sent: there, float32 has steps of 6e-5
DEFAULT_WEIGHT = 1e4  # for a configuration without largest_weight
OWN_AFFAIR = (SECURE_SHARES, LIFT)  # records of an order that differ between sites


def masked(
    job: Job, ready: Ready, sketch_key: bytes, whole: Mapping[str, State], changed: Changes, steps: int,
    draws: Sequence[str] = (),
) -> dict[str, State]:  # fmt: skip
    """Mask a contribution.

    For the contribution that the server stores, the result is the change since the last one that counted. Masks in common
    with a leaving site (LIFT) are removed from it at the same time. The site also signs a digest of what determined the
    training, and one of the round that it continues from: only sites that trained in the same way are summed. If a privacy
    budget bounds what sums reveal, no sketches are stored.

    Args:
        job: The order.
        ready: The checked round.
        sketch_key: The site's secret key for sketches.
        whole: The records after training, int64.
        changed: The change of the round, before noise.
        steps: The number of optimiser steps.
        draws: Digests of the images that the training drew (clients.privacy.draws).

    Returns:
        By record, an int64 vector that looks random. Only a sum over sites can be read.
    """
    secrets, order, charged = Secrets(job.store), job.order, job.charged
    attempt, lifts = ready.attempt, ready.lifts
    if attempt.sent:
        raise UserError("secure aggregation: this attempt's contribution is already sent")
    _check_records(job, whole, changed)
    common = {name: agreed(bytes.fromhex(attempt.pair), attempt.keys(name).pair, *words(job)) for name in attempt.held}
    records, moved = dict[str, State](), dict[str, Sketch]()
    if not charged:
        seen, moved = _sketches(job, sketch_key, secrets, changed)
        attempt.sketches, attempt.draws = packed(seen), [] if job.simulated else list(draws)
    for record in order.sums:
        vector = flat(whole[record])
        _check_room(job, vector, changed.begin[record] if changed.is_known(record) else {}, len(common) + 1)
        if record == order.slot:
            vector = vector - flat(_replaced(job, whole[record])) if order.base else vector
            vector = vector - _lifted(job, lifts, record, len(vector))
        vector += mask(bytes.fromhex(attempt.own), record, len(vector))
        for name, key in common.items():
            vector.add_(mask(key, record, len(vector)), alpha=sign(job.site.name, name))
        records[record] = {MASKED: vector}
    attempt.sent, attempt.idle, attempt.trains = True, order.again == IDLE, order.kind == TRAIN
    attempt.lifts = {name: rounds for name, rounds in lifts.items() if rounds or not attempt.trains}
    attempt.statement, attempt.bases, attempt.config = _trained(job, steps), ready.bases, _configured(job)
    records[SECURE_TRAINED] = _signed(attempt, ready.base.digest)
    if attempt.trains and not charged:
        secrets.save_sketches(order.round, order.base, moved)
    if attempt.trains:  # otherwise no later round continues from what is sent
        secrets.save_agreement(order.round, order.base, None)
        secrets.save_mask_keys(order.round, common)
    secrets.save(attempt)
    return records


def masked_sums(job: Job) -> dict[str, State]:
    """Mask the sums over the site's examples (data.standardise), as `masked` does.

    Their sketch is of mean and deviation, so that the site detects if other examples of the same kind were summed before.
    """
    checked, key, sums = ready(job), job.memory.begin(job.order.run, job.order.round), job.sums()
    about = Standardisation.from_sums(sums).state()
    none = {name: torch.zeros_like(tensor) for name, tensor in about.items()}
    changed = Changes({STATISTICS: none}, {STATISTICS: about}, frozenset(), True)
    return masked(job, checked, key, {STATISTICS: sums}, changed, 0)


def _check_records(job: Job, whole: Mapping[str, State], changed: Changes) -> None:
    """Raise UserError unless all records are summed at once, and sent weights are not too large.

    Sums over different records are two equations. Next to large weights a site's changes are rounded, and the
    rounding would make repeated changes look new.
    """
    if job.order.sums.keys() != whole.keys():
        raise UserError(f"order.sums: under masks all records of a contribution ({', '.join(sorted(whole))}) must be summed")
    if job.simulated or job.charged:
        return
    known = [
        tensor
        for record, state in changed.begin.items()
        if changed.is_known(record)
        for tensor in state.values()
        if tensor.numel()
    ]
    if max((int(tensor.abs().max()) for tensor in known), default=0) > LARGEST_START * 2**job.config.federation.scale_bits:
        raise UserError(f"secure aggregation: the server sent a network with weights beyond {LARGEST_START}; a site's "
                        "changes would be rounded next to them")  # fmt: skip


def _replaced(job: Job, now: State) -> State:
    """Return the contribution that this one replaces. Raise UserError if it has other tensors."""
    before = Sent(job.store).summed(job.order.base)
    if {name: one.shape for name, one in before.items()} != {name: one.shape for name, one in now.items()}:
        raise UserError(f"order.slot: the contribution of round {job.order.base} has other tensors")
    return before


def _signed(attempt: Attempt, history: bytes) -> State:
    """Return signatures of what determined the training, and of the round that it continues from."""
    key, digest = bytes.fromhex(attempt.signing), bytes.fromhex(attempt.statement)
    words = {"": trained_words(attempt.id, attempt.statement), "history_": history_words(attempt.id, history)}
    signatures = {f"{name}signature": to_tensor(signature(key, text)) for name, text in words.items()}
    return {"digest": to_tensor(digest), "history": to_tensor(history), **signatures}


def _sketches(job: Job, key: bytes, secrets: Secrets, changed: Changes) -> tuple[dict[str, Sketch], dict[str, Sketch]]:
    """Return sketches of what the server does not know about this site's records, and of how far known records moved.

    All sketches are before noise. For a record that starts at what the server has sent, the first is of how far it
    moved; for the contribution that the server stores, minus how far the replaced one had moved. For a record that
    starts at what this site sent last, it is of the whole record, or of the contribution's change.
    """
    order, unknown, moved = job.order, dict[str, Sketch](), dict[str, Sketch]()
    before = secrets.sketches(order.base) if order.base else {}
    whole = changed.whole()
    for record, state in changed.moved.items():
        replaces, known = record == order.slot and order.base > 0, changed.is_known(record)
        rest = state if known or replaces else whole[record]
        each = {f"{record}/{name}": one for name, one in sketches(rest, key).items()}
        if replaces and known and not each.keys() <= before.keys():
            raise UserError(f"order.slot: '{record}' is not the record that it replaces")
        unknown |= {name: one - before[name] if replaces and known else one for name, one in each.items()}
        moved |= each if known else {}
    return unknown, moved


def _configured(job: Job) -> str:
    """Return a digest of the configuration, without the run's name and length, which all sites share.

    For sums over examples, only of what determines the examples.
    """
    config = job.config
    if job.order.kind != TRAIN:
        config = Config(seed=config.seed, sites=config.sites, population=config.population, data=config.data)
    return config_digest(to_json(replace(config, run=RunConfig(), rounds=1)))


def noise_share(job: Job, ready: Ready) -> float:
    """Return the share of the sum's noise variance that a site adds, so that the noise suffices with the fewest sites.

    A site with a budget relies only on the noise of sites whose keys it knows. If its contribution stays in the sum,
    it relies on no other site: in later rounds without it, the others' noise is drawn again and can be averaged away.
    """
    attempt = ready.attempt
    known = len(attempt.peers.keys() & job.policy.identity.known().keys())
    if job.policy.epsilon and not job.simulated and (known < attempt.threshold or job.order.slot):
        return 1.0
    return 1.0 / max(1, attempt.threshold)


def flat(state: State) -> Tensor:
    """Return all entries of an int64 state as one vector, with tensors in the order of their names."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(state[name].flatten() for name in sorted(state))])


def bounded(job: Job, changed: Changes, given: Mapping[str, State]) -> Changes:
    """Return the change with entries clipped to federation.largest_weight, so that images cannot decide if a sum fits.

    If the server knows the start, the move is clipped: the server could send a network just below the limit, and
    would know all that is clipped. `given`: the records as floats; counters stay unchanged.
    """
    most, moved = _most(job), dict[str, State]()
    for record, state in changed.moved.items():
        begin, known = changed.begin[record], changed.is_known(record)
        cut = {name: one.clamp(-most, most) if known else (begin[name] + one).clamp(-most, most) - begin[name]
               for name, one in state.items() if given[record][name].dtype.is_floating_point}  # fmt: skip
        moved[record] = {**state, **cut}
    return replace(changed, moved=moved)


def _most(job: Job) -> int:
    """Return federation.largest_weight, or DEFAULT_WEIGHT, in units of 2**-scale_bits."""
    federation = job.config.federation
    return math.ceil((federation.largest_weight or DEFAULT_WEIGHT) * 2.0**federation.scale_bits)


def _check_room(job: Job, vector: Tensor, begin: State, times: int) -> None:
    """Raise UserError unless `times` vectors of `bounded` records fit into 64 bits. `begin`: their start, if it is known."""
    most = _most(job) + max((int(one.abs().max()) for one in begin.values() if one.numel()), default=0)
    if job.config.privacy.noise and vector.numel():
        most = max(most, int(vector.abs().max()))
    check_room(most, times)


def _trained(job: Job, steps: int) -> str:
    """Return a digest of what determined the training of all sites: the order, the configuration, what was sent.

    In a real federation it includes the number of steps: an extractor that does not move in the first step would be
    moved only by sites that take two. Sites with a budget include it, too, because all sites must have the same
    digest.
    """
    order = job.order
    sent = {record: contents(state) for record, state in sorted(to_states(job.content).items()) if record not in OWN_AFFAIR}
    parts = [order.config, order.run, order.round, order.rounds, order.members, order.kind, order.split, order.again,
             order.restoring, order.back,
             sorted(order.sums.items()), order.slot, sent, 0 if job.simulated else steps]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _lifted(job: Job, lifts: Mapping[str, list[int]], record: str, size: int) -> Tensor:
    """Return the masks that this site's contribution has in common with leaving sites, from the rounds that count."""
    total, masks_by_round = torch.zeros(size, dtype=torch.int64), Secrets(job.store).mask_keys() if lifts else {}
    for name, rounds in lifts.items():
        for round in rounds:
            if name not in masks_by_round.get(round, {}):
                raise UserError(f"secure aggregation: the mask of round {round} in common with a site that leaves is lost")
            total.add_(mask(masks_by_round[round][name], record, size), alpha=sign(job.site.name, name))
    return total


def contents(state: State) -> list[list[object]]:
    """Return each tensor's name, dtype, shape and digest, as lists for JSON. Different states have different results."""
    return [[name, str(tensor.dtype), list(tensor.shape), hashlib.sha256(_flat_bytes(tensor)).hexdigest()]
            for name, tensor in sorted(state.items())]  # fmt: skip


def _flat_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
