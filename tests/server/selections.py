"""Parts of the tests of layer selection: small real runs on tasks of two digits each, and what sites sent in them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedloom.clients.app import app
from fedloom.clients.data import own_examples, to_float
from fedloom.clients.networks import HeadView, architecture_of
from fedloom.clients.objectives import objective_of
from fedloom.clients.objectives.layer_selection.objective import LayerSelection
from fedloom.clients.objectives.layer_selection.session import CHOSEN, COUNTS, MASS, NETWORK, OWN_PARTS, SELECTION, below
from fedloom.clients.protocol.messages import MEAN, TRAIN, read_order, to_states
from fedloom.clients.storage.states import read_state
from fedloom.conf import Config, load
from fedloom.fusion.exact import exact
from fedloom.fusion.state import State, digest
from fedloom.server.run.experiment import run_experiment
from fedloom.server.strategies.layer_selection import KEY
from fedloom.sims.benchmarks.soak_replies import Fault, changed
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Recorder, folder
from tests.server.resumes import metrics
from tests.server.runs import method_of

A, B, C = "site-0000", "site-0001", "site-0002"
NETWORK_OF_TWO = "network={name: convnet, widths: [4, 6], pools: [1], hidden: [8], norm: none, bias: true}"
LAYERS = ["extractor.block1.0", "extractor.block2.0"]
TASKS = [f"{{domain: digits, samples: {samples}, classes: {classes}, relabel: true}}"
         for samples, classes in ((60, [0, 1]), (50, [2, 3]), (40, [4, 5]))]  # fmt: skip
RESNET = "network={name: resnet20, width: 0.25, norm: batch}"
OTHER = "sites.1.network={name: convnet, widths: %s, pools: [1], hidden: [8], norm: %s, bias: true}"
FIXED = ["data.size=8", "data.grey=true", "data.heads=shared", "data.test_limit=60", "data.validation_limit=40",
         "engine.name=inline", "engine.device=cpu", "baselines=[]", "objective.mode=learned",
         "objective.warm_up=0", "objective.layers=[]", "objective.m_steps=1",
         "strategy.every=1", "evaluation.every=1", NETWORK_OF_TWO,
         "training={steps: 6, batch: 20, rate: 0.5, clip: 0.3}", "rounds=2"]  # fmt: skip


def configured(root: Path, *words: str, tasks: list[str] = TASKS) -> Config:
    return load("layer_selection", [f"sites=[{', '.join(tasks)}]", *FIXED, f"run.root={root}", *words])


class Noting(ClientApp):
    """The real ClientApp; of each order to train it keeps the site, what was sent and what was replied, round by round.

    Replies of the site at `place` in its rounds `rounds` go through `fault`.
    """

    def __init__(self, fault: Fault | None = None, place: int = 1, rounds: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.fault, self.place, self.rounds = fault, place, rounds
        self.orders: list[tuple[int, int]] = []  # site and its round
        self.sent: list[dict[str, State]] = []
        self.replied: list[dict[str, State]] = []

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type != TRAIN:
            return app(message, context)
        order = read_order(message.content)
        reply = app(message, context)
        self.orders.append((order.site, order.round))
        self.sent.append({name: state for name, state in to_states(message.content).items() if name in (MEAN, COUNTS)})
        self.replied.append(to_states(reply.content) if reply.has_content() else {})
        if self.fault is not None and order.site == self.place and order.round in self.rounds:
            return self.fault(reply)
        return reply

    def of(self, site: int, round: int) -> tuple[dict[str, State], dict[str, State]]:
        """What was sent to a site in a round of its own, and what it replied."""
        place = self.orders.index((site, round))
        return self.sent[place], self.replied[place]


@dataclass
class Done:
    """A finished run, which no test changes."""

    config: Config
    client: Noting
    summary: dict[str, Any]


def run(
    config: Config, client: Noting | None = None, listener: Recorder | None = None, grid: type[InlineGrid] = InlineGrid
) -> Done:
    client = client or Noting()
    engine = grid(len(config.roster), store_folder(config), client)
    return Done(config, client, run_experiment(engine, config, listener or Recorder()))


def masses(reply: dict[str, State]) -> dict[str, float]:
    """How probable it was of each layer to be shared."""
    return dict(zip(LAYERS, reply[SELECTION][MASS].tolist(), strict=True))


def found(done: Done, mode: str = "learned") -> dict:
    """What the summary says of a mode."""
    return done.summary[KEY][mode]


def own_state(done: Done, place: int, round: int = 2) -> State:
    """What a site keeps of its own after a round of its own."""
    name = f"{done.config.roster[place].name}/round-{round:06d}.safetensors"
    [path] = [
        path for path in (folder(done.config) / "sites").glob(f"*/{name}") if "baselines" not in path.parent.parent.name
    ]
    return read_state(path)


def accuracy_of(done: Done, place: int, shared: State, round: int = 2) -> float:
    """On a site's own test examples, of its own network with these parameters in the layers that it chose to share."""
    config, site, state = done.config, done.config.roster[place], own_state(done, place, round)
    objective = objective_of(config)
    assert isinstance(objective, LayerSelection)
    made = objective.layers_of(config, site).weights(shared, below(state, OWN_PARTS))
    chosen = dict(zip(LAYERS, state[CHOSEN].tolist(), strict=True))
    network = architecture_of(config, site).build()
    used = {name: tensor for name, tensor in made.items() if chosen[name.rpartition(".")[0]]}
    network.load_state_dict({**below(state, NETWORK), **used})
    images = own_examples(config, site, "test")
    with torch.no_grad():
        scores = HeadView(network.eval(), slice(0, 2), "batch")(to_float(images.x))
    return float((scores.argmax(1) == images.y).double().mean())


def left(config: Config) -> dict[str, Any]:
    """All that a run leaves, but for times: what sites gave, what all share, metrics, what the summary says of layers."""
    with method_of(config) as method:
        view = method.state.view()
        gave = {site: method.ledger.history(site) for site in method.ledger.sites()}
        kept = {name: digest(exact(state, view.bits)) for name, state in view.slots.keeps().items()}
    summary = json.loads((folder(config) / "summary.json").read_text())
    return {
        "gave": gave,
        "kept": kept,
        "metrics": metrics(folder(config)),
        **{key: summary[key] for key in (KEY, "accuracy")},
    }


def selection_of(change: Callable[[State], State]) -> Fault:
    """A fault: what a site says of its selection is changed."""
    return changed(SELECTION, change)
