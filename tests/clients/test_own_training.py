"""Networks of the user's own in training: their mode, what they draw themselves, and layers that are frozen."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from flwr.app import RecordDict
from torch import Tensor

from fedloom.clients.job import Job
from fedloom.clients.networks.initial import initial_state
from fedloom.clients.objectives import resolve
from fedloom.clients.protocol.messages import EVALUATE, MEAN, MODEL, ROUND, TRAIN, TaskInstructions, to_arrays, to_states
from fedloom.clients.storage.store import SiteStore
from fedloom.clients.training.tasks import scratch_model
from fedloom.clients.training.vectorised import train_cohort
from fedloom.clients.work import respond
from fedloom.conf import Config, load
from fedloom.fusion.state import digest

MODULE = """
import torch
from torch import nn

class Drops(nn.Module):
    def forward(self, x):
        return nn.functional.dropout(x, 0.5, torch.is_grad_enabled())

def norms(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes))

def dropout(classes):
    return nn.Sequential(nn.Flatten(), Drops(), nn.Linear(64, classes))

def frozen(classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8).requires_grad_(False), nn.ReLU(), nn.Linear(8, classes))
"""


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.set_num_threads(1)
    (tmp_path / "trained_nets.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("trained_nets", None)


def job(tmp_path: Path, name: str, *words: str, site: int = 0, measured: bool = False) -> Job:
    """The job of one of two sites with 40 digits each, in round 1."""
    sites = "sites=[{domain: digits, samples: 40, count: 2}]"
    small = ["data.size=8", "training.batch=16", "data.test_limit=20", "objective.mode=fedavg", "baselines=[]", *words]
    config = load("digits", [sites, f"network={{name: 'trained_nets:{name}'}}", *small])
    content = RecordDict({MODEL if measured else MEAN: to_arrays(start(config))})
    kind = EVALUATE if measured else TRAIN
    order = TaskInstructions(config="", run="run", site=site, round=1, rounds=2, base=0, members=2, kind=kind, split="test")
    return Job(order, resolve(config), SiteStore(tmp_path / "sites", "run", f"site-{site:04d}"), content)


def start(config: Config) -> dict[str, Tensor]:
    return initial_state(config)


def trained(one: Job) -> dict[str, Tensor]:
    return to_states(respond(one))[ROUND]


@pytest.mark.parametrize("statistics", ["running", "batch"])
def test_training_is_in_training_mode_before_and_after_a_measurement(tmp_path: Path, statistics: str):
    words = [f"evaluation.statistics={statistics}"]
    first = trained(one := job(tmp_path, "norms", *words))
    bench = scratch_model(one)
    assert all(module.training for module in bench.modules())
    assert not torch.equal(first["extractor.2.running_mean"], start(one.config)["extractor.2.running_mean"])
    respond(job(tmp_path, "norms", *words, measured=True))
    assert digest(trained(job(tmp_path, "norms", *words))) == digest(first)


def test_what_a_network_draws_follows_from_the_seed_and_the_site(tmp_path: Path):
    states = []
    for seed, words in [(1, []), (2, []), (1, ["seed=5"])]:
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        states.append(digest(trained(job(tmp_path, "dropout", *words))))
        assert torch.equal(torch.get_rng_state(), before)
    assert states[0] == states[1] != states[2]


@pytest.mark.parametrize("name", ["dropout", "norms"])
def test_sites_that_vmap_cannot_train_as_one_are_trained_alone_to_the_same_bits(tmp_path: Path, name: str):
    alone = [digest(trained(job(tmp_path, name, site=site))) for site in (0, 1)]
    replies = train_cohort([job(tmp_path, name, site=site) for site in (0, 1)])
    assert all(isinstance(reply, RecordDict) for reply in replies)
    assert [digest(to_states(reply)[ROUND]) for reply in replies if isinstance(reply, RecordDict)] == alone


@pytest.mark.parametrize("mode", ["fedavg", "exact"])
def test_frozen_layers_stay_and_the_others_are_trained(tmp_path: Path, mode: str):
    jobs = [job(tmp_path, "frozen", f"objective.mode={mode}", site=site) for site in (0, 1)]
    begin, cohort = start(jobs[0].config), train_cohort(jobs)
    for reply in [*(respond(one) for one in jobs), *cohort]:
        assert isinstance(reply, RecordDict), reply
        end = {name: tensor for state in to_states(reply).values() for name, tensor in state.items()}
        assert torch.equal(end["extractor.1.weight"], begin["extractor.1.weight"])
        assert not torch.equal(end["head.weight"], begin["head.weight"])
