"""Applications of compatible components, at the smallest size: what stays as it is, and what is put together."""

import pytest
import torch

from fedloom.clients.data import Examples
from fedloom.sims.experiments.components import adaptation, faster, one_head
from fedloom.sims.experiments.components.trainer import Plan, answers, built, fit, frozen, mean_class_accuracy, turns
from fedloom.sims.operations.domain_task import Task, images
from tests.server.arithmetics import same
from tests.server.parts import one_thread

FEW = Plan(4, 0.05)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    one_thread()


def data(size: int = 16) -> dict[str, Examples]:
    task = Task("digits", size, False, samples=200)
    whole = images(task, "test")
    return {"train": images(task, "train"), "test": Examples(whole.x[:80], whole.y[:80])}


def test_adapting_moves_the_extractor_alone():
    found = data()
    network, rotating = adaptation._with_rotations(found["train"], 0, FEW)
    before = [{name: one.clone() for name, one in part.state_dict().items()} for part in (network.head, rotating)]
    start = {name: one.clone() for name, one in network.extractor.state_dict().items()}
    fit([network.extractor], turns(network.extractor, frozen(rotating), 0), found["train"], FEW, 0)
    assert same(network.head.state_dict(), before[0]) and same(rotating.state_dict(), before[1])
    assert not same(network.extractor.state_dict(), start)


def test_all_rows_of_the_adaptation_are_shares():
    found = adaptation.measured(data(), data(), 0, FEW, (FEW, FEW))
    assert set(found) == {*adaptation.ROWS, "target"} and all(0 <= share <= 1 for share in found.values())


def test_a_wider_head_answers_as_before_on_the_classes_it_knew():
    network = built(one_head._section(next(iter(one_head.EXTRACTORS.values()))), one_head.SIZE, one_head.FIRST, 0, "narrow")
    wider = one_head._extended(network.head, 0).eval()
    features = torch.randn(3, 64, 4, 4)
    torch.testing.assert_close(network.head.eval()(features), wider(features)[:, : one_head.FIRST])


@pytest.mark.nightly
@pytest.mark.parametrize("match", one_head.WAYS.values())
def test_one_head_is_measured_on_every_extractor(match, monkeypatch):
    monkeypatch.setattr(one_head, "EXTRACTORS", dict(list(one_head.EXTRACTORS.items())[1:]))
    found = one_head.measured(data(), 0, match, FEW, FEW)
    assert set(found) == {"before", *one_head.COLUMNS}
    assert all(list(row) == list(one_head.EXTRACTORS) for row in found.values())


@pytest.mark.nightly
def test_transfer_is_measured_after_every_number_of_steps(monkeypatch):
    monkeypatch.setattr(faster, "STEPS", (0, 2))
    found = faster.measured(data(), data(), data(), 0, FEW)
    assert set(found) == {"RP", "IIW+RP", "independent", "head drawn anew"} and {len(row) for row in found.values()} == {2}


def test_accuracy_counts_all_classes_alike():
    network, found = built(adaptation.NETWORK, 16, 10, 0), data()
    fit([network], answers(network.extractor, network.head), found["train"], Plan(60, 0.05), 0)
    few = found["test"].y != 3
    test = Examples(found["test"].x[few], found["test"].y[few])
    each = [Examples(test.x[test.y == label], test.y[test.y == label]) for label in range(10) if label != 3]
    by_class = [mean_class_accuracy(network.extractor, network.head, one, "running") for one in each]
    assert mean_class_accuracy(network.extractor, network.head, test, "running") == pytest.approx(sum(by_class) / 9)
