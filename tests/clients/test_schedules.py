"""Schedules of the learning rate: the values of torch's, between the rounds as well as in them."""

import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler

from fedloom.clients.training.recipe import recipe_of
from fedloom.clients.training.schedules import SCHEDULES, schedule_of
from fedloom.conf import UserError, load
from fedloom.conf.schema import TrainingConfig

ROUNDS = 20
AFTER: dict[str, tuple[dict[str, Any], Any]] = {
    "constant": ({}, lambda optimiser, rounds: lr_scheduler.ConstantLR(optimiser, factor=1.0)),
    "cosine": ({}, lambda optimiser, rounds: lr_scheduler.CosineAnnealingLR(optimiser, T_max=rounds)),
    "step": ({"every": 3, "gamma": 0.5}, lambda optimiser, rounds: lr_scheduler.StepLR(optimiser, 3, 0.5)),
}


def of_torch(name: str, warm_up: int, start: float) -> list[float]:
    """torch's rates at the beginning of each round."""
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    after = AFTER[name][1](optimiser, ROUNDS - warm_up)
    if warm_up:
        before = lr_scheduler.LinearLR(optimiser, start_factor=start, total_iters=warm_up)
        after = lr_scheduler.SequentialLR(optimiser, [before, after], [warm_up])
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a step of the schedule before one of the optimiser
        for _ in range(ROUNDS):
            rates.append(float(optimiser.param_groups[0]["lr"]))
            after.step()
    return rates


@pytest.mark.parametrize("name", AFTER)
@pytest.mark.parametrize("warm_up", [0, 4])
def test_at_the_beginning_of_each_round_the_rate_is_torchs(name: str, warm_up: int):
    training = TrainingConfig(rate=0.4, schedule={"name": name, "warm_up": warm_up, "start_factor": 0.25, **AFTER[name][0]})
    ours = [recipe_of(training).rate_at(ROUNDS, float(progress)) for progress in range(ROUNDS)]
    assert ours == pytest.approx(of_torch(name, warm_up, 0.25), rel=1e-6, abs=1e-9)


@given(st.floats(0, 10), st.integers(1, 1000), st.floats(0, 2))
def test_names_alone_have_the_very_bits_that_they_always_had(rate: float, rounds: int, share: float):
    progress = share * rounds
    cosine = rate * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress / rounds)))
    assert recipe_of(TrainingConfig(rate=rate)).rate_at(rounds, progress) == cosine
    assert recipe_of(TrainingConfig(rate=rate, schedule="constant")).rate_at(rounds, progress) == rate


@given(st.sampled_from(sorted(AFTER)), st.floats(0.1, 10), st.integers(1, 30), st.floats(0, 1), st.floats(0, 1))
def test_warm_up_rises_to_the_rate_and_the_schedule_begins_then(
    name: str, warm_up: float, rounds: int, one: float, two: float
):
    training = TrainingConfig(rate=0.5, schedule={"name": name, "warm_up": warm_up})
    early, late = (recipe_of(training).rate_at(rounds, share * warm_up * 0.999) for share in sorted((one, two)))
    assert 0.05 <= early <= late <= 0.5
    bare = recipe_of(TrainingConfig(rate=0.5, schedule=name)).rate_at(1, 0.0)
    assert recipe_of(training).rate_at(rounds, warm_up) == (bare if rounds > warm_up or name != "cosine" else 0.0)


def test_steps_stay_within_a_round_and_continue_behind_the_last_one():
    training = TrainingConfig(rate=1.0, schedule={"name": "step", "every": 2, "gamma": 0.5})
    recipe = recipe_of(training)
    assert [recipe.rate_at(4, at) for at in (0.0, 1.99, 2.0, 3.5, 4.0, 9.0)] == [
        1.0,
        1.0,
        0.5,
        0.5,
        0.25,
        0.0625,
    ]


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        ("cosin", r"unknown schedule 'cosin'; did you mean 'cosine'\? \(known: constant, cosine, step\)"),
        ({"name": "step", "evry": 3}, r"unknown key 'training\.schedule\.evry'; did you mean 'training\.schedule\.every'\?"),
        ({"name": "step", "gamma": 2}, r"training\.schedule\.gamma: got 2\.0, takes a number from 0\.0 to 1\.0"),
        ({"warm_up": -1}, r"training\.schedule\.warm_up: got -1\.0, takes a number of at least 0\.0"),
        (7, r"training\.schedule: got 7, takes a name or a section such as \{name: step, every: 10\}"),
    ],
)
def test_what_is_not_a_schedule_is_reported_in_one_line(schedule: Any, line: str):
    with pytest.raises(UserError, match=line):
        schedule_of(TrainingConfig(schedule=schedule))


def test_options_reach_a_schedule_that_is_named_elsewhere():
    steps = ["training.schedule=step", "training.schedule.every=3", "training.schedule.warm_up=1.5"]
    assert load("digits", steps).training.schedule == {"name": "step", "every": 3, "warm_up": 1.5}
    assert load("digits", [*steps, "training.schedule.name=constant"]).training.schedule == {"name": "constant"}
    assert isinstance(schedule_of(load("digits", ["training.schedule.warm_up=2"]).training), SCHEDULES.get("cosine"))


@pytest.mark.parametrize(
    ("schedule", "rounds", "message"),
    [
        ({"name": "cosine", "warm_up": 5}, 5, "training.schedule.warm_up: 5 of 5 rounds"),
        ({"name": "cosine", "warm_up": 5}, 6, ""),
        ({"name": "step", "every": 3}, 3, "training.schedule.every: 3, but the run has 3 rounds; the rate never falls"),
        ({"name": "step", "every": 3, "warm_up": 1}, 4, "the rate never falls"),
        ({"name": "step", "every": 3}, 4, ""),
        ("constant", 1, ""),
    ],
)
def test_a_schedule_says_where_the_rounds_are_too_few_for_it(schedule: Any, rounds: int, message: str):
    found = schedule_of(TrainingConfig(schedule=schedule)).advice(rounds)
    assert found == [] if not message else len(found) == 1 and message in found[0]
