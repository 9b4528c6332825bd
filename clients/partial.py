"""Partial sums: a worker adds up the contributions of its sites and sends one exact sum. Integers: the bits are the same.

What the server must keep for each site is written here, by the worker, where the server will look for it.
"""

from collections.abc import Sequence
from pathlib import Path

from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.common.constant import ErrorCode

from clients.job import parsed
from clients.messages import METRICS, PARTIAL, ROUND, SITE, TRAIN, Order, read_order, to_arrays, to_states
from clients.objectives.modes import mode_of
from clients.states import read_state, round_file, write_state
from conf.schema import Config
from conf.sites import roster
from fusion.exact import ExactSum, ExactSumError, State, quantise


def combine(asked: Sequence[Message], replies: Sequence[Message]) -> list[Message]:
    """The replies with the contributions of those that allow it (Order.ledger) summed into the first of them.

    That one holds int64 records ROUND and SITE (the change of the exact sum) and PARTIAL {addends}; the others hold
    METRICS and PARTIAL {addends: 0}. A contribution that cannot be added becomes an error of its own site.
    """
    sums: _Sums | None = None
    answers = []
    for message, reply in zip(asked, replies, strict=True):
        if reply.has_error() or message.metadata.message_type != TRAIN or not (order := read_order(message.content)).ledger:
            answers.append(reply)
            continue
        sums = sums or _Sums(parsed(order.config))
        try:
            sums.add(order, to_states(reply.content), int(reply.content.metric_records[METRICS]["samples"]))  # type: ignore[arg-type]
        except (ExactSumError, KeyError) as error:
            reason = f"{type(error).__name__}: {error}"
            answers.append(Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message))
            continue
        reply.content = RecordDict({METRICS: reply.content[METRICS], PARTIAL: ConfigRecord({"addends": 0})})
        answers.append(reply)
        sums.carrier = sums.carrier or reply
    if sums is not None and sums.carrier is not None:
        sums.load(sums.carrier)
    return answers


class _Sums:
    """The sums of one chunk, all of one run and round."""

    def __init__(self, config: Config) -> None:
        self.config, self.mode = config, mode_of(config)
        self.bits = config.federation.scale_bits
        self.weighted = config.strategy.get("weighting") == "samples"
        self.change, self.average = ExactSum(self.bits), ExactSum(self.bits)
        self.carrier: Message | None = None

    def add(self, order: Order, records: dict[str, State], samples: int) -> None:
        """Add one site's records and write what the server keeps of it. Raises ExactSumError, and then adds nothing."""
        average = quantise(records[ROUND], self.bits)
        if self.mode.sums:
            site = roster(self.config)[order.site].name
            mine = quantise(records[SITE], self.bits)
            old, new = (self.mode.summed_part(state) for state in (read_state(Path(order.before)), mine))
            change = self.change.copy()
            change.merge({name: tensor - old[name] for name, tensor in new.items()}, addends=1)
            self.average.add(average, times=samples if self.weighted else 1)
            self.change = change
            write_state(round_file(Path(order.ledger), site, order.round), mine)
        else:
            self.average.add(average, times=samples if self.weighted else 1)

    def load(self, carrier: Message) -> None:
        """Put the sums into the reply that carries them."""
        carrier.content[ROUND] = to_arrays(self.average.totals)
        if self.mode.sums:
            carrier.content[SITE] = to_arrays(self.change.totals)
        carrier.content[PARTIAL] = ConfigRecord({"addends": self.average.addends})
