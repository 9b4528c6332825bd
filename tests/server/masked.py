"""Parts of the tests of secure aggregation: sites that spoil what they say, runs under masks, what sites hold."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedloom.clients.app import app
from fedloom.clients.protocol.messages import (
    SECURE_KEYS,
    SECURE_SHARES,
    SECURE_UNMASK,
    TRAIN,
    read_order,
    to_arrays,
    to_states,
)
from fedloom.clients.storage.states import read_state
from fedloom.conf import Config
from fedloom.fusion.exact import ExactSum
from fedloom.fusion.state import State, digest
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.unlearning.requests import receive
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, small
from tests.server.runs import method_of

SITES = 5
ONE, TWO, FOUR = "site-0001", "site-0002", "site-0004"
MASKS = ("objective.subset_probability=0", "federation.secure_aggregation=true")
STAGES = (SECURE_KEYS, SECURE_SHARES, TRAIN, SECURE_UNMASK)
Answer = Callable[[Message, Message], Message]


class Spoiled(ClientApp):
    """The real ClientApp; what sites say to questions of some kinds goes through `spoil`, and orders are noted."""

    def __init__(self, spoil: Answer | None = None, kinds: Sequence[str] = (), sites: Sequence[int] = (1,)) -> None:
        super().__init__()
        self.spoil, self.kinds, self.sites = spoil, kinds, sites
        self.replies: list[tuple[str, int, Message]] = []

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == "query":
            return app(message, context)
        order = read_order(message.content)
        reply = app(message, context)
        self.replies.append((order.kind, order.site, reply))
        if self.spoil is not None and order.kind in self.kinds and order.site in self.sites:
            return self.spoil(message, reply)
        return reply


def gone(message: Message, reply: Message) -> Message:
    return Message(Error(1, "gone"), reply_to=message)


def changed(record: str, change: Callable[[State], State]) -> Answer:
    def answer(_: Message, reply: Message) -> Message:
        reply.content[record] = to_arrays(change(to_states(reply.content)[record]))
        return reply

    return answer


def configured(root: Path, *words: str, name: str = "run") -> Config:
    return small(
        root,
        "objective.subset_probability=0",
        "baselines=[]",
        "training.batch=4",
        f"run.name={name}",
        *words,
        sites=SITES,
        samples=20,
    )


def run(config: Config, client: ClientApp | None = None) -> Recorder:
    listener = Recorder()
    grid = InlineGrid(len(config.roster), store_folder(config), client or Spoiled())
    run_experiment(grid, config, listener)
    return listener


def sum_of(config: Config) -> str:
    """The digest of the server's sum."""
    with method_of(config) as method:
        return method.state.digest()["sum"]


def held(config: Config, sites: Sequence[str], prefix: str = "extractor.") -> str:
    """The digest of the sum of what these sites hold in their own stores."""
    total = ExactSum(config.federation.scale_bits)
    for site in sites:
        state = read_state(max(store_folder(config).glob(f"*/{site}/summed-*.safetensors")))
        total.add({name: tensor for name, tensor in state.items() if name.startswith(prefix)})
    return digest(total.totals)


def forget(method: TrainingRun, config: Config, sites: Sequence[str], id: str, client: ClientApp | None = None) -> Recorder:
    """Receive a request and fulfil it, with sites that are simulated anew."""
    listener = Recorder()
    receive(method.ledger, id, sites, "", {})
    grid = InlineGrid(len(config.roster), store_folder(config), client or Spoiled())
    method.train(method.joined(grid), listener, rounds=method.unlearning().last_round())
    return listener


def others(*names: str) -> list[str]:
    return [f"site-{place:04d}" for place in range(SITES) if f"site-{place:04d}" not in names]


def killed(*_: Any) -> None:
    raise InterruptedError
