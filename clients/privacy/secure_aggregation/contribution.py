"""The site's side of secure aggregation: its contribution under masks, and what it remembers of it.

Of every record that is summed it keeps a sketch of what the server does not know of it, and it signs a digest of what
determined the training: see clients.privacy.memory and clients.privacy.secure_aggregation.agreement.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from fedloom.clients.job import Job
from fedloom.clients.privacy.changes import Changes
from fedloom.clients.privacy.secure_aggregation.asked import to_tensor, words
from fedloom.clients.privacy.secure_aggregation.opening import Ready
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
    config_digest,
    to_arrays,
    to_states,
)
from fedloom.clients.storage.sent import Sent
from fedloom.conf import to_json
from fedloom.conf.errors import UserError
from fedloom.conf.schema import RunConfig
from fedloom.fusion.state import State

LARGEST_START = 1024  # of a weight that is sent: float32 has steps of 6e-5 beside it
DEFAULT_WEIGHT = 1e4  # of a configuration that sets no largest_weight
OWN_AFFAIR = (SECURE_SHARES, LIFT)  # records of an order that differ from site to site


def masked(
    job: Job, ready: Ready, sketch_key: bytes, whole: Mapping[str, State], changed: Changes, steps: int
) -> dict[str, ArrayRecord]:
    """What a site sends of a round's records: of each a vector, int64, that looks random; only the sum over sites does not.

    Of the contribution that the server keeps it is the change since the last one that counted. Masks that this site has in
    common with one that leaves (LIFT) are taken out of it in passing.
    Beside them is a signed digest of what determined the training, and one of the round that it goes on from: only sites
    that trained by the same are summed. `whole`: the records, int64. `changed`: the change of the round, before noise.
    `steps`: of the optimiser. Where a privacy budget bounds what sums tell, no sketches are kept.
    """
    secrets, order, charged = Secrets(job.store), job.order, job.charged
    attempt, lifts = ready.attempt, ready.lifts
    if attempt.sent:
        raise UserError("secure aggregation: this attempt's contribution was sent")
    _check_records(job, whole, changed)
    common = {name: agreed(bytes.fromhex(attempt.pair), attempt.keys(name).pair, *words(job)) for name in attempt.held}
    found, moved = {}, dict[str, Sketch]()
    if not charged:
        seen, moved = _sketches(job, sketch_key, secrets, changed)
        attempt.sketches = packed(seen)
    for record in order.sums:
        vector = flat(whole[record])
        _check_room(job, vector, changed.begin[record] if changed.is_known(record) else {}, len(common) + 1)
        if record == order.slot:
            vector = vector - flat(_replaced(job, whole[record])) if order.base else vector
            vector = vector - _lifted(job, lifts, record, len(vector))
        vector += mask(bytes.fromhex(attempt.own), record, len(vector))
        for name, key in common.items():
            vector.add_(mask(key, record, len(vector)), alpha=sign(job.site.name, name))
        found[record] = to_arrays({MASKED: vector})
    attempt.sent, attempt.idle = True, order.again == IDLE
    attempt.lifts = {name: rounds for name, rounds in lifts.items() if rounds}
    attempt.statement, attempt.bases, attempt.config = _trained(job, steps), ready.bases, _configured(job)
    found[SECURE_TRAINED] = to_arrays(_signed(attempt, ready.base.digest))
    if not charged:
        secrets.keep_moved(order.round, order.base, moved)
    secrets.agree(order.round, order.base, None)
    secrets.masked(order.round, common)
    secrets.save(attempt)
    return found


def _check_records(job: Job, whole: Mapping[str, State], changed: Changes) -> None:
    """UserError unless all records are summed at once: sums of the same that differ by records are two equations. And for
    weights beside which a site's moves are rounded: the rounding would make what is repeated look new."""
    if job.order.sums.keys() != whole.keys():
        raise UserError(f"order.sums: under masks all records of a contribution ({', '.join(sorted(whole))}) are summed")
    if job.simulated or job.charged:
        return
    known = [
        one for record, state in changed.begin.items() if changed.is_known(record) for one in state.values() if one.numel()
    ]
    if max((int(one.abs().max()) for one in known), default=0) > LARGEST_START * 2**job.config.federation.scale_bits:
        raise UserError(f"secure aggregation: a network with weights beyond {LARGEST_START} was sent; a site's moves would "
                        "be rounded beside them")  # fmt: skip


def _replaced(job: Job, now: State) -> State:
    """The contribution that this one replaces. UserError if it has other tensors."""
    before = Sent(job.store).summed(job.order.base)
    if {name: one.shape for name, one in before.items()} != {name: one.shape for name, one in now.items()}:
        raise UserError(f"order.slot: the contribution of round {job.order.base} has other tensors")
    return before


def _signed(attempt: Attempt, history: bytes) -> State:
    """Signatures of what determined the training, and of the round that it goes on from."""
    key, digest = bytes.fromhex(attempt.signing), bytes.fromhex(attempt.statement)
    words = {"": trained_words(attempt.id, attempt.statement), "history_": history_words(attempt.id, history)}
    signatures = {f"{name}signature": to_tensor(signature(key, text)) for name, text in words.items()}
    return {"digest": to_tensor(digest), "history": to_tensor(history), **signatures}


