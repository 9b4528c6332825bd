"""Optimisers by name: torch's own steps, and lines for what cannot be one."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fedloom.clients.networks import architecture_of
from fedloom.clients.objectives import resolve
from fedloom.clients.training.checks import check_training
from fedloom.clients.training.learner import descend
from fedloom.clients.training.optimizers import OPTIMIZERS, SGD, optimizer_of
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf import UserError, load
from fedloom.conf.schema import TrainingConfig

OPTIONS: dict[str, dict[str, Any]] = {
    "adadelta": {"rho": 0.8},
    "adafactor": {"beta2_decay": -0.5, "eps": [None, 0.01]},
    "adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.2},
    "adam": {"betas": [0.8, 0.95], "amsgrad": True, "weight_decay": 0.1},
    "adamax": {"eps": 1e-4},
    "adamw": {"betas": [0.9, 0.95], "weight_decay": 0.2},
    "asgd": {"lambd": 0.01, "t0": 2.0},
    "muon": {"ns_steps": 3},
    "nadam": {"momentum_decay": 0.01},
    "radam": {"betas": [0.7, 0.9]},
    "rmsprop": {"alpha": 0.9, "momentum": 0.5, "centered": True},
    "rprop": {"etas": [0.4, 1.3]},
    "sgd": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
}
CLASSES = {key.lower(): one for key, one in vars(torch.optim).items() if isinstance(one, type)}
SHAPES = [(4, 3), (3, 5)]


def drawn(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def by_torch(
    make: Callable[..., torch.optim.Optimizer], rates: Sequence[float], start: float, **options: Any
) -> list[Tensor]:
    """The weights after steps of torch's own class on the gradients that the numbers of the steps draw."""
    moving = [nn.Parameter(one) for one in drawn(99)]
    optimiser = make(moving, lr=start, **{key: tuple(one) if isinstance(one, list) else one for key, one in options.items()})
    for number, rate in enumerate(rates):
        for group in optimiser.param_groups:
            group["lr"] = rate
        for one, gradient in zip(moving, drawn(number), strict=True):
            one.grad = gradient
        optimiser.step()
    return [one.detach() for one in moving]


def by_ours(rates: Sequence[float], training: TrainingConfig) -> list[Tensor]:
    moving = [nn.Parameter(one) for one in drawn(99)]
    step = optimizer_of(training).bind(moving, training)
    for number, rate in enumerate(rates):
        with torch.no_grad():
            step(rate, drawn(number))
    assert all(one.grad is None for one in moving)
    return [one.detach() for one in moving]


def test_every_class_of_torch_is_known_but_those_that_no_site_can_use():
    assert set(OPTIONS) == set(OPTIMIZERS.names()) == set(CLASSES) - {"optimizer", "lbfgs", "sparseadam"}


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=5)
@given(rates=st.lists(st.floats(1e-4, 0.5), min_size=1, max_size=5), given_options=st.booleans())
def test_each_steps_as_the_class_of_torch_does_on_the_same_gradients(name: str, rates: list[float], given_options: bool):
    options = OPTIONS[name] if given_options else {}
    training = TrainingConfig(rate=0.1, momentum=0.0, optimizer={"name": name, **options})
    for one, other in zip(by_ours(rates, training), by_torch(CLASSES[name], rates, 0.1, **options), strict=True):
        assert torch.equal(one, other)


def test_the_default_is_sgd_with_momentum_and_weight_decay_of_the_section_training():
    training = TrainingConfig(momentum=0.7, weight_decay=0.02)
    expected = by_torch(torch.optim.SGD, [0.1, 0.2, 0.3], 0.1, momentum=0.7, weight_decay=0.02)
    for one, other in zip(by_ours([0.1, 0.2, 0.3], training), expected, strict=True):
        assert torch.equal(one, other)


def test_a_sites_descent_is_a_plain_loop_of_torch():
    generator = torch.Generator().manual_seed(0)
    images, labels = torch.randn(5, 8, 6, generator=generator), torch.randint(3, (5, 8), generator=generator)
    mine, theirs = nn.Linear(6, 3), nn.Linear(6, 3)
    theirs.load_state_dict(mine.state_dict())
    training = TrainingConfig(rate=0.01, optimizer={"name": "AdamW", "weight_decay": 0.1})
    steps = [(0.01 / (number + 1), images[number], labels[number]) for number in range(5)]
    descend(list(mine.parameters()), lambda x, y: F.cross_entropy(mine(x), y), steps, recipe_of(training))
    optimiser = torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.1)
    for rate, x, y in steps:
        optimiser.param_groups[0]["lr"] = rate
        optimiser.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        optimiser.step()
    assert all(torch.equal(mine.state_dict()[name], one) for name, one in theirs.state_dict().items())


def layered(parameters: Sequence[Tensor], lr: float, head: float) -> torch.optim.Optimizer:
    """One of the user's own: the last weight moves faster."""
    return torch.optim.RMSprop([{"params": parameters[:-1]}, {"params": parameters[-1:], "lr": head * lr}], lr=lr)


