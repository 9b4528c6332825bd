"""Parts of the server's tests: small real runs, a ClientApp and grids with one fault, a listener that remembers."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from clients.app import app
from clients.messages import TRAIN, Order, read_order
from clients.objectives.modes import EXTRACTOR
from clients.randomness import torch_generator
from clients.states import read_state
from conf import Config, load
from conf.sites import roster
from fusion.exact import ExactSum, State, digest
from server.evaluate import Evaluator
from server.federation import Federation
from server.ledger import Ledger
from server.rounds import RoundLoop
from server.strategies import STRATEGIES, Setup
from server.strategies.sum_aggregation import SumAggregate
from sims.engines.adapter import FIRST_NODE, store_folder
from sims.engines.inline import InlineGrid


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

    def started(self, run: str, sites: int, rounds: int, note: str) -> None: ...

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


Fault = Callable[[Message], Any]


class WatchedApp(ClientApp):
    """The real ClientApp; it notes the orders. At `place` in `rounds`, its reply goes through `fault`."""

    def __init__(self, fault: Fault | None = None, place: int = 1, rounds: Iterable[int] = ()) -> None:
        super().__init__()
        self.fault, self.place, self.rounds = fault, place, set(rounds)
        self.orders: list[Order] = []

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

    def collect(self, wanted: set[str]) -> list[Message]:
        self._queue.reverse()
        try:
            return super().collect(wanted)
        finally:
            self._queue.reverse()


class WindowGrid(InlineGrid):
    """The inline engine; it notes how many messages were under way at most."""

    most = 0

    def submit(self, message: Message) -> None:
        super().submit(message)
        self.most = max(self.most, len(self._queue))


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
    aggregate: SumAggregate
    grid: InlineGrid
    listener: Recorder = field(default_factory=Recorder)

    def all_rounds(self) -> "Run":
        """Run all rounds."""
        list(self.loop.rounds())
        return self


def set_up(config: Config, client: ClientApp = app, grid: type[InlineGrid] = InlineGrid) -> Run:
    """All of a run but its folder: real grid, federation, strategy, evaluator and round loop."""
    listener = Recorder()
    engine = grid(len(roster(config)), store_folder(config), client)
    federation = Federation(engine, roster(config), config.federation.window)
    federation.join(5.0)
    aggregate = started(config)
    loop = RoundLoop(config, "run", federation, aggregate, Evaluator(config), listener)
    return Run(config, loop, aggregate, engine, listener)


def folder(config: Config) -> Path:
    """The run's folder."""
    return Path(config.run.root) / config.run.name


OPENED: list[Ledger] = []  # by `started`; closed after each test


def started(config: Config, only: Iterable[str] | None = None, at: Path | None = None) -> SumAggregate:
    """The configured strategy, started for all sites of the roster, or for `only` those, with a new ledger."""
    sites = [site for site in roster(config) if only is None or site.name in only]
    aggregate = STRATEGIES.build(config.strategy, "strategy").start(Setup(config, sites, at or folder(config)))
    assert isinstance(aggregate, SumAggregate)
    OPENED.append(aggregate.ledger)
    return aggregate


def close_all() -> None:
    """Close the ledgers of all that was started."""
    while OPENED:
        OPENED.pop().close()


def committed(aggregate: SumAggregate) -> dict[str, Any]:
    """All that the ledger says, but for times."""
    ledger = aggregate.ledger
    return {
        "rounds": [dataclasses.replace(row, time="") for row in ledger.rounds()],
        "history": {site: ledger.history(site) for site in ledger.sites()},
        "events": [(event.kind, event.body) for event in ledger.events()],
    }


def on_disk(aggregate: SumAggregate) -> dict[str, Any]:
    """All that the ledger says, but for times, and all files beside it."""
    beside = {name: content for name, content in files(aggregate.ledger.folder).items() if not name.startswith("ledger.")}
    return {**committed(aggregate), "files": beside}


def sum_of_contributions(aggregate: SumAggregate) -> str:
    """The digest of the sum, added up afresh from what is kept for each site."""
    total = ExactSum(aggregate.bits)
    for site in aggregate.setup.sites:
        kept = aggregate.contribution(site.name)
        total.add({name: tensor for name, tensor in kept.items() if aggregate.mode.summed(name, tensor)})
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


def changed(record: str, change: Callable[[State], State]) -> Fault:
    """A fault: one array record of the reply is changed."""

    def fault(reply: Message) -> Message:
        state = dict(reply.content.array_records[record].to_torch_state_dict())
        reply.content[record] = ArrayRecord(torch_state_dict=change(state))  # type: ignore[arg-type]
        return reply

    return fault


def edited(edit: Callable[[RecordDict], Any]) -> Fault:
    """A fault: the reply's content is edited in place."""

    def fault(reply: Message) -> Message:
        edit(reply.content)
        return reply

    return fault


def entry(name: str, number: float) -> Callable[[State], State]:
    """A change: the first entry of one tensor becomes `number`."""

    def change(state: State) -> State:
        tensor = state[name].clone()
        tensor.view(-1)[0] = number
        return {**state, name: tensor}

    return change


def one_thread() -> None:
    """One torch thread, as the sites' workers have."""
    torch.set_num_threads(1)
