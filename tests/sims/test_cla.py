"""The experiments on CLA+OT, with small networks and the embedded digits."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fedloom.clients.data import Examples
from fedloom.clients.data.form import Form
from fedloom.clients.networks import parse_name
from fedloom.conf.errors import UserError
from fedloom.fusion.graph.channels import wire
from fedloom.sims.experiments import cla, papers, skill_transfer
from fedloom.sims.experiments.cla import distilling, methods, mlps, runs, sizes, starts
from fedloom.sims.experiments.cla.methods import METHODS, Inputs
from fedloom.sims.experiments.pairs import Recipe, plain_loss
from fedloom.sims.experiments.study import Study
from fedloom.sims.operations.domain_task import Task
from tests.server.arithmetics import one_core

TASK = Task("digits", 8, True, samples=200)
RECIPE, FINE = Recipe(epochs=2, rate=0.1), Recipe(epochs=1, rate=0.02)
MLP = sizes.Pair(
    "mlp:widths=[20,16,12],bias=false,head_bias=false", "mlp:widths=[20,16],bias=false,head_bias=false", TASK, RECIPE, FINE
)
RESNET = sizes.Pair(
    "resnet14:width=0.07,norm=none,head_bias=false",
    "resnet10:width=0.07,norm=none,head_bias=false",
    TASK,
    RECIPE,
    FINE,
    "cifar10",
)
PAIRS = {
    "mlp": MLP,
    "resnet": RESNET,
    "vgg": replace(MLP, paper="vgg on cifar10"),
    "resnet-half": replace(RESNET, paper="resnet on cifar100"),
}
TINY = sizes.Size(PAIRS, temperatures=(1.0, 4.0), weights=(0.5,), draws=1, probe=40)
ALL = (starts.ONE, *starts.TWO, starts.THREE, starts.FOUR, starts.TEN, starts.ELEVEN, starts.TWELVE)


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory for all tests, and these small pairs."""
    with one_core(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("cla"))
        patch.setitem(sizes.SIZES, "cpu", TINY)
        yield Path.cwd()


@pytest.fixture(scope="module")
def study() -> Study:
    return Study("cpu", Path("runs/cla"))


def network(text: str, seed: int) -> nn.Module:
    return methods.fresh(parse_name(text, Form.images(3, 32, 10)).build().eval(), seed)


def test_tables_are_written_and_measured_once(elsewhere: Path) -> None:
    folder = elsewhere / cla.reproduce("cpu", 1, ["tables=3,9"], quiet=True)
    text = (folder / "tables.md").read_text(encoding="utf-8")
    assert "Table 3 (resnet)" in text and "61.3 ± 3.7" in text and "Table 9" in text and "Table 10" in text
    assert (folder / "table-3.png").stat().st_size > 5000
    assert "data:image/png" in (folder / "report.html").read_text(encoding="utf-8")
    marks = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    cla.reproduce("cpu", 1, ["tables=3"], quiet=True)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")} == marks


@pytest.mark.nightly
def test_a_start_is_measured_at_once_and_after_fine_tuning(study: Study) -> None:
    deepened = runs.reached(study, "mlp", 0, "B deepened (Net2Net)")
    assert [len(deepened[part]) for part in ("test", "validation")] == [2, 2]
    assert deepened["test"][0] == runs.reached(study, "mlp", 0, "B", tune=False)["test"][0]  # it does what B does
    assert "use networks of one shape" in runs.reached(study, "mlp", 0, "naive average")["refused"]
    with pytest.raises(UserError, match=r"networks of \[3, 2\] hidden layers or blocks; takes networks of one depth"):
        methods.otfusion(runs.inputs_of(study, "mlp", 0))


def test_every_row_of_every_table_is_a_method_and_its_cells_are_the_papers() -> None:
    for preset in ("paper", "cpu"):
        for asked in ALL:
            for pair in asked.pairs:
                if (chosen := sizes.SIZES[preset].pairs.get(pair)) is None:
                    continue
                for row in asked.rows:
                    names = [f"{row.method} {draw}" for draw in range(TINY.draws)] if row.draws else [row.method]
                    assert set(names) <= METHODS.keys()
                    shown = starts.theirs(asked, row, chosen.paper)
                    for text, column in zip(shown, (row.before, row.after), strict=True):
                        assert (text != "-") == bool(column), (asked.number, row)


def test_every_table_that_is_offered_is_one_of_the_papers() -> None:
    assert set(cla.TABLES) <= set(papers.tables_of("cla_ot"))


def test_maps_of_vggs_and_resnets_are_those_of_the_paper() -> None:
    probe = torch.zeros(2, 3, 32, 32)
    vgg = Inputs([network("vgg13_double:width=0.07,norm=none", 0), network("vgg11_half:width=0.07,norm=none", 1)], probe, 0)
    assert methods.first_two(vgg, 1, 3) == (0, 2, 4, 5, 6, 7, 8, 9)
    resnet = Inputs([network("resnet34:width=0.07", 0), network("resnet18:width=0.07", 1)], probe, 0)
    assert methods.same_index(resnet) == (0, 1, 2, 4, 5, 8, 9, 14, 15)
    units = wire(resnet.deep, probe[:1]).units
    for number in range(3):
        chosen = methods.drawn(resnet, number)
        assert [units[place].group for place in chosen] == [0, 1, 1, 2, 2, 3, 3, 4, 4] and list(chosen) == sorted(chosen)
        assert {0, 1, 4, 8, 14} <= set(chosen)
    assert len({methods.drawn(resnet, number) for number in range(5)}) > 1


