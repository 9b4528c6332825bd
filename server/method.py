"""One method of an experiment at work in a folder: its rounds, requests between them, the measurements at the end."""

import json
from dataclasses import dataclass, field
from typing import Any

from conf.schema import Config
from conf.sites import Site, roster
from server.evaluate import Evaluator
from server.federation import Federation
from server.ledger import Ledger
from server.listener import Listener
from server.rounds import RoundLoop
from server.runfolder import RunFolder
from server.strategies import STRATEGIES, Aggregation, Setup
from server.unlearning import Unlearning


@dataclass
class Method:
    """A method with its ledger, whose server this is: new, or as the last committed round left it."""

    config: Config
    folder: RunFolder
    ledger: Ledger
    evaluator: Evaluator
    aggregation: Aggregation = field(init=False)

    def __post_init__(self) -> None:
        strategy = STRATEGIES.build(self.config.strategy, "strategy")
        self.aggregation = strategy.start(Setup(self.config, self.sites(), self.folder.path, self.ledger, self.evaluator))

    def sites(self) -> list[Site]:
        """The sites that its ledger knows, forgotten ones included."""
        known = self.ledger.sites()
        return [site for site in roster(self.config) if site.name in known]

    def unlearning(self) -> Unlearning:
        """Requests to it."""
        return Unlearning(self.config, self.folder.path, self.ledger, self.aggregation, self.evaluator)

    def train(self, federation: Federation, listener: Listener) -> None:
        """All rounds that are not committed yet; requests that came in are fulfilled between them."""
        loop = RoundLoop(self.config, self.ledger.run().run, federation, self.aggregation, self.evaluator, listener)
        listener.started(f"{self.config.run.name} ({self.aggregation.row()})", len(self.aggregation.members()),
                         loop.last, str(self.folder.path))  # fmt: skip
        for record in loop.rounds(self._resumed(loop) + 1, lambda: self.take_requests(listener)):
            self.folder.append(record)
        self.take_requests(listener)

    def take_requests(self, listener: Listener) -> None:
        """Fulfil the requests that wait, and say so."""
        self.unlearning().take(listener.message)

    def _resumed(self, loop: RoundLoop) -> int:
        """The last committed round; metrics.jsonl then has a line for each of them, whatever a crash has left of it."""
        self.aggregation.abandon()
        self.ledger.prune()
        self.folder.sweep()
        committed = [row for row in self.ledger.rounds() if row.round > 0]
        if not committed:
            self.folder.write_metrics([])
            return 0
        self.ledger.note("resumed", {"round": committed[-1].round})
        known, last = self.folder.metrics(), committed[-1]
        if last.round not in known:
            known[last.round] = loop.measured(last.record or {"round": last.round})
        self.folder.write_metrics(known.get(row.round) or row.record or {"round": row.round} for row in committed)
        loop.listener.note(f"going on after round {last.round}")
        return last.round

    def measure(self) -> dict[str, Any]:
        """Test accuracy of the aggregate, of each N_i and of the aggregate without each site; all networks are written."""
        accuracy, forgotten, aggregation, evaluator = {}, {}, self.aggregation, self.evaluator

        def write(name: str, state: dict, row: str) -> dict[str, float]:
            settled = evaluator.settled(state)
            self.folder.write_network(name, settled, network=json.dumps(self.config.network), row=row)
            return evaluator.accuracy(settled, "test")

        accuracy[aggregation.row()] = write("aggregate", aggregation.aggregate(), aggregation.row())
        for name, state in aggregation.extra().items():
            accuracy[name] = write(name, state, name)
        for site in aggregation.members()[: self.config.evaluation.sites]:
            if (state := aggregation.site(site.name)) is not None:
                accuracy[site.name] = write(site.name, state, site.name)
            if (state := aggregation.without([site.name])) is not None:
                forgotten[site.name] = evaluator.accuracy(state, "test")
        backwards = aggregation.reversed()
        return {
            "accuracy": accuracy,
            "reversed": evaluator.accuracy(backwards, "test") if backwards is not None else {},
            "forgotten": forgotten,
            "digest": aggregation.digest(),
            "checks": aggregation.checks(),
            "traces": aggregation.traces(),
            **aggregation.facts(),
        }
