"""Parts of the server's tests: small real runs, a ClientApp and grids with one fault, a listener that remembers."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedloom.clients.app import app
from fedloom.clients.data import class_meanings
from fedloom.clients.objectives import resolve
from fedloom.clients.objectives.modes import EXTRACTOR, mode_of
from fedloom.clients.protocol.messages import METRICS, TRAIN, TaskInstructions, read_order, to_arrays
from fedloom.clients.protocol.reply_checks import FREE, Bounds
from fedloom.clients.storage.states import read_state
from fedloom.conf import Config, load
from fedloom.conf.randomness import torch_generator
from fedloom.conf.sites import Site
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State, digest
from fedloom.server.evaluation.evaluator import Evaluator
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.asking import Adding, Transport
from fedloom.server.rounds.channel import ClientChannel, RawReply
from fedloom.server.rounds.loop import RoundLoop
from fedloom.server.rounds.partial_sums import Partials
from fedloom.server.rounds.schedules import Participation
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.rounds.view import Setup
from fedloom.server.run.training_run import all_rounds
from fedloom.sims.benchmarks.soak_replies import Fault
from fedloom.sims.engines.adapter import FIRST_NODE, store_folder
from fedloom.sims.engines.inline import InlineGrid


def small(root: Path, *overrides: str, sites: int = 2, samples: int = 60) -> Config:
    """A configuration of `sites` sites with `samples` digits of 8x8 pixels each, and a network of 5,000 parameters."""
    config = _small(overrides, sites, samples)
    return dataclasses.replace(config, run=dataclasses.replace(config.run, root=str(root)))


@functools.cache
def _small(overrides: tuple[str, ...], sites: int, samples: int) -> Config:
    entry = f"{{domain: digits, count: {sites}, samples: {samples}}}"
    fixed = [f"sites=[{entry}]", "data.size=8", "data.validation_limit=50", "data.test_limit=50", "rounds=2"]
    return load("digits", [*fixed, "network.width=0.25", "engine.name=inline", *overrides])


class Recorder:
    """A listener that keeps all it hears."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.replies: list[tuple[str, bool, str]] = []
        self.records: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.announced: list[int] = []

    def started(self, run: str, sites: int, rounds: int, note: str) -> None:
        self.announced.append(rounds)

    def round_started(self, round: int, asked: int) -> None:
        self.asked.append(asked)

    def reply(self, site: str, ok: bool, reason: str) -> None:
        self.replies.append((site, ok, reason))

    def round_done(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def note(self, text: str) -> None:
        """Not recorded."""

    def message(self, text: str) -> None:
        self.messages.append(text)

    def finished(self, summary: dict[str, Any]) -> None: ...


class WatchedApp(ClientApp):
    """The real ClientApp; it notes the orders. At `place` in `rounds`, its reply goes through `fault`."""

    def __init__(self, fault: Fault | None = None, place: int = 1, rounds: Iterable[int] = ()) -> None:
        super().__init__()
        self.fault, self.place, self.rounds = fault, place, set(rounds)
        self.orders: list[TaskInstructions] = []

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type != TRAIN:
            return app(message, context)
        order = read_order(message.content)
        self.orders.append(order)
        reply = app(message, context)
        if self.fault is not None and order.site == self.place and order.round in self.rounds:
            return self.fault(reply)
        return reply


class LastFirstGrid(InlineGrid):
    """The inline engine, but the message that was pushed last is carried out first."""

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        self._queue.reverse()
        try:
            return super().pull_messages(message_ids)
        finally:
            self._queue.reverse()


class WindowGrid(InlineGrid):
    """The inline engine; it notes how many train messages were under way at most."""

    most = 0

    def submit(self, message: Message) -> None:
        super().submit(message)
        self.most = max(self.most, sum(one.metadata.message_type == TRAIN for one in self._queue))


class SilentGrid(InlineGrid):
    """The inline engine, but the site at `silent` never answers a train message."""

    silent = 1

    def submit(self, message: Message) -> None:
        ours = message.metadata.dst_node_id == FIRST_NODE + self.silent
        if not (ours and message.metadata.message_type == TRAIN):
            super().submit(message)


@dataclass
class Run:
    """A run that is set up but has not begun."""

    config: Config
    loop: RoundLoop
    aggregate: ServerState
    grid: InlineGrid
    listener: Recorder = field(default_factory=Recorder)

    def all_rounds(self) -> "Run":
        """Run all rounds."""
        list(all_rounds(self.loop))
        return self


def set_up(config: Config, client: ClientApp = app, grid: type[InlineGrid] = InlineGrid) -> Run:
    """All of a run but its folder: real grid, federation, strategy, evaluator and round loop."""
    listener = Recorder()
    engine = grid(len(config.roster), store_folder(config), client)
    federation = ClientChannel(engine, config.roster, config.federation.window)
    federation.join(5.0)
    aggregate = started(config)
    loop = RoundLoop(config, "run", federation, aggregate, Evaluator(config), listener)
    return Run(config, loop, aggregate, engine, listener)


def folder(config: Config) -> Path:
    """The run's folder."""
    return Path(config.run.root) / config.run.name


OPENED: list[Ledger] = []  # by `started`; closed after each test


def started(config: Config, only: Iterable[str] | None = None, at: Path | None = None) -> ServerState:
    """The configured strategy, started for all sites of the roster, or for `only` those, with a new ledger."""
    sites = [site for site in config.roster if only is None or site.name in only]
    aggregate = ServerState(Setup(resolve(config), sites, at or folder(config)))
    OPENED.append(aggregate.ledger)
    return aggregate


@dataclass
class Given(Transport):
    """A transport whose sites have answered already: these replies arrive, in this order, at the first question of a round.

    `dropped`: why replies did not count, by site.
    """

    replies: list[RawReply]
    limits: Bounds = FREE
    run: str = "run"
    length: int = 99
    dropped: dict[str, str] = field(default_factory=dict)
    sent: dict[str, State] = field(default_factory=dict)

    def ask(self, kind: str, context: Any, sites: Any, content: Any, expected: Any) -> Iterator[RawReply]:
        self.sent = self.sent or dict(content)
        yield from self.replies

    def partials(self, context: Any, means: Any, expected: Any) -> Adding:
        return Partials(context, self.run, means, expected)

    def class_names(self, sites: Any) -> dict[str, tuple[str, ...]]:
        return {site.name: class_meanings(site.spec) for site in sites}

    def bounds(self, site: Site) -> Bounds:
        return self.limits

    def replied(self, site: Site, reason: str) -> None:
        if reason:
            self.dropped[site.name] = reason


def given(site: Site, records: Mapping[str, State], samples: int = 10, loss: float = 1.0) -> RawReply:
    """A site's reply with these records."""
    content = RecordDict({name: to_arrays(state) for name, state in records.items()})
    content[METRICS] = MetricRecord({"loss": loss, "samples": samples})
    return RawReply(site, content)


def staged(aggregate: ServerState, number: int, replies: list[RawReply], bounds: Bounds = FREE) -> dict[str, str]:
    """A round of the strategy on these replies, not committed; why some of them were dropped, by site."""
    exchange = Given(replies, bounds)
    participation = Participation([reply.site for reply in replies], number)
    aggregate.strategy.round(aggregate.round_context(number, participation, exchange))
    return exchange.dropped


def sent_in(aggregate: ServerState, number: int) -> dict[str, State]:
    """What all sites are sent first in a round, by record name; nobody answers, and nothing of it stays."""
    exchange = Given([])
    with contextlib.suppress(KeyError):  # there is no mean of no replies
        aggregate.strategy.round(aggregate.round_context(number, Participation([], number), exchange))
    aggregate.abandon()
    return exchange.sent


def contribution(aggregate: ServerState, site: str) -> State:
    """What a site has put into its method's slot, int64."""
    return aggregate.slots.contribution("sum", site)


def summed(aggregate: ServerState, without: Sequence[str] = ()) -> str:
    """The digest of the sum, less these sites' contributions."""
    return digest(aggregate.slots.sum_without("sum", without).totals)


def close_all() -> None:
    """Close the ledgers of all that was started."""
    while OPENED:
        OPENED.pop().close()


def committed(aggregate: ServerState) -> dict[str, Any]:
    """All that the ledger says, but for times."""
    ledger = aggregate.ledger
    return {
        "rounds": [dataclasses.replace(row, time="") for row in ledger.rounds()],
        "history": {site: ledger.history(site) for site in ledger.sites()},
        "events": [(event.kind, event.body) for event in ledger.events()],
    }


def on_disk(aggregate: ServerState) -> dict[str, Any]:
    """All that the ledger says, but for times, and all files beside it."""
    beside = {name: content for name, content in files(aggregate.ledger.folder).items() if not name.startswith("ledger.")}
    return {**committed(aggregate), "files": beside}


def sum_of_contributions(aggregate: ServerState) -> str:
    """The digest of the sum, added up afresh from what is kept for each site."""
    total, mode = ExactSum(aggregate.slots.bits), mode_of(aggregate.experiment.objective)
    for site in aggregate.members():
        if not aggregate.slots.has("sum", site.name):
            continue
        kept = contribution(aggregate, site.name)
        total.add({name: tensor for name, tensor in kept.items() if mode.summed(name, tensor)})
    return digest(total.totals)


def made_up(like: State, *words: str | int, scale: float = 1.0) -> State:
    """A state of the same names and shapes, its entries normal and drawn by the words."""
    draw = torch_generator(0, *words)
    return {name: torch.randn(tensor.shape, generator=draw) * scale for name, tensor in like.items()}


def extractor(state: State) -> State:
    """The part of a network's state that sites add up."""
    return {name: tensor for name, tensor in state.items() if name.startswith(EXTRACTOR)}


def files(root: Path) -> dict[str, bytes | str]:
    """All files below a folder, with their contents; of states, whose metadata may come in any order, the digest."""
    return {
        str(path.relative_to(root)): digest(read_state(path)) if path.suffix == ".safetensors" else path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def one_thread() -> None:
    """One torch thread, as the sites' workers have."""
    torch.set_num_threads(1)
