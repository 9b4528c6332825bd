"""The round loop of all strategies: who takes part, the strategy's round, commit, evaluate."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedloom.clients.data.listing import held
from fedloom.clients.networks import Model
from fedloom.clients.protocol.messages import TRAIN
from fedloom.clients.protocol.reply_checks import Bounds, ReplyError
from fedloom.clients.protocol.signatures import SIGNED
from fedloom.conf.errors import FailedError, UserError, plain
from fedloom.conf.schema import Config
from fedloom.conf.sites import UNION, Site
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.evaluation.per_client_metrics import different_networks
from fedloom.server.ledger.blobs import UNREADABLE, NodeLostError
from fedloom.server.rounds.channel import ClientChannel, RawReply
from fedloom.server.rounds.context import Content, RoundContext
from fedloom.server.rounds.dispatcher import TaskDispatcher
from fedloom.server.rounds.masks import RECORD, partners, rounds_together
from fedloom.server.rounds.recalibration import Told, aggregates, end, recalibrate
from fedloom.server.rounds.record_spec import RecordSpec
from fedloom.server.rounds.schedules import Participation
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.site_evaluation import SiteEvaluation
from fedloom.server.run.listener import Listener
from fedloom.server.run_folder.results_schema import RECEIVED

MOST_TOLD = 300  # characters of a reason
ATTEMPTS = 3  # at a round in which nodes of the cluster are lost
TOLD = 10  # dropped replies told one by one in a round; all are in its record


class TooFewRepliesError(FailedError):
    """A round ended with fewer good replies than federation.min_replies; nothing of it was committed."""


@dataclass
class RoundLoop:
    """The rounds of one run. `run` identifies the run to the sites' stores."""

    config: Config
    run: str
    federation: ClientChannel
    aggregation: ServerState
    evaluator: Evaluator
    listener: Listener
    on_masks_removed: Callable[[], None] = lambda: None  # once the masks in common with sites that leave are taken out
    written: Callable[[dict[str, Any]], None] = lambda record: None  # puts a committed round on record
    last: int = field(init=False)  # the number of the last round
    questions: TaskDispatcher = field(init=False)
    sites: SiteEvaluation = field(init=False)
    _dropped: dict[str, str] = field(default_factory=dict)  # sites of this round, and why their replies do not count

    def __post_init__(self) -> None:
        self.last = self.aggregation.length(self.config.rounds)
        self.questions = TaskDispatcher(
            self.config, self.run, self.federation, self.aggregation, self.listener, self.config.rounds
        )
        self.sites = SiteEvaluation(
            self.questions,
            lambda: self.questions.fitting(self.aggregation.members()),
            lambda: self.aggregation.view().round,
            lambda: self.aggregation.strategy.measured_with(self.aggregation.view()),
        )
        torch.set_num_threads(self.config.engine.threads)  # the cores are the sites', and torch's idle threads spin

    def rounds(self) -> Iterator[dict[str, Any]]:
        """Run and commit all rounds, one after the other; yields each one's record (a line of metrics.jsonl)."""
        for number in range(1, self.last + 1):
            yield self.one(number)

    def one(self, number: int) -> dict[str, Any]:
        """One round. Raises TooFewRepliesError, and then nothing is committed."""
        for _ in range(ATTEMPTS):
            try:
                return self._round(number, recalibration=False)
            except NodeLostError as error:  # with a contribution that it took to ask; without it, nothing has happened
                self.listener.message(f"round {number}: {error}; it begins again")
        return self._round(number, recalibration=False)

    def recalibration(self, number: int) -> dict[str, Any]:
        """A round in which sites do not train but tell of the aggregates (server.rounds.recalibration). FailedError."""
        return self._round(number, recalibration=True)

    @held()
    def _round(self, number: int, recalibration: bool) -> dict[str, Any]:
        self.aggregation.ledger.refuse_moved()
        begin, received = time.monotonic(), self.federation.received
        self.federation.traffic.clear()
        self.federation.refresh()
        self._warn()
        self.heal(number)
        leaving = self._leaving(number)
        participation = self._participation(number, recalibration, leaving)
        self.listener.round_started(number, len(participation.sites))
        self._dropped = {}
        # rounds beyond the configured ones stretch the schedule of the rate
        beyond = number > self.aggregation.length(self.config.rounds)
        self.questions.rounds = self.last if beyond else self.config.rounds
        run = self.aggregation.run(number, participation, self)
        run.leaving = leaving
        told = self._carried_out(run, recalibration)
        record, came = self._record(run, told), self._came(received)
        masked = {RECORD: {"round": run.site_round, "sites": run.masked, "lifted": leaving}} if run.masked else {}
        signed = {SIGNED: run.signed} if run.signed else {}
        self.aggregation.commit(number, {**record, **masked, **signed})
        if leaving:
            self.on_masks_removed()
        record = {**self.measured(record), **came}
        record["seconds"] = time.monotonic() - begin
        self.aggregation.ledger.refuse_moved()
        self.written(record)  # before anybody else's code hears of it
        self.listener.round_done(record)
        return record

    def _participation(self, number: int, recalibration: bool, leaving: Sequence[str]) -> Participation:
        """Who is asked, of those that enrol: all that stay, where sites leave or nobody trains."""
        members = self.aggregation.members()
        found = self.aggregation.schedule.participation(number, members)
        if recalibration or leaving:
            found = Participation([site for site in members if site.name not in leaving], found.round)
        return replace(found, sites=self.questions.enrol(found.sites))

    def _carried_out(self, run: RoundContext, recalibration: bool) -> Told | None:
        """Have the method do its round, or (what comes back) ask about its aggregates. What fails leaves nothing."""
        try:
            if recalibration:
                return recalibrate(run, self.aggregation.models(run), self.aggregation.strategy.heads_share_basis(run))
            end(run)
            self.aggregation.strategy.round(run)
            run.close()
            self.aggregation.strategy.recompute_derived(run)
        except BaseException:
            self.aggregation.abandon()
            raise
        return None

    def _record(self, run: RoundContext, told: Told | None) -> dict[str, Any]:
        """What a round was, as the ledger keeps it."""
        replies = told.replies if told else run.replies
        record: dict[str, Any] = {"round": run.number, "replies": replies, "dropped": self._dropped}
        if told:
            record["recalibrated"] = True
            for name, why in told.left.items():
                self.listener.message(f"round {run.number}: {name} stays as it is: {why}")
        if run.clipped:
            record["clipped"] = run.clipped
        if run.losses:
            record["train_loss"] = sum(sorted(run.losses)) / len(run.losses)  # sorted: whatever the order of arrival
        record["bytes"] = dict(sorted(self.federation.traffic.items()))
        if run.epsilon:
            record["epsilon"] = dict(sorted(run.epsilon.items()))
        return record

    def _came(self, before: int | None) -> dict[str, int]:
        """What came here since then, where it is not told by site: workers or nodes add up what sites send."""
        now = self.federation.received if self.config.federation.partial_sums else None
        return {} if now is None or before is None else {RECEIVED: now - before}

    def heal(self, number: int) -> None:
        """Go on without contributions whose nodes are lost: their sites begin again, and all sums are exact.

        Raises UserError if federation.lost_store says so.
        """
        while names := self.aggregation.lost():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            told = f"a node has lost what {', '.join(names[:3])}{more} gave last (federation.node_store)"
            if self.config.federation.lost_store == "stop":
                raise UserError(f"round {number}: {told}; bring it back, or federation.lost_store=restart begins them anew")
            self.listener.message(f"round {number}: {told}: they are out of the sum and begin again as new ones")
            with contextlib.suppress(NodeLostError):  # of another one, meanwhile
                self.aggregation.lose(names)

    def _leaving(self, number: int) -> list[str]:
        """The sites to be forgotten in this round, if all that have masks in common with them are there (FailedError if not,
        and the round is for that alone).
        """
        leaving = self.aggregation.leaving
        there = {site.name for site in self.aggregation.members()} & self.federation.nodes.keys()
        needed = partners(rounds_together(self.aggregation.ledger), leaving) if leaving else []
        if not (missing := [name for name in needed if name not in there]):
            return leaving
        told = f"{missing[0]} is not there, and it alone can take out its masks in common with {', '.join(leaving)}"
        if number > self.aggregation.length(self.config.rounds):
            raise FailedError(f"round {number}: {told}; 'fedloom resume' when it is there, or forget it, too")
        self.listener.message(f"round {number}: {told}: they are forgotten later")
        return []

    @held()
    def measured(self, record: dict[str, Any]) -> dict[str, Any]:
        """The record of the round that was committed last, with its validation accuracy if it is due."""
        number = record["round"]
        if number % self.config.evaluation.every and number != self.last:
            return record
        models = self._watched()
        first, *others = self.accuracies(list(models.values()), "validation")
        further = {name: one[UNION] for name, one in zip(list(models)[1:], others, strict=True) if one}
        return {**record, "accuracy": first, **({"networks": further} if further else {})}

    def _watched(self) -> dict[str, Model | None]:
        """The aggregate (None: the method has none), and where sites' networks differ those of the other architectures."""
        if not self.aggregation.display_name:
            return {"": None}
        models = self.aggregation.models()
        names = aggregates(self.aggregation.view(), models)
        apart = different_networks(self.config, self.aggregation.members())
        return {name: models[name] for name in names[: None if apart else 1]}

    def accuracies(self, models: Sequence[Model | None], split: str) -> list[dict[str, float]]:
        """Accuracy by domain of each model, or (None) of the sites' own networks, measured where the configuration says."""
        if self.config.evaluation.where == "server" and None not in models:
            return [self.evaluator.accuracy(model, split) for model in models if model is not None]
        return self.sites.accuracies(models, split)

    # What a round's questions need (server.rounds.context.RoundTransport)

    def ask(
        self,
        kind: str,
        run: RoundContext,
        sites: Sequence[Site],
        content: Content,
        expected: Mapping[str, RecordSpec] | None,
    ) -> Iterator[RawReply]:
        """All sites' replies."""
        return self.questions.ask(
            kind, run.number, run.site_round, sites, content, expected, trained=run.trained, attempt=run.attempt,
            draw=run.again,
        )  # fmt: skip

    def message(self, text: str) -> None:
        """Tell the user something."""
        self.listener.message(text)

    @property
    def length(self) -> int:
        """Of how many rounds the run is to the sites."""
        return self.questions.rounds

    def images(self, site: Site) -> int:
        """How many training images the site has; 0 if it did not enrol."""
        try:
            return self.questions.samples(site)
        except ReplyError:
            return 0

    def class_names(self, sites: Sequence[Site]) -> dict[str, tuple[str, ...]]:
        """By site, the names of its classes; those that did not enrol are left out."""
        return self.questions.class_names(sites)

    def bounds(self, site: Site) -> Bounds:
        """How large what the site sends may be."""
        return self.questions.bounds(site)

    def replied(self, site: Site, reason: str) -> None:
        """Tell of a reply, and keep why it is dropped."""
        reason = plain(reason)[:MOST_TOLD]
        if reason:
            self._dropped[site.name] = reason
        if UNREADABLE in reason and (parts := self.aggregation.ledger.blobs.elsewhere):
            parts.doubt()
        self.listener.reply(site.name, not reason, reason)
        if reason and len(self._dropped) <= TOLD:
            self.listener.message(f"round {self.aggregation.view().round + 1}: {site.name} dropped: {reason}")

    def enough(self, kind: str, run: RoundContext, replies: int) -> None:
        """Raises TooFewRepliesError if too few sites have trained."""
        fewest = min(self.config.federation.min_replies, max(1, len(run.participants))) if kind == TRAIN else 1
        if replies >= fewest:
            return
        first = next(iter(self._dropped.items()), ("", "no site was asked"))
        raise TooFewRepliesError(
            f"round {run.number}: {replies} good replies, federation.min_replies={fewest}"
            f" (first failure: {': '.join(filter(None, first))})"
        )

    def _warn(self) -> None:
        """Tell what the federation noticed of its nodes."""
        warnings = self.federation.enrolment.warnings
        while warnings:
            self.listener.message(warnings.pop(0))
