"""One round of any strategy: choose the participants, run the strategy, commit, evaluate."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from fedloom.clients.data.listing import held
from fedloom.clients.evaluation.metrics import Scores
from fedloom.clients.networks import Model
from fedloom.clients.protocol.signatures import SIGNED
from fedloom.conf.errors import FailedError, UserError
from fedloom.conf.machine import threads
from fedloom.conf.schema import Config
from fedloom.conf.sites import UNION
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.evaluation.per_client_metrics import different_networks
from fedloom.server.ledger.blobs import NodeLostError
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.context import RoundContext
from fedloom.server.rounds.listener import Listener
from fedloom.server.rounds.masks import RECORD, partners, rounds_together
from fedloom.server.rounds.recalibrated import aggregates, end
from fedloom.server.rounds.schedules import Participation, Restoration
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.transport import RoundTransport
from fedloom.server.run_folder.results_schema import LOSS, RECEIVED, VALIDATION

if TYPE_CHECKING:
    from fedloom.server.rounds.site_evaluation import SiteEvaluation


@dataclass
class RoundLoop:
    """The rounds of one run.

    >>> with loop.round(1) as context:  # doctest: +SKIP
    ...     strategy.round(context)

    Attributes:
        config: The run's configuration.
        run: The run's id in the sites' stores.
        channel: The connection to the sites.
        state: The server's state, which each round changes.
        evaluator: Measures networks at the server.
        listener: Receives the progress.
        on_masks_removed: Called when the masks shared with leaving sites are removed.
        noting: Called with a round's number and its sites' losses, before the round is committed.
        written: Called with each committed round's record.
        last: The number of the last round.
        transport: Sends a round's questions over the channel.
    """

    config: Config
    run: str
    channel: ClientChannel
    state: ServerState
    evaluator: Evaluator
    listener: Listener
    on_masks_removed: Callable[[], None] = lambda: None
    noting: Callable[[int, dict[str, float]], None] = lambda number, losses: None
    written: Callable[[dict[str, Any]], None] = lambda record: None
    last: int = field(init=False)
    transport: RoundTransport = field(init=False)

    def __post_init__(self) -> None:
        self.last = self.state.length(self.config.rounds)
        self.transport = RoundTransport(self.config, self.run, self.channel, self.state, self.listener, self.config.rounds)
        torch.set_num_threads(threads(self.config.engine.threads))  # sites need the cores, and torch's idle threads spin

    @functools.cached_property
    def sites(self) -> "SiteEvaluation":
        """The evaluation of networks at the sites, on their own images."""
        from fedloom.server.rounds.site_evaluation import SiteEvaluation

        return SiteEvaluation(
            self.transport,
            lambda: self.transport.participants.fitting(self.state.members()),
            lambda: self.state.view().round,
            lambda: self.state.strategy.measured_with(self.state.view()),
        )

    @contextlib.contextmanager
    def round(
        self, number: int, recalibration: bool = False, restoration: Restoration | None = None
    ) -> Iterator[RoundContext]:
        """Run a round as a context manager: commit it at the end; if the block raises, drop everything.

        `recalibration`: no site trains; all fitting sites are asked, as in a `restoration`. Raises TooFewRepliesError.
        """
        with held():
            self.state.ledger.refuse_moved()
            begin, received = time.monotonic(), self.channel.received
            context = self._begun(number, recalibration or restoration is not None)
            context.restoration = restoration
            try:
                if not recalibration:
                    end(context)
                self.state.features.ask(context)
                yield context
                context.close()
                if not recalibration:
                    self.state.strategy.recompute_derived(context)
            except BaseException:
                context.abandon()
                self.state.abandon()
                raise
            record, came = self._record(context), self._received(received)
            losses = {LOSS: context.losses} if context.losses else {}
            if losses:
                self.noting(number, context.losses)
            self._commit(context, record)
            record = {**self.measured(record), **came, **losses}
            record["seconds"] = time.monotonic() - begin
            self.state.ledger.refuse_moved()
            context.record = record
            self.written(record)  # before any listener's code runs
            for warning in self.state.changed_attributes(number):
                self.listener.message(warning)
            self.listener.round_done(record)

    def _begun(self, number: int, everyone: bool) -> RoundContext:
        """Update the connected sites, and begin a round. `everyone`: it asks all remaining members."""
        self.channel.traffic.clear()
        self.channel.refresh()
        self._warn()
        self.heal(number)
        leaving = self._leaving(number)
        participation = self._participation(number, everyone, leaving)
        self.listener.round_started(number, len(participation.sites))
        self.transport.dropped = {}
        # rounds beyond the configured ones stretch the schedule of the rate
        beyond = number > self.state.length(self.config.rounds)
        self.transport.length = self.last if beyond else self.config.rounds
        context = self.state.round_context(number, participation, self.transport)
        context.leaving = leaving
        return context

    def _participation(self, number: int, everyone: bool, leaving: Sequence[str]) -> Participation:
        """Return the sites to ask: the schedule's, or all remaining members if `everyone` or if sites leave."""
        members = self.state.members()
        participation = self.state.schedule.participation(number, members)
        if everyone or leaving:
            participation = Participation([site for site in members if site.name not in leaving], participation.round)
        return replace(participation, sites=self.transport.participants.enrol(participation.sites))

    def _commit(self, context: RoundContext, record: dict[str, Any]) -> None:
        masked = {"round": context.site_round, "sites": context.masked, "lifted": context.leaving}
        record = record | ({RECORD: masked} if context.masked else {})
        self.state.commit(context.number, record | ({SIGNED: context.signed} if context.signed else {}))
        if context.leaving:
            self.on_masks_removed()

    def _record(self, context: RoundContext) -> dict[str, Any]:
        """Return the round's record for the ledger and metrics.jsonl, which adds what is measured after the commit."""
        record: dict[str, Any] = {"round": context.number, "replies": context.replies, "dropped": self.transport.dropped}
        if context.recalibrated:
            record["recalibrated"] = True
        if context.restoration:
            record["restored"] = context.restoration.number
        if context.clipped:
            record["clipped"] = context.clipped
        if context.losses:
            losses = sorted(context.losses.values())  # the same sum in any order of arrival
            record["train_loss"] = sum(losses) / len(losses)
        record["bytes"] = dict(sorted(self.channel.traffic.items()))
        if context.epsilon:
            record["epsilon"] = dict(sorted(context.epsilon.items()))
        return record

    def _received(self, before: int | None) -> dict[str, int]:
        """Return the bytes that arrived since `before`, if partial sums hide how many came from each site."""
        now = self.channel.received if self.config.federation.partial_sums else None
        return {} if now is None or before is None else {RECEIVED: now - before}

    def heal(self, number: int) -> None:
        """Remove contributions whose nodes are lost: their sites start again, and all sums stay exact.

        Raises UserError if federation.lost_store is 'stop'.
        """
        while names := self.state.membership.lost():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            fault = f"a node lost the last contributions of {', '.join(names[:3])}{more} (federation.node_store)"
            if self.config.federation.lost_store == "stop":
                raise UserError(f"round {number}: {fault}; bring it back, or set federation.lost_store=restart")
            self.listener.message(f"round {number}: {fault}; these sites leave the sum and start again as new ones")
            with contextlib.suppress(NodeLostError):  # another node may be lost meanwhile
                self.state.lose(names)

    def _leaving(self, number: int) -> list[str]:
        """Return the sites to forget in this round, if all sites that share masks with them are connected.

        Raises FailedError if one is missing and the round serves only to forget.
        """
        leaving = self.state.leaving
        connected = {site.name for site in self.state.members()} & self.channel.nodes.keys()
        needed = partners(rounds_together(self.state.ledger), leaving) if leaving else []
        if not (missing := [name for name in needed if name not in connected]):
            return leaving
        fault = f"{missing[0]} is not connected, and only it can remove its masks with {', '.join(leaving)}"
        if number > self.state.length(self.config.rounds):
            raise FailedError(f"round {number}: {fault}; run `fedloom resume` when it is connected, or forget it, too")
        self.listener.message(f"round {number}: {fault}; the run forgets them later")
        return []

    @held()
    def measured(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the round's record, with the current values on validation examples if due (evaluation.every, or the last
        round).
        """
        number = record["round"]
        if number % self.config.evaluation.every and number != self.last:
            return record
        models = self._watched()
        (first, *others), sites = self.tables(list(models.values()), "validation")
        unions = [next(iter(table.values()), {}).get(UNION) for table in others]
        further = {name: union for name, union in zip(list(models)[1:], unions, strict=True) if union is not None}
        more = {"networks": further, VALIDATION: sites}
        return {**record, **self.evaluator.metrics.entries(first), **{key: item for key, item in more.items() if item}}

    def _watched(self) -> dict[str, Model | None]:
        """Return the aggregate (None if the method has none); with different networks, one for each architecture."""
        if not self.state.display_name:
            return {"": None}
        models = self.state.models()
        names = aggregates(self.state.view(), models)
        apart = different_networks(self.config, self.state.members())
        return {name: models[name] for name in names[: None if apart else 1]}

    def tables(self, models: Sequence[Model | None], split: str) -> tuple[list[Scores], dict[str, dict[str, float]]]:
        """Return each model's metrics by domain, and the first one's by site if sites measure (evaluation.where).

        A model of None: the sites' own networks.
        """
        if self.config.evaluation.where == "server" and None not in models:
            return [self.evaluator.table(model, split) for model in models if model is not None], {}
        scores = self.sites.scores(models, split)
        return [self.sites.table(each) for each in scores], self.sites.by_site(scores[0])

    def _warn(self) -> None:
        """Report the warnings about the federation's nodes."""
        warnings = self.channel.enrolment.warnings
        while warnings:
            self.listener.message(warnings.pop(0))


def recalibration_round(loop: RoundLoop, number: int) -> dict[str, Any]:
    """Run a round in which sites do not train but send statistics of the aggregates (server.rounds.recalibration).

    Raises FailedError if no aggregate can be recalibrated.
    """
    from fedloom.server.rounds.recalibration import recalibrate  # imported only when it is needed

    with loop.round(number, recalibration=True) as context:
        state = loop.state
        result = recalibrate(context, state.models(context), state.strategy.heads_share_basis(context))
        context.replies, context.recalibrated = result.replies, True
    for name, why in result.left.items():
        loop.listener.message(f"round {number}: {name} stays unchanged: {why}")
    return context.record
