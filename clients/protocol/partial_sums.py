"""Partial sums: a worker adds up its sites' records as integers and returns one exact sum, with the same bits.

The worker writes each site's contribution to the server's ledger folder. The sum travels apart from the replies, so that a
site cannot send one.

With federation.node_store both stay on the worker's node (Keeping). The server receives their place, and fetches one sum
per node.
"""

import contextlib
import hashlib
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
    ORDER,
    STAR,
    TRAIN,
    UNKNOWN,
    TaskInstructions,
    array_bytes,
    read_order,
    sent_states,
    text_of,
    text_record,
    to_arrays,
    to_states,
)
from fedloom.clients.protocol.reply_checks import Bounds, ReplyError, check_record, train_numbers
from fedloom.clients.storage.states import read_state, safetensors_of, staged_file, write_bytes
from fedloom.conf.schema import Config
from fedloom.fusion.exact import ExactSum, ExactSumError, SumOverflowError, dequantise, exact, quantise
from fedloom.fusion.state import State

ONCE, SAMPLES = "once", "samples"  # how often a record counts in its sum
FEWEST = 3  # replies of a call that are added up, unless the configuration says so: a sum is as large as four replies


@dataclass(frozen=True)
class PartialSum:
    """Exact sums over the replies of some sites. The server must use all of these replies, or none of them.

    Attributes:
        run: The run's id.
        round: The round.
        messages: The ids of the answered messages, also of refused replies.
        samples: The number of samples, by site.
        addends: By record, the number of terms in its sum.
        records: The sums, int64; for contributions, the change of the server's sum.
        node: The node that stores `records`; "" if they are included.
        ticket: The name of the stored records at this node.
        blobs: By site, the digest of the stored contribution.
        sizes: By site, the bytes of the arrays in its reply, which count as its traffic. Empty with
            federation.partial_sums=true: a round's record then has the bytes that the server received.
        new: The sum of the contributions themselves, int64; None where a node stores them.
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
    sizes: dict[str, int] = field(default_factory=dict)
    new: ArrayRecord | None = None


class Keeping(Protocol):
    """A node's store of contributions and sums."""

    def put(self, run: str, state: State) -> str:
        """Store a contribution to the run and return its digest."""
        ...

    def get(self, run: str, digest: str, holder: str) -> State:
        """Return the contribution with this digest, from this node or from the node `holder`."""
        ...

    def leave(self, sum: PartialSum) -> PartialSum:
        """Store the records of a sum on this node. Returns the sum without records, with `node` and `ticket` set."""
        ...


def expected_record(likes: Mapping[str, Mapping[str, Tensor]]) -> ArrayRecord:
    """Return the names and shapes of the tensors in `likes`, by record, as the record EXPECTED of a message."""
    return text_record(json.dumps({record: {name: list(tensor.shape) for name, tensor in like.items()} for record, like in
                                   likes.items()}))  # fmt: skip


def combine(
    asked: Sequence[Message], replies: Sequence[Message], part: Keeping | None = None
) -> tuple[list[Message], list[PartialSum]]:
    """Sum the records of the replies whose orders allow it. Returns the replies, and one sum for each run and round.

    `asked`: the message of each reply. A summed reply retains only METRICS. One with a fault becomes an error of its site;
    one that does not fit into the sum stays as it is. Fewer than FEWEST replies are added up only with
    federation.partial_sums=true. `part`: the node's store of contributions and sums; None: the server's ledger folder.
    """
    groups: dict[tuple[str, int, str], dict[int, TaskInstructions]] = {}
    for place, (message, reply) in enumerate(zip(asked, replies, strict=True)):
        if (order := _summed(message, reply)) is not None:
            groups.setdefault((order.run, order.round, order.ledger), {})[place] = order
    answers, totals = list(replies), []
    for group in groups.values():
        first, order = next(iter(group.items()))
        sums = _Sums(order, asked[first].content, part)
        if len(group) < FEWEST and sums.config.federation.partial_sums is None:
            continue
        for place, each in group.items():
            answers[place] = sums.reply(each, asked[place], replies[place])
        totals += [sums.sum()] if sums.samples or sums.sizes else []
    return answers, totals if part is None else [part.leave(total) for total in totals]


def _summed(message: Message, reply: Message) -> TaskInstructions | None:
    """Return the order that the reply answers if its records are to be added up, else None."""
    if reply.has_error() or message.metadata.message_type != TRAIN or ORDER not in message.content:
        return None
    if {LOST, UNKNOWN} & reply.content.config_records.keys():
        return None
    order = read_order(message.content)
    return order if order.sums and not order.secure else None