@pytest.mark.nightly
def test_every_comparison_and_every_map_of_two_mlps(study: Study) -> None:
    found = mlps.measured(study, 0)
    assert list(found["ways"]) == ["1-2", "1-3", "2-3"] and found["maps"]["cka"]["both pinned"] == "1-3"
    assert all(len(ways) == len(mlps.WAYS) for ways in found["ways"].values())
    whole = {"maps": {name: dict.fromkeys(mlps.PINS, "1-2-5") for name in mlps.COMPARISONS}, "ways": {"1-2-5": [0.5] * 4}}
    assert mlps.nine(study, [whole]).rows[1] == ["cka", *["1-2-5"] * 4, "1-2-5", "1-2-5", "1-2-3 ?", "1-2-3 ?"]
    assert mlps.ten(study, [whole]).rows[0][5:] == ["92.5 ± 2.6", "94.0 ± 1.4", "92.4 ± 2.9"]


def test_a_teacher_without_weight_is_plain_training() -> None:
    student, teacher = network("conv6:norm=none", 0), network("conv6:norm=none", 1)
    images, labels = torch.rand(6, 3, 32, 32), torch.arange(6)
    assert torch.equal(distilling.taught(teacher, 8.0, 0.0)(student, images, labels), plain_loss(student, images, labels))
    own = distilling.taught(student, 8.0, 1.0)(student, images, labels)
    assert abs(float(own.detach())) < 1e-5  # who teaches itself has nothing to learn


@pytest.mark.nightly
def test_distillation_takes_the_settings_that_are_best_on_validation_images(
    study: Study, capsys: pytest.CaptureFixture[str]
) -> None:
    [table] = distilling.table(replace(study, quiet=False))
    assert len(capsys.readouterr().out.splitlines()) == len(distilling.STUDENTS) * 2  # a line for each, when it is measured
    assert [row[0] for row in table.rows] == list(distilling.STUDENTS) and table.rows[2][3:] == ["91.4", "91.2 ± 0.2"]
    found = {"a": {"validation": [0.4], "test": [0.9]}, "b": {"validation": [0.5], "test": [0.6]}}
    assert distilling._best(found, ["a", "b"]) == 0.6


@pytest.mark.nightly
def test_costs_are_measured(study: Study) -> None:
    for table in (*cla.sizing.table(study), *distilling.epochs_table(Study("cpu", Path("runs/epochs")))):
        assert len(table.rows) >= 3


def test_specialist_and_generalist_share_all_images_out() -> None:
    whole = Examples(torch.zeros(1000, 1, 2, 2, dtype=torch.uint8), torch.arange(1000) % 10)
    one, other = (skill_transfer.Skill("digits", 8, True, seed=1, rest=rest).selected(whole).y for rest in (False, True))
    assert len(one) + len(other) == 1000 and (other != 4).all() and (one == 4).sum() == 100
    assert 0.06 < (len(one) - 100) / 900 < 0.14


@pytest.mark.nightly
def test_skill_is_transferred_at_every_weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    size = skill_transfer.Size("digits", Recipe(epochs=3, rate=0.03))
    ways = {name: skill_transfer.WAYS[name] for name in ("layers added", "ours, refit")}
    for name, value in (("WEIGHTS", (0.0, 1.0)), ("WAYS", ways), ("SIZES", {"cpu": size})):
        monkeypatch.setattr(skill_transfer, name, value)
    found = skill_transfer.measured(size, 0, tmp_path)
    alone = [found["test"][name][0] for name in skill_transfer.ALONE]
    for name in ways:
        assert found["test"][name][0] == pytest.approx(alone[0], abs=0.02)  # A alone
    assert found["test"]["ours, refit"][-1] == pytest.approx(alone[1], abs=0.02)  # B alone
    table = skill_transfer.table(Study("cpu", tmp_path), [found])
    (theirs,) = (row for row in table.rows if row[0] == "layers added (paper)")
    assert theirs[1:3] == ["90.8", "87.6"]
    assert skill_transfer.drawn([found], tmp_path / "curve.png").stat().st_size > 5000


def test_what_it_does_not_take_is_refused() -> None:
    with pytest.raises(UserError, match="unknown preset 'papers'"):
        cla.reproduce("papers", 1, [], quiet=True)
    with pytest.raises(UserError, match="unknown table '99'"):
        cla.reproduce("cpu", 1, ["tables=99"], quiet=True)
    with pytest.raises(UserError, match="override 'seed=1': this reproduction takes tables=NAME,NAME"):
        cla.reproduce("cpu", 1, ["seed=1"], quiet=True)
    with pytest.raises(UserError, match="takes no overrides"):
        skill_transfer.reproduce("cpu", 1, ["tables=13"], quiet=True)
    with pytest.raises(UserError, match="unknown preset"):
        skill_transfer.reproduce("tiny", 1, [], quiet=True)
