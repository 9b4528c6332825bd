"""The change of a round: what a site sends minus its start. The site must never be the only one that knows this start.

A record starts at what the server has sent in this round (Session.from_server), or else at what this site sent last.
If a session says that a record starts at the server's values, the start must equal them, to the bit: a server can leave
out values, and a session then falls back to others.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedloom.clients.job import Job
from fedloom.clients.objectives import Session
from fedloom.clients.protocol.messages import OWN, to_states
from fedloom.clients.storage.sent import Sent
from fedloom.conf.errors import UserError
from fedloom.fusion.exact import quantise
from fedloom.fusion.state import State


@dataclass(frozen=True)
class Changes:
    """The change of each record in a round, int64 in units of 2**-scale_bits: its start `begin`, and `moved` by training.

    `kept`: records that start at what this site sent last, also in the next round. `first`: in this round, these too
    start at what the server knows.
    """

    begin: dict[str, State]
    moved: dict[str, State]
    kept: frozenset[str]
    first: bool

    def is_known(self, record: str) -> bool:
        """Return whether the server knows the start (`begin`) of this record."""
        return self.first or record not in self.kept

    def whole(self) -> dict[str, State]:
        """Return the records after training: begin + moved."""
        return {record: {name: self.begin[record][name] + change for name, change in state.items()}
                for record, state in self.moved.items()}  # fmt: skip

    def tensors(self) -> list[Tensor]:
        """Return all tensors of `moved`, in the order of their names."""
        return [self.moved[record][name] for record in sorted(self.moved) for name in sorted(self.moved[record])]


def changes(job: Job, session: Session, start: Mapping[str, State], given: Mapping[str, State]) -> Changes:
    """Return the change from `start`, what a session would send without training, to `given`, what it sends.

    Raise LostStateError if what the site sent last is not in its store. Raise UserError if a record should start at
    what the server has sent, but does not.
    """
    bits, order = job.config.federation.scale_bits, job.order
    kept = frozenset(given) - session.from_server
    first = not order.base or OWN in job.content.array_records  # the session knows nothing that the server does not know
    begin = {record: quantise(state, bits) for record, state in start.items() if first or record not in kept}
    if not first:
        _check_sent(to_states(job.content), {record: state for record, state in start.items() if record not in kept})
    if lacking := kept - begin.keys():
        sent = Sent(job.store)
        begin |= {order.slot: sent.summed(order.base)} if order.slot in lacking else {}
        others = lacking - {order.slot}
        begin |= {record: state for record, state in sent.records(order.base).items() if record in others} if others else {}
    moved = {record: {name: tensor - begin[record][name] for name, tensor in quantise(state, bits).items()}
             for record, state in given.items()}  # fmt: skip
    return Changes(begin, moved, kept, first)


def _check_sent(sent: Mapping[str, State], begin: Mapping[str, State]) -> None:
    """Raise UserError if a record starts at a tensor that the server has not sent."""
    for record, state in begin.items():
        for name, tensor in state.items():
            if not any(name in each and _same(each[name], tensor) for each in sent.values()):
                raise UserError(f"record '{record}': tensor '{name}' does not start at what the server has sent in this "
                                "round, so that only this site knows it")  # fmt: skip


def _same(sent: Tensor, tensor: Tensor) -> bool:
    return sent.shape == tensor.shape and torch.equal(sent.to(tensor.dtype), tensor.cpu())


def keep_sent(job: Job, changed: Changes, sent: Mapping[str, State]) -> None:
    """Save the records that the next round's changes start from. `sent`: all records as the server will sum them, int64."""
    order, store = job.order, Sent(job.store)
    names = changed.kept | ({order.slot} if order.secure else set())  # masked contributions are changes of the last one
    integers = {record: dict(state) for record, state in sent.items() if record in names}
    if order.slot in integers:
        store.save(order.round, order.base, integers.pop(order.slot))
    if integers:
        store.save_records(order.round, order.base, integers)
