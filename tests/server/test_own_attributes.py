"""A user's strategy or schedule that stores values in Python attributes: the run says that nothing saves them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedloom.conf.sites import Site
from fedloom.server.rounds.attributes import Attributes
from fedloom.server.rounds.schedules import Participation, Schedule
from fedloom.server.strategies import RoundContext
from fedloom.server.strategies.fedavg import FedAvg
from tests.server.parts import Recorder, small
from tests.server.resumes import resumed, run, stopped

HERE = "tests.server.test_own_attributes"


class Attribute(FedAvg):
    """Sets an attribute in each round."""

    def round(self, context: RoundContext) -> None:
        super().round(context)
        self.velocity = context.initial()


class InBegin(FedAvg):
    def begin(self, context: RoundContext) -> None:
        super().begin(context)
        self.factor = 0.5


class OnClass(FedAvg):
    """Changes a list of its class, which other runs in this process share."""

    past: ClassVar[list[Any]] = []

    def round(self, context: RoundContext) -> None:
        super().round(context)
        self.past.append(context.initial())


class Draws(Schedule):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def participation(self, round: int, members: Sequence[Site]) -> Participation:
        return Participation([members[int(self.rng.integers(len(members)))]], round)


class Scheduled(FedAvg):
    def schedule(self, experiment: Any) -> Schedule:
        return Draws()


@dataclass(frozen=True)
class Computes(FedAvg):
    """Changes nothing but what it can compute again."""

    names: ClassVar[dict[str, int]] = {"a": 1}

    @cached_property
    def tensor(self) -> torch.Tensor:
        return torch.arange(3)

    def round(self, context: RoundContext) -> None:
        assert len(self.tensor) == 3
        super().round(context)


def warnings(listener: Recorder) -> list[str]:
    return [message for message in listener.messages if "attributes" in message]


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("Attribute", "the strategy Attribute changed its attributes `velocity`"),
        ("InBegin", "the strategy InBegin changed its attributes `factor`"),
        ("OnClass", "the strategy OnClass changed its attributes `past`"),
        ("Scheduled", "the schedule Draws changed its attributes `rng`"),
    ],
)
def test_attributes_that_a_resumed_run_would_lack_are_named_once(tmp_path: Path, name: str, changed: str):
    listener = Recorder()
    run(small(tmp_path, f"strategy.name={HERE}:{name}", "objective=fedavg", "baselines=[]", "rounds=3"), listener)
    assert len(warnings(listener)) == 1
    assert changed in warnings(listener)[0]
    assert "round 1," in warnings(listener)[0] and "context.save_server_state" in warnings(listener)[0]


def test_a_resumed_run_names_them_too(tmp_path: Path):
    config = stopped(small(tmp_path, f"strategy.name={HERE}:Attribute", "objective=fedavg", "baselines=[]", "rounds=3"), 1)
    listener = Recorder()
    resumed(config, listener)
    assert "in or before round 2, the strategy Attribute changed its attributes `velocity`" in warnings(listener)[0]


@pytest.mark.parametrize("name", ["fedavg", f"{HERE}:Computes"])
def test_a_strategy_that_saves_what_it_needs_is_not_warned_about(tmp_path: Path, name: str):
    listener = Recorder()
    run(small(tmp_path, f"strategy.name={name}", "objective=fedavg", "baselines=[]", "rounds=2"), listener)
    assert not warnings(listener)


class Holds:
    """An object with values of many kinds."""

    def __init__(self) -> None:
        self.tensors = {"a": torch.zeros(2), "b": torch.tensor(1.0, dtype=torch.bfloat16)}
        self.lock, self.rule = threading.Lock(), lambda value: value
        self.parameter = torch.nn.Linear(2, 2)


def test_only_changes_of_a_value_count():
    held = Holds()
    watched = Attributes(strategy=held)
    assert list(watched.changed(1)) == []
    held.tensors["a"][0] = 1
    assert "`tensors`" in "".join(watched.changed(2))
    with torch.no_grad():
        held.parameter.weight += 1
    held.lock = threading.Lock()
    assert "`lock`, `parameter`" in "".join(watched.changed(3))
    held.tensors["a"][0] = 2
    assert list(watched.changed(4)) == []