def test_a_function_of_the_user_may_give_groups_rates_of_their_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch, "layered", layered, raising=False)
    training = TrainingConfig(rate=0.1, optimizer={"name": "torch:layered", "head": 3})
    first, last = by_ours([0.1, 0.05], training)
    assert torch.equal(first, by_torch(torch.optim.RMSprop, [0.1, 0.05], 0.1)[0])
    slower = by_torch(torch.optim.RMSprop, [0.1, 0.05], 0.1)[1]
    torch.testing.assert_close(last - drawn(99)[1], 3 * (slower - drawn(99)[1]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        ("adamww", r"unknown optimizer 'adamww'; did you mean 'adamw'\? \(known: adadelta, .*sgd\)"),
        ({"name": "adam", "beta": [0.9, 0.99]}, r"training\.optimizer\.beta'; did you mean 'training\.optimizer\.betas'\?"),
        (
            {"name": "adam", "betas": [0.9]},
            r"training\.optimizer\.betas: got \[0\.9\], takes 2 numbers such as \[0\.9, 0\.999\]",
        ),
        ({"name": "adam", "betas": 0.9}, r"training\.optimizer\.betas: got 0\.9, takes a list of numbers"),
        (
            {"name": "adam", "eps": "x"},
            r"training\.optimizer\.eps: got 'x', takes a finite number \(as in torch\.optim\.Adam\)",
        ),
        (
            {"name": "adam", "eps": -1},
            r"training\.optimizer: 'adam' failed with eps=-1.* \(ValueError: Invalid epsilon value: -1",
        ),
        ({"name": "sgd", "nesterov": True, "momentum": 0}, r"training\.optimizer\.nesterov: takes a momentum above 0"),
        ({"momentum": "x"}, r"training\.optimizer\.momentum: got 'x', takes a number from 0\.0 to 1\.0"),
        ({"name": "adam", "lr": 0.1}, r"training\.optimizer\.lr: set the learning rate in training\.rate instead"),
        ("LBFGS", r"training\.optimizer\.name: 'LBFGS' needs the loss of a batch several times per step"),
        ("sparseadam", r"'sparseadam' takes only sparse gradients; choose another optimizer, such as adamw"),
        ([1], r"training\.optimizer: got \[1\], takes a name or a section such as \{name: adamw\}"),
        ("muon", r"training\.optimizer: 'muon' failed \(ValueError: Muon only supports 2D parameters"),
        ("torch:pi", r"training\.optimizer\.name: 'torch:pi' has the type float"),
        ("builtins:list", r"training\.optimizer"),
        ("no_such_module:Mine", r"training\.optimizer\.name: cannot find module 'no_such_module'"),
    ],
)
def test_what_cannot_move_a_sites_network_is_reported_in_one_line_before_the_run(optimizer: Any, line: str):
    config = load("digits", ["network.width=0.25", "data.size=8"])
    vars(config)["training"] = TrainingConfig(optimizer=optimizer)
    with pytest.raises(UserError, match=line) as caught:
        check_training(resolve(config), [architecture_of(config)])
    assert "\n" not in str(caught.value)


def test_options_of_sgd_are_not_lost_on_others_in_silence():
    for word in ("training.momentum=0.5", "training.weight_decay=0.1"):
        config = load("digits", [word, "training.optimizer.name=adamw"])
        with pytest.raises(UserError, match=r"applies to sgd only; set the options of 'adamw' in training\.optimizer"):
            check_training(resolve(config), [])
    check_training(resolve(load("digits", ["training.momentum=0.5", "training.optimizer.nesterov=true"])), [])


def test_sites_trained_as_one_take_optimisers_of_single_entries_only():
    with pytest.raises(UserError, match=r"engine\.vectorise: optimizer 'adafactor' may mix the weights"):
        check_training(resolve(load("digits", ["engine.vectorise=2", "training.optimizer=adafactor"])), [])
    with pytest.raises(UserError, match=r"engine\.vectorise: does not work with training\.channels_last"):
        check_training(resolve(load("digits", ["engine.vectorise=2", "training.channels_last=true"])), [])
    check_training(resolve(load("digits", ["engine.vectorise=2", "training.optimizer=adamw"])), [])


def test_the_default_does_not_import_torchs_compiler():
    script = """
import sys
import torch
from fedloom.clients.training.learner import descend
from fedloom.clients.training.recipe import recipe_of
from fedloom.conf.schema import TrainingConfig
weight = torch.nn.Parameter(torch.ones(2))
descend([weight], lambda x, y: (weight * x).sum(), [(0.1, torch.ones(2), torch.ones(2))], recipe_of(TrainingConfig()))
assert not {"torch._dynamo", "torchvision"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)
    assert isinstance(optimizer_of(TrainingConfig()), SGD)
