"""engine.compile: the same training up to rounding; an error that says what is lacking."""

import shutil

import pytest
import torch
from torch import nn

from fedloom.clients.data import site_examples
from fedloom.clients.networks import Network, initialise
from fedloom.clients.objectives import Task, objective_of, resolve, state_of
from fedloom.clients.protocol.messages import MEAN
from fedloom.clients.training.compiled import compiled_loss
from fedloom.clients.training.learner import learn
from fedloom.clients.training.loss import CrossEntropy
from fedloom.conf import Config, UserError, load
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.state import State

CPU = torch.device("cpu")
SITES = "sites=[{domain: digits, samples: 70}, {domain: digits, samples: 70}]"


def network() -> Network:
    """One convolution with BatchNorm, whose statistics a compiled step moves, too."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    made = Network(nn.Sequential(*layers), nn.Linear(4, 10))
    initialise(made, generator)
    return made


def trained(config: Config) -> State:
    """All that site 0 keeps after one round."""
    site, start = config.roster[0], state_of(network())
    task = Task(
        experiment=resolve(config),
        site=site,
        round=1,
        members=2,
        network=network(),
        incoming={MEAN: start},
        load_local_state=lambda: start,
        generator=torch_generator(0, "objective"),
    )
    session = objective_of(config).session(task)
    learn(session, site_examples(config, site), resolve(config), site, 1, CPU)
    state = session.local_state()
    assert state is not None
    return state


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
def test_a_compiled_step_moves_weights_and_statistics_as_an_eager_one_up_to_rounding():
    torch.set_num_threads(1)
    eager, compiled = (
        trained(load("digits", [SITES, "data.size=8", "training.label_smoothing=0.1", f"engine.compile={flag}"]))
        for flag in ("false", "true")
    )
    assert compiled_loss.cache_info().currsize
    for name, tensor in eager.items():
        torch.testing.assert_close(compiled[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


def test_where_nothing_can_be_compiled_the_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch):
    from torch._dynamo.exc import InternalTorchDynamoError

    def failing(*_: object, **__: object):
        def call(*_: object) -> None:
            raise InternalTorchDynamoError("No working C++ compiler found\nmore")

        return call

    monkeypatch.setattr(torch, "compile", failing)
    small = Network(nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(
        UserError, match=r"engine\.compile: torch.compile failed \(No working C\+\+ compiler found\)\. Install"
    ):
        compiled_loss(small, 0, 2, CrossEntropy())(
            dict(small.named_parameters()), torch.zeros(3, 1, 2, 2), torch.zeros(3).long()
        )


def test_sites_trained_as_one_are_not_compiled(tmp_path):
    from fedloom import run

    with pytest.raises(UserError, match=r"engine\.compile: sites trained as one"):
        run("digits", "engine.compile=true", "engine.vectorise=2", f"run.root={tmp_path}")