def _sketches(job: Job, key: bytes, secrets: Secrets, changed: Changes) -> tuple[dict[str, Sketch], dict[str, Sketch]]:
    """Sketches of what the server does not know of this site's part of each record that is summed, before noise; and of how
    far the records moved that begin at what it has sent.

    Of what begins at what the server has sent, that is how far it moved; of the contribution that it keeps, less how far
    that had moved which is replaced. Of what begins at what this site sent last, the whole, or the contribution's change.
    """
    order, found, moved = job.order, dict[str, Sketch](), dict[str, Sketch]()
    before = secrets.moved(order.base) if order.base else {}
    whole = changed.whole()
    for record, state in changed.moved.items():
        replaces, known = record == order.slot and order.base > 0, changed.is_known(record)
        rest = state if known or replaces else whole[record]
        each = {f"{record}/{name}": one for name, one in sketches(rest, key).items()}
        if replaces and known and not each.keys() <= before.keys():
            raise UserError(f"order.slot: '{record}' is not the record that it replaces")
        found |= {name: one - before[name] if replaces and known else one for name, one in each.items()}
        moved |= each if known else {}
    return found, moved


def _configured(job: Job) -> str:
    """A digest of the configuration, but for what is the same for all sites whatever it is: the run's name and length."""
    return config_digest(to_json(replace(job.config, run=RunConfig(), rounds=1)))


def noise_share(job: Job, ready: Ready) -> float:
    """Of the variance of noise in the sum, what a site adds so that it is there if as few sites count as may.

    A site with a budget of its own relies on the noise of sites alone whose keys it knows, and on nobody's where its
    contribution stays in the sum: in later rounds without it, the others' noise is drawn anew and can be averaged away.
    """
    attempt = ready.attempt
    known = len(attempt.peers.keys() & job.policy.identity.known().keys())
    if job.policy.epsilon and not job.simulated and (known < attempt.threshold or job.order.slot):
        return 1.0
    return 1.0 / max(1, attempt.threshold)


def flat(state: State) -> Tensor:
    """All entries of an int64 state as one vector, its tensors in the order of their names."""
    return torch.cat([torch.empty(0, dtype=torch.int64), *(state[name].flatten() for name in sorted(state))])


def bounded(job: Job, changed: Changes, given: Mapping[str, State]) -> Changes:
    """The change with no entry beyond federation.largest_weight: whether a sum fits must not depend on the site's images.

    Where the server knows the start, the move is cut: of a network that it sends just below the limit, all that is cut
    would be known to it. `given`: the records as floats; counters stay as they are.
    """
    most, moved = _most(job), dict[str, State]()
    for record, state in changed.moved.items():
        begin, known = changed.begin[record], changed.is_known(record)
        cut = {name: one.clamp(-most, most) if known else (begin[name] + one).clamp(-most, most) - begin[name]
               for name, one in state.items() if given[record][name].dtype.is_floating_point}  # fmt: skip
        moved[record] = {**state, **cut}
    return replace(changed, moved=moved)


def _most(job: Job) -> int:
    """federation.largest_weight, or DEFAULT_WEIGHT, in units of 2**-scale_bits."""
    federation = job.config.federation
    return math.ceil((federation.largest_weight or DEFAULT_WEIGHT) * 2.0**federation.scale_bits)


def _check_room(job: Job, vector: Tensor, begin: State, times: int) -> None:
    """UserError unless `times` vectors of `bounded` records add up in 64 bits. `begin`: where they began, if it is known."""
    most = _most(job) + max((int(one.abs().max()) for one in begin.values() if one.numel()), default=0)
    if job.config.privacy.noise and vector.numel():
        most = max(most, int(vector.abs().max()))
    check_room(most, times)


def _trained(job: Job, steps: int) -> str:
    """A digest of what determined the training of all sites of the round: the order, the configuration, what was sent.

    In a real federation the number of steps, too: an extractor that does not move in the first step would be moved by those
    sites alone that take two. Also with a budget, for all sites must come to the same digest.
    """
    order = job.order
    sent = {record: contents(state) for record, state in sorted(to_states(job.content).items()) if record not in OWN_AFFAIR}
    parts = [order.config, order.run, order.round, order.rounds, order.members, order.kind, order.split, order.again,
             sorted(order.sums.items()), order.slot, sent, 0 if job.simulated else steps]  # fmt: skip
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _lifted(job: Job, lifts: Mapping[str, list[int]], record: str, size: int) -> Tensor:
    """The masks that this site's contribution has in common with sites that leave, from the rounds that count."""
    total, kept = torch.zeros(size, dtype=torch.int64), Secrets(job.store).masks() if lifts else {}
    for name, rounds in lifts.items():
        for round in rounds:
            if name not in kept.get(round, {}):
                raise UserError(f"secure aggregation: the mask in common with a site that leaves, of round {round}, is lost")
            total.add_(mask(kept[round][name], record, size), alpha=sign(job.site.name, name))
    return total


def contents(state: State) -> list[list[object]]:
    """Of every tensor its name, kind, shape and a digest of its bytes: no two states have the same, whatever names are."""
    return [[name, str(one.dtype), list(one.shape), hashlib.sha256(_flat_bytes(one)).hexdigest()]
            for name, one in sorted(state.items())]  # fmt: skip


def _flat_bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
