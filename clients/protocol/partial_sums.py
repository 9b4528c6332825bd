"""Partial sums: a worker adds up what its sites send and hands over one exact sum. Integers: the bits are the same.

What the server must keep for each site is written here, by the worker, where the server will look for it. The sum travels
beside the replies and in none of them, so that no site's reply can be taken for one.

With federation.node_store both stay on the worker's node (Keeping): the server is told where, and fetches one sum a node.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from flwr.app import ArrayRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode
from torch import Tensor

from fedloom.clients.data import site_size
from fedloom.clients.data.listing import at_round
from fedloom.clients.protocol.configurations import configuration, parsed
from fedloom.clients.protocol.messages import (
    BEFORE,
    EXPECTED,
    LOST,
    MEAN,
    METRICS,
    STAR,
    TRAIN,
    UNKNOWN,
    TaskInstructions,
    read_order,
    text_of,
    text_record,
    to_arrays,
    to_states,
)
from fedloom.clients.protocol.reply_checks import Bounds, ReplyError, check_record, train_numbers
from fedloom.clients.storage.states import read_state, round_file, write_private_state
from fedloom.conf.schema import Config
from fedloom.fusion.exact import ExactSum, ExactSumError, dequantise, exact, quantise
from fedloom.fusion.state import State

ONCE, SAMPLES = "once", "samples"  # how often a record counts in its sum


@dataclass(frozen=True)
class PartialSum:
    """The exact sums over the replies of some sites: all of them count, or none.

    `messages`: ids of those that the replies answer. `samples`: of each site that is in it, by name. `addends`: of each
    record, those that it holds. `records`: int64 sums; of contributions, the change of the sum. Where a `node` has kept the
    records, they are under `ticket` there, and the sites' contributions are `blobs`, by name of the site.
    """

    run: str
    round: int
    messages: frozenset[str]
    samples: dict[str, int]
    addends: dict[str, int]
    records: dict[str, ArrayRecord]
    node: str = ""
    ticket: str = ""
    blobs: dict[str, str] = field(default_factory=dict)


class Keeping(Protocol):
    """A node's own part of what is kept of runs."""

    def put(self, run: str, state: State) -> str:
        """Keep a contribution; its digest."""
        ...

    def get(self, run: str, digest: str, holder: str) -> State:
        """A contribution that is kept here, or at the node `holder`."""
        ...

    def leave(self, sum: PartialSum) -> PartialSum:
        """Keep the records of a sum; the sum without them, and with where they are."""
        ...


def expected_record(likes: Mapping[str, Mapping[str, Tensor]]) -> ArrayRecord:
    """What the records that are added up on the way must hold: names and shapes, the same object for all sites."""
    return text_record(json.dumps({record: {name: list(tensor.shape) for name, tensor in like.items()} for record, like in
                                   likes.items()}))  # fmt: skip


def combine(
    asked: Sequence[Message], replies: Sequence[Message], part: Keeping | None = None
) -> tuple[list[Message], list[PartialSum]]:
    """The replies, and one sum for each run and round over the records of those that allow it (TaskInstructions.sums).

    Those hold METRICS alone then. A reply that cannot be added becomes an error of its own site. `part`: where contributions
    and sums are kept, if not at the server.
    """
    sums: dict[tuple[str, int, str], _Sums] = {}
    answers = []
    for message, reply in zip(asked, replies, strict=True):
        order = None if reply.has_error() or message.metadata.message_type != TRAIN else read_order(message.content)
        if order is None or not order.sums or order.secure or {LOST, UNKNOWN} & reply.content.config_records.keys():
            answers.append(reply)
            continue
        key = order.run, order.round, order.ledger
        into = sums.get(key) or sums.setdefault(key, _Sums(order, message.content, part))
        try:
            into.add(order, message, reply.content)
        except (ExactSumError, ReplyError) as error:
            answers.append(Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message))
            continue
        reply.content = RecordDict({METRICS: reply.content[METRICS]})
        answers.append(reply)
    found = [one.sum() for one in sums.values() if one.samples]
    return answers, found if part is None else [part.leave(one) for one in found]


class _Sums:
    """The sums of the sites of one run and round."""

    def __init__(self, order: TaskInstructions, content: RecordDict, part: Keeping | None) -> None:
        self.order, self.part = order, part
        self.config: Config = parsed(configuration(order.config, content, None), order.run)
        self.bits = self.config.federation.scale_bits
        shapes = json.loads(text_of(content.array_records[EXPECTED]))
        self.likes = {record: {name: torch.empty(shape, device="meta") for name, shape in like.items()} for record, like in
                      shapes.items()}  # fmt: skip
        self.sums = {record: ExactSum(self.bits) for record in order.sums}
        self.samples: dict[str, int] = {}
        self.messages: set[str] = set()
        self.blobs: dict[str, str] = {}

    def add(self, order: TaskInstructions, message: Message, content: RecordDict) -> None:
        """Add one site's records and write what the server keeps of it. Raises ExactSumError or ReplyError."""
        site = self.config.roster[order.site]
        with at_round(order.run, order.round):
            bounds = Bounds.of(self.config.federation, site_size(self.config, site))
        samples = int(train_numbers(content, bounds, hidden=bool(self.config.privacy.noise))["samples"])
        given, sent = _read(content), _read(message.content)
        start = {**sent[MEAN], **sent.get(STAR, {})}
        changed = {}
        for record, counted in order.sums.items():
            before = self._before(order, record, sent)
            check_record(record, given.get(record), before or self.likes[record], integers=False)
            bounds.check(record, given[record], dequantise(before, self.bits) if before else start)
            mine, times = quantise(given[record], self.bits), samples if counted == SAMPLES else 1
            changed[record] = self.sums[record].copy()
            changed[record].add(mine, times)
            if before:
                changed[record].add(before, -order.weight)
        if order.slot:
            self._keep(order, site.name, given[order.slot])
        self.sums, self.samples[site.name] = changed, samples
        self.messages.add(message.metadata.message_id)

    def _before(self, order: TaskInstructions, record: str, sent: Mapping[str, State]) -> State:
        """Of the record that is the site's contribution, what is in the sum now (int64)."""
        if record != order.slot or not order.before:
            return {}
        if self.part is None:
            return exact(read_state(Path(order.before)), self.bits)
        return exact(sent.get(BEFORE) or self.part.get(order.run, order.before, order.holder), self.bits)

    def _keep(self, order: TaskInstructions, site: str, state: State) -> None:
        if self.part is None:
            write_private_state(round_file(Path(order.ledger), site, order.round), state)
        else:
            self.blobs[site] = self.part.put(order.run, state)

    def sum(self) -> PartialSum:
        """All that was added."""
        records = {record: to_arrays(one.totals) for record, one in self.sums.items()}
        addends = {record: one.addends for record, one in self.sums.items()}
        messages = frozenset(self.messages)
        return PartialSum(self.order.run, self.order.round, messages, self.samples, addends, records, blobs=self.blobs)


def _read(content: RecordDict) -> dict[str, State]:
    try:
        return to_states(content)
    except Exception as error:  # what an app returns may be anything: NumPy raises EOFError, BadZipFile and more
        raise ReplyError(f"its arrays cannot be read ({error})") from None
