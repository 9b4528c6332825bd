"""The change of a round: how far what a site sends is from where it began, which is never anything that only the site knows.

A record begins at what the server has sent in this round (Session.from_server), or else at what this site sent last.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from clients.messages import OWN
from clients.sent import Sent
from fusion.exact import State, quantise

if TYPE_CHECKING:
    from clients.job import Job
    from clients.objectives import Session


@dataclass(frozen=True)
class Changes:
    """By record, in units of 2**-scale_bits (int64): where it began, and how far training has moved it.

    `kept`: records that begin at what was sent last, in the next round too.
    """

    begin: dict[str, State]
    moved: dict[str, State]
    kept: frozenset[str]

    def vector(self) -> Tensor:
        """All entries of the moves, int64 [n]."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *(one.flatten() for one in self.tensors())])

    def tensors(self) -> list[Tensor]:
        """The moves of all tensors."""
        return [self.moved[record][name] for record in sorted(self.moved) for name in sorted(self.moved[record])]


def changes(job: "Job", session: "Session", start: Mapping[str, State], given: Mapping[str, State]) -> Changes:
    """The change of what a session sends. `start`: what it would send without training.

    Raises LostStateError if what the site sent last is not in its store.
    """
    bits, order = job.config.federation.scale_bits, job.order
    kept = frozenset(given) - session.from_server
    first = not order.base or OWN in job.content.array_records  # the session knows nothing that the server does not
    begin = {record: quantise(state, bits) for record, state in start.items() if first or record not in kept}
    if lacking := kept - begin.keys():
        sent = Sent(job.store)
        begin |= {order.slot: sent.summed(order.base)} if order.slot in lacking else {}
        others = lacking - {order.slot}
        begin |= {record: state for record, state in sent.records(order.base).items() if record in others} if others else {}
    moved = {record: {name: one - begin[record][name] for name, one in quantise(state, bits).items()}
             for record, state in given.items()}  # fmt: skip
    return Changes(begin, moved, kept)


def keep_sent(job: "Job", changed: Changes, sent: Mapping[str, State]) -> None:
    """Save what the next round's records begin at. `sent`: the records as the server will add them up (float or int64)."""
    bits, order, store = job.config.federation.scale_bits, job.order, Sent(job.store)
    names = changed.kept | ({order.slot} if order.secure else set())  # masked contributions are changes of the last one
    integers = {record: quantise(state, bits) for record, state in sent.items() if record in names}
    if order.slot in integers:
        store.keep(order.round, order.base, integers.pop(order.slot))
    if integers:
        store.keep_records(order.round, order.base, integers)
