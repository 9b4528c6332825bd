"""The round loop of all strategies: plan, send in windows, check each reply, fold as it arrives, commit, evaluate."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from flwr.app import RecordDict

from clients.messages import LOST, METRICS, ORDER, OWN, PARTIAL, Order, to_arrays, to_states
from clients.randomness import generator
from conf import to_json
from conf.errors import FailedError, UserError
from conf.schema import Config
from conf.sites import Site
from server.evaluate import Evaluator
from server.federation import Federation, Reply
from server.listener import Listener
from server.strategies import Aggregation, ReplyError, Turn

TOLD = 10  # dropped replies told one by one in a round; all are in its record


class TooFewRepliesError(FailedError):
    """A round ended with fewer good replies than federation.min_replies; nothing of it was committed."""


@dataclass
class RoundLoop:
    """The rounds of one run. `run` identifies the run to the sites' stores."""

    config: Config
    run: str
    federation: Federation
    aggregation: Aggregation
    evaluator: Evaluator
    listener: Listener
    last: int = field(init=False)  # the number of the last round
    back: int = -1  # the round to which the run has gone back: no site's store is there any more

    def __post_init__(self) -> None:
        self.last = self.aggregation.length(self.config.rounds)
        torch.set_num_threads(self.config.engine.threads)  # the cores are the sites', and torch's idle threads spin

    def rounds(self) -> Iterator[dict[str, Any]]:
        """Run and commit all rounds, one after the other; yields each one's record (a line of metrics.jsonl)."""
        for round in range(1, self.last + 1):
            yield self.one(round)

    def one(self, round: int) -> dict[str, Any]:
        """One round. Raises TooFewRepliesError, and then nothing is committed."""
        begin = time.monotonic()
        self.federation.refresh()
        turn = self.aggregation.turn(round) or Turn(self._sample(round), round)
        self.listener.round_started(round, len(turn.sites))
        losses, dropped = [], {}
        for reply in self._replies(turn, round):
            try:
                losses.append(self._fold(reply, round))
            except ReplyError as error:
                dropped[reply.site.name] = str(error)
            reason = dropped.get(reply.site.name, "")
            self.listener.reply(reply.site.name, not reason, reason)
            if reason and len(dropped) <= TOLD:
                self.listener.message(f"round {round}: {reply.site.name} dropped: {reason}")
        if len(losses) < (fewest := min(self.config.federation.min_replies, max(1, len(turn.sites)))):
            self.aggregation.abandon()
            first = next(iter(dropped.items()), ("", "no site was asked"))
            raise TooFewRepliesError(
                f"round {round}: {len(losses)} good replies, federation.min_replies={fewest}"
                f" (first failure: {': '.join(filter(None, first))})"
            )
        record: dict[str, Any] = {"round": round, "replies": len(losses), "dropped": dropped}
        record["train_loss"] = sum(sorted(losses)) / len(losses)  # sorted: whatever the order of arrival
        self.aggregation.commit(round, record)
        record = self.measured(record)
        record["seconds"] = time.monotonic() - begin
        self.listener.round_done(record)
        return record

    def measured(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record of the round that was committed last, with its validation accuracy if it is due."""
        round = record["round"]
        if round % self.config.evaluation.every and round != self.last:
            return record
        return {**record, "accuracy": self.evaluator.accuracy(self.aggregation.aggregate(), "validation")}

    def _replies(self, turn: Turn, round: int) -> Iterator[Reply]:
        """All sites' replies; those that lost their own state are asked again, to begin at their contributions."""
        lost = []
        for reply in self.federation.train(self._orders(turn, round), round, self.config.federation.timeout):
            if reply.content is not None or LOST not in reply.reason or self.aggregation.restart(reply.site) is None:
                yield reply
                continue
            if self.config.federation.lost_store == "stop" and self.aggregation.base(reply.site) > self.back:
                raise UserError(f"round {round}: {reply.reason}; federation.lost_store=restart begins at its contribution")
            self.listener.message(f"round {round}: {reply.reason}; it begins again at its contribution")
            lost.append(reply.site)
        yield from self.federation.train(
            self._orders(Turn(lost, turn.round), round, again=True), round, self.config.federation.timeout
        )

    def _sample(self, round: int) -> list[Site]:
        """The sites of this round: all, or a sample from the run's generator."""
        sites = self.aggregation.members()
        number = asked_per_round(self.config, len(sites))
        if number >= len(sites):
            return sites
        draw = generator(self.config.seed, "sampling", str(round))
        return [sites[int(place)] for place in sorted(draw.choice(len(sites), size=number, replace=False))]

    def _orders(self, turn: Turn, round: int, again: bool = False) -> Iterator[tuple[Site, RecordDict]]:
        """The orders to these sites, each made when it is sent; `again`: with their contributions, to begin at."""
        if not turn.sites:
            return
        records = self.aggregation.records(round)
        members, text = len(self.aggregation.members()), to_json(self._scheduled(round))
        staging = self.aggregation.staging() if self.config.federation.partial_sums else ""
        for site in turn.sites:
            before = self.aggregation.before(site) if staging else ""
            base = self.aggregation.base(site)
            order = Order(text, self.run, site.index, turn.round, base, members, staging, before)
            mine = {OWN: to_arrays(self.aggregation.restart(site) or {})} if again else {}
            yield site, RecordDict({ORDER: order.record(), **records, **mine})

    def _scheduled(self, round: int) -> Config:
        """The configuration as the sites read it: rounds beyond the configured ones stretch the schedule of the rate."""
        if round <= self.aggregation.length(self.config.rounds):
            return self.config
        return replace(self.config, rounds=self.last)

    def _fold(self, reply: Reply, round: int) -> float:
        """Check and fold one reply; its training loss. Raises ReplyError."""
        if reply.content is None:
            raise ReplyError(reply.reason)
        metrics = reply.content.metric_records.get(METRICS)
        loss, samples = (metrics.get("loss"), metrics.get("samples")) if metrics else (None, None)
        if (
            not isinstance(loss, float)
            or not math.isfinite(loss)
            or not isinstance(samples, int)
            or not 1 <= samples < 2**31
        ):
            raise ReplyError(f"the reply has no record '{METRICS}' with a finite loss and a positive number of samples")
        try:
            states = to_states(reply.content)
        except Exception as error:  # bytes from outside: NumPy raises EOFError, BadZipFile and more
            raise ReplyError(f"its arrays cannot be read ({error})") from None
        partial = reply.content.config_records.get(PARTIAL)
        if partial is None:
            self.aggregation.fold(reply.site, round, states, samples)
        else:
            self.aggregation.fold_partial(reply.site, round, states, int(str(partial["addends"])), samples)
        return loss


def asked_per_round(config: Config, sites: int) -> int:
    """How many of the sites are asked in each round."""
    return max(1, round_half_up(config.federation.fraction * sites))


def round_half_up(number: float) -> int:
    """The nearest integer, halves up."""
    return int(number + 0.5)
