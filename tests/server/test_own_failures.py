"""The user's own code that fails while a site works: one line names it, its key and the site, on every engine."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.clients.objectives.averaging import FedAvgSession
from fedloom.clients.objectives.base import Task
from fedloom.clients.objectives.fedavg import FedAvg
from fedloom.clients.training.loss import Loss
from fedloom.clients.training.schedules import Schedule
from fedloom.conf.errors import FailedError
from fedloom.conf.schema import Config
from fedloom.sims.api import config_of
from fedloom.sims.operations.simulate import simulate
from tests.server.parts import Recorder

HERE = "tests.server.test_own_failures"
TRIED = 4  # examples with which a loss is tried before the run


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    if len(targets) != TRIED:
        raise ValueError("bad\nbatch")
    return F.cross_entropy(outputs, targets)


def leaving(outputs: Tensor, targets: Tensor) -> Tensor:
    if len(targets) != TRIED:
        raise SystemExit(3)
    return F.cross_entropy(outputs, targets)


class OwnLoss(Loss):
    def value(self, scores: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        return loss(scores, targets)


class Net(nn.Module):
    def __init__(self, classes: int):
        super().__init__()
        self.last = nn.Linear(64, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and len(inputs) > TRIED:
            raise KeyError("a batch")
        return self.last(inputs.flatten(1))


class Measured(Net):
    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training and len(inputs) > TRIED:
            raise KeyError("a batch")
        return self.last(inputs.flatten(1))


class Optimizer(torch.optim.SGD):
    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        if self.steps > 1:
            raise RuntimeError("second step")
        super().step(closure)


@dataclass(frozen=True)
class Rate(Schedule):
    def after(self, rate: float, progress: float, rounds: float) -> float:
        if progress > 0:
            raise ValueError("no rate")
        return rate


class Session(FedAvgSession):
    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        raise ArithmeticError("no loss")


@dataclass(frozen=True)
class Objective(FedAvg):
    def session(self, task: Task) -> FedAvgSession:
        return Session(self, task)


PARTS = {
    "loss": ("training.loss", r"ValueError: bad; test_own_failures\.py, line \d+, in loss"),
    "OwnLoss": ("training.loss", "ValueError: bad; "),
    "leaving": ("training.loss", "SystemExit: 3; "),
    "Net": ("network", "KeyError: 'a batch'; "),
    "Optimizer": ("training.optimizer", "RuntimeError: second step; "),
    "Rate": ("training.schedule", "ValueError: no rate; "),
    "Objective": ("objective", "ArithmeticError: no loss; "),
}


def configured(tmp_path: Path, *words: str) -> Config:
    fixed = ["rounds=1", "sites=[{domain: digits, count: 2, samples: 40}]", "data.size=8", "training.batch=16",
             "engine.name=inline", "network=mlp", "objective=fedavg", "strategy=fedavg", "baselines=[]",
             f"run.root={tmp_path}"]  # fmt: skip
    return config_of("digits", [*fixed, *words])


def failing(tmp_path: Path, key: str, name: str, *words: str) -> str:
    """Run with one part of the user's own, which fails at both sites; return the messages, a line each."""
    listener = Recorder()
    with pytest.raises(FailedError) as failure:
        simulate(configured(tmp_path, f"{key}={HERE}:{name}", *words), listeners=[listener])
    return "\n".join([*listener.messages, str(failure.value)])


@pytest.mark.parametrize("name", PARTS)
def test_own_code_that_fails_in_training_is_named_with_its_site(tmp_path: Path, name: str):
    key, cause = PARTS[name]
    said = failing(tmp_path, key, name).splitlines()
    for number, line in enumerate(said[-3:-1]):
        assert line.startswith(
            f"round 1: site-000{number} dropped: {key}: '{HERE}:{name}' failed at site 'site-000{number}' ("
        )
    assert said[-1].startswith("round 1: 0 good replies, ")
    assert re.search(cause, said[-1])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [("loss", []), ("Net", ["engine.vectorise=2"]), ("Objective", [])])
def test_and_on_ray(tmp_path: Path, name: str, more: list[str]):
    key = PARTS[name][0]
    said = failing(tmp_path, key, name, "engine.name=ray", "engine.workers=1", *more)
    for site in ("site-0000", "site-0001"):
        assert f"round 1: {site} dropped: {key}: '{HERE}:{name}' failed at site '{site}' (" in said


def test_a_network_that_fails_while_sites_measure_it_is_named_once(tmp_path: Path):
    config = configured(tmp_path, f"network={HERE}:Measured", "evaluation.where=sites", "evaluation.every=1", "rounds=2")
    simulate(config, listeners=[listener := Recorder()])
    lines = [line for line in listener.messages if "send no scores" in line]
    assert len(lines) == 1 and "disclose" not in lines[0]
    assert lines[0].startswith("evaluation.where=sites: 2 of 2 sites send no scores (site-0000: network: "
                               f"'{HERE}:Measured' failed at site 'site-0000' (KeyError: 'a batch'; ")  # fmt: skip


def test_an_error_of_this_project_names_no_part_of_the_users(tmp_path: Path):
    said = failing(tmp_path, "network", "Net", "training.rate=1e38", "training.batch=4")
    assert "DivergedError: site-0000: the loss is " in said and HERE not in said
