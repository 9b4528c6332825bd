"""What networks give the sites, counted by hand, and what they cost."""

from collections.abc import Iterator

import pytest

from fedloom.clients.data import label, site_examples, to_float
from fedloom.server.evaluation.per_client_metrics import at_sites, class_counts, costs, different_networks
from tests.server.arithmetics import one_core
from tests.server.runs import method_of
from tests.server.test_cla_ot import DEEP, SHALLOW, configured

SITES = """{domain: digits, count: 2, samples: 160, partition: {name: dirichlet, alpha: 0.05},
            networks: [{name: mlp, widths: [16, 8]}, {name: mlp, widths: [16, 16, 16, 8]}]}"""


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture
def method(tmp_path):
    with method_of(configured(tmp_path, sites=SITES)) as method:
        yield method


def test_class_counts_add_up_to_the_accuracy(method):
    model = method.state.models()[DEEP]
    counts, accuracy = class_counts(method.evaluator, model), method.evaluator.accuracy(model, "test")
    assert {domain: float(right.sum() / total.sum()) for domain, (right, total) in counts.items()} == pytest.approx(
        {domain: share for domain, share in accuracy.items() if domain != "union"}
    )


def test_own_lacking_and_union_are_what_they_say(method):
    models, sites = method.state.models(), method.config.roster
    found = at_sites(method.evaluator, sites, models)
    own, lacking, union = [], [], []
    for site, name in zip(sites, (SHALLOW, DEEP), strict=True):
        images, network = method.evaluator.images(label(site.spec), "test"), method.evaluator.loaded(models[name])
        right = network(to_float(images.x)).argmax(1) == images.y
        labels = site_examples(method.config, site).y.tolist()
        own.append(sum(float(right[images.y == y].double().mean()) for y in labels) / len(labels))
        absent = [y for y in range(10) if y not in labels]
        lacking += [sum(float(right[images.y == y].double().mean()) for y in absent) / len(absent)] if absent else []
        union.append(method.evaluator.accuracy(models[name], "test")["union"])
    assert found == pytest.approx({"own": sum(own) / 2, "lacking": sum(lacking) / len(lacking), "union": sum(union) / 2})
    assert lacking


def test_costs_count_parameters_bytes_and_the_ensemble(method):
    models, sites = method.state.models(), method.config.roster
    found = costs(method.evaluator, sites, models)
    for name in (SHALLOW, DEEP):
        numbers = sum(tensor.numel() for tensor in models[name].state.values())
        assert found[name]["parameters"] == numbers and found[name]["bytes"] == 2 * 4 * numbers
        assert found[name]["sites"] == 1 and found[name]["seconds"] > 0.0
    assert found["ensemble of all sites"]["parameters"] == found[SHALLOW]["parameters"] + found[DEEP]["parameters"]


def test_it_is_for_different_networks(method, tmp_path):
    assert different_networks(method.config, method.config.roster)
    assert not different_networks(method.config, method.config.roster[1:])