class _Sums:
    """The sums of the sites of one run and round."""

    def __init__(self, order: TaskInstructions, content: RecordDict, part: Keeping | None) -> None:
        self.order, self.part = order, part
        self.config: Config = parsed(configuration(order, content, None), order.run)
        self.bits = self.config.federation.scale_bits
        shapes = json.loads(text_of(content.array_records[EXPECTED]))
        self.likes = {record: {name: torch.empty(shape, device="meta") for name, shape in like.items()} for record, like in
                      shapes.items()}  # fmt: skip
        self.sums = {record: ExactSum(self.bits) for record in order.sums}
        self.new = ExactSum(self.bits, modular=True)  # of contributions, without what they replace
        self.samples: dict[str, int] = {}
        self.sizes: dict[str, int] = {}
        self.messages: set[str] = set()
        self.blobs: dict[str, str] = {}

    def reply(self, order: TaskInstructions, message: Message, reply: Message) -> Message:
        """Add one site's reply. Return it without the records; unchanged if these sums overflow; or an error of its site."""
        fault = ""
        try:
            self.add(order, message, reply.content)
        except SumOverflowError:  # the server's sum may have room for it
            return reply
        except (ExactSumError, ReplyError) as error:
            fault = str(error)
        self.messages.add(message.metadata.message_id)
        if self.config.federation.partial_sums is None:
            self.sizes[self.config.roster[order.site].name] = array_bytes(reply.content)
        if fault:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, fault), reply_to=message)
        reply.content = RecordDict({METRICS: reply.content[METRICS]})
        return reply

    def add(self, order: TaskInstructions, message: Message, content: RecordDict) -> None:
        """Add one site's records and store its contribution. Raises ExactSumError or ReplyError, and then adds nothing."""
        site = self.config.roster[order.site]
        with at_round(order.run, order.round):
            bounds = Bounds.of(self.config.federation, site_size(self.config, site))
        samples = int(train_numbers(content, bounds, hidden=bool(self.config.privacy.noise))["samples"])
        records, sent = _read(content), sent_states(message.content)
        start = {**sent[MEAN], **sent[STAR]} if STAR in sent else sent[MEAN]
        with contextlib.ExitStack() as undo:
            for record, counted in order.sums.items():
                before = self._before(order, record, sent)
                like = self.likes.get(record) or before
                check_record(record, records.get(record), like, integers=False)
                bounds.check(record, records[record], start if record in self.likes else _floats(before, self.bits))
                new, times = quantise(records[record], self.bits), samples if counted == SAMPLES else 1
                old, weight = exact(before, self.bits), order.weight if before else 0
                self.sums[record].replace(old, new, weight, times)
                undo.callback(self.sums[record].undo, old, new, weight, times)
                if record == order.slot and self.part is None:
                    self.new.add(new, times)
                    undo.callback(self.new.subtract, new, times)
            blob = self._keep(order, site.name, records[order.slot]) if order.slot else ""
            undo.pop_all()
        self.samples[site.name] = samples
        if blob:
            self.blobs[site.name] = blob

    def _before(self, order: TaskInstructions, record: str, sent: Mapping[str, State]) -> State:
        """Return the site's contribution that is now in the sum, as it is stored; empty for other records."""
        if record != order.slot or not order.before:
            return {}
        if self.part is None:
            return read_state(Path(order.before))
        return sent.get(BEFORE) or self.part.get(order.run, order.before, order.holder)

    def _keep(self, order: TaskInstructions, site: str, state: State) -> str:
        """Store a contribution and return its digest. The server flushes it to disk when it commits the round."""
        if self.part is not None:
            return self.part.put(order.run, state)
        content = safetensors_of(state)
        write_bytes(staged_file(Path(order.ledger), site), content, durable=False, private=True)
        return hashlib.sha256(content).hexdigest()

    def sum(self) -> PartialSum:
        """Return the sums so far."""
        records = {record: to_arrays(total.totals) for record, total in self.sums.items()}
        addends = {record: total.addends for record, total in self.sums.items()}
        messages = frozenset(self.messages)
        new = to_arrays(self.new.totals) if self.new.addends else None
        return PartialSum(
            self.order.run,
            self.order.round,
            messages,
            self.samples,
            addends,
            records,
            blobs=self.blobs,
            sizes=self.sizes,
            new=new,
        )


def _floats(state: State, bits: int) -> State:
    """Return a stored contribution as floats; ledgers of the first formats store integers."""
    integers = {name: tensor for name, tensor in state.items() if not tensor.dtype.is_floating_point}
    return {**state, **dequantise(integers, bits)} if integers else state


def _read(content: RecordDict) -> dict[str, State]:
    try:
        return to_states(content)
    except Exception as error:  # untrusted bytes: NumPy raises EOFError, BadZipFile and more
        raise ReplyError(f"its arrays cannot be read ({error})") from None
