"""What a run says of layer selection: tables, the picture of beliefs, the page, and bad input on the command line."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from fedloom.conf.errors import UserError
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.report.headline import result_tables
from fedloom.sims.report.report import write_report
from fedloom.sims.report.selection import Chosen, Selection, methods_table, selection_figure, selections, sites_table
from fedloom.sims.report.tables import percent
from tests.server.arithmetics import one_core
from tests.server.selections import FIXED, TASKS, A, B, C, configured
from tests.sims.commands import Command, refused
from tests.sims.pages import checked

GROUPS = [["extractor.block1.0"], ["extractor.block2.0", "extractor.block3.0"]]
SMALL = [f"sites=[{', '.join(TASKS)}]", *FIXED]


@pytest.fixture(autouse=True, scope="module")
def _one_core() -> Iterator[None]:
    with one_core():
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run beside which all layers are shared, which no test changes."""
    root = tmp_path_factory.mktemp("selection")
    simulate(configured(root, "baselines=[all]"))
    return root / "layer_selection"


@pytest.fixture
def run(done: Path, tmp_path: Path) -> Path:
    """A copy of it to work on."""
    return Path(shutil.copytree(done, tmp_path / "layer_selection"))


def summary_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "summary.json").read_text())


def chosen(**other: Any) -> Chosen:
    """A site that trained in rounds 2 and 3 of 4."""
    given = {"site": A, "configuration": "10", "rounds": [2, 3],
             "shared": [[None, None], [0.6, 0.4], [0.8, 0.25], [None, None]], "accuracy": [None, 0.5, 0.8, 0.6]}  # fmt: skip
    return Chosen(**{**given, **other})


def selection(sites: int = 2, groups: int = 2, rounds: int = 4, mass: float = 0.3, method: str = "learned") -> Selection:
    every = [Chosen(f"site-{place:04d}", "1" * groups, [[mass] * groups] * rounds, [0.5] * rounds, [1, rounds])
             for place in range(sites)]  # fmt: skip
    return Selection(method, [[f"extractor.block{place}.0"] for place in range(groups)], every, 1_000, 20_000)


def test_peak_is_the_best_while_the_site_trained_and_the_ratio_what_is_left_of_it() -> None:
    one = chosen(accuracy=[0.9, 0.5, 0.8, 0.6])
    assert (one.last, one.peak) == (0.6, 0.8) and one.kept == pytest.approx(0.75)
    assert (one.share(0), one.share(1)) == (0.8, 0.25)
    blank = chosen(accuracy=[None] * 4, shared=[[None, None]] * 4, rounds=[])
    assert blank.last is blank.peak is blank.kept is blank.share(0) is None
    late = chosen(accuracy=[None, None, None, 0.6])
    assert (late.last, late.peak, late.kept) == (0.6, None, None)
    assert chosen(accuracy=[0.0] * 4).kept is None  # nothing was learned, hence nothing forgotten


def test_tables_tell_means_over_sites_and_each_sites_layers() -> None:
    found = Selection("learned", GROUPS, [chosen(), chosen(site=B, accuracy=[None, 0.4, 0.4, 0.4])], 1_048, 42_240)
    table = methods_table([found])
    assert table.columns[4:6] == ["shared: block1", "shared: block2 to block3"]
    assert table.rows == [["learned", "50.0%", "60.0%", "0.88", "80.0%", "25.0%", "1", "42"]]
    each = sites_table(found)
    assert each.title == "learned: what sites chose"
    assert each.rows == [[A, "10", "60.0%", "80.0%", "0.75"], [B, "10", "40.0%", "40.0%", "1.00"]]
    assert "from the input on: block1, block2 to block3;" in each.note
    many = sites_table(selection(sites=45))
    assert len(many.rows) == 20 and "45 sites" in many.note


@pytest.mark.parametrize(("sites", "groups", "rounds"), [(1, 1, 1), (2, 2, 4), (50, 7, 3), (3, 12, 2)])
def test_the_picture_has_a_panel_for_each_group_and_a_row_for_each_site(sites: int, groups: int, rounds: int) -> None:
    figure = selection_figure([selection(sites, groups, rounds, mass=1.0, method="all"), selection(sites, groups, rounds)])
    assert figure is not None
    panels = [axes for axes in figure.axes if axes.images and axes.get_visible()]
    assert [axes.get_title() for axes in panels] == [f"block{place}" for place in range(groups)]
    for axes in panels:
        data = axes.images[0].get_array()
        assert data is not None and data.shape == (sites, rounds) and float(data.min()) == float(data.max()) == 0.3
        assert axes.images[0].get_clim() == (0.0, 1.0)
    assert 0 < len(panels[0].get_yticklabels()) <= 40


def test_there_is_no_picture_where_nothing_was_learned() -> None:
    assert selection_figure([]) is None
    assert selection_figure([selection(mass=1.0), selection(mass=0.0)]) is None


def test_the_run_tells_every_method_at_its_end_and_on_its_page(done: Path) -> None:
    found, page = selections(summary_of(done)), checked(done / "report.html")
    assert [one.method for one in found] == ["learned", "all"]
    [table] = [table for table in result_tables(summary_of(done)) if table.title == "Layer selection"]
    assert [row[0] for row in table.rows] == ["learned", "all"] and table.rows[1][4:6] == ["100.0%", "100.0%"]
    assert "Layer selection" in page.text and "learned: what sites chose" in page.text
    for site in found[0].sites:
        assert site.configuration in page.text and percent(site.last) in page.text
    with Image.open(done / "plots" / "layers.png") as picture:
        assert min(picture.size) > 100


def test_runs_of_other_methods_say_nothing_of_layers(finished_run: Path, tmp_path: Path) -> None:
    other = shutil.copytree(finished_run, tmp_path / "digits")
    assert selections(summary_of(other)) == []
    assert not [table for table in result_tables(summary_of(other)) if table.title == "Layer selection"]
    assert "Layer selection" not in checked(write_report(other)).text


def test_a_forgotten_site_is_in_no_table(run: Path) -> None:
    unlearn(run, UnlearningRequest([B]))
    assert [[site.site for site in one.sites] for one in selections(summary_of(run))] == [[A, C]]
    page = checked(run / "report.html")
    assert "Layer selection" in page.text and f"{B} was forgotten" in page.text


@pytest.mark.parametrize("broken", [{"sites": [A]}, {"accuracy": 3}, {"shared": [[0.1]] * 3}, {"bytes": None}])
def test_a_damaged_summary_is_reported_in_one_line(run: Path, broken: dict[str, Any]) -> None:
    summary = summary_of(run)
    summary["layer_selection"]["learned"] |= broken
    (run / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(UserError, match="results are damaged") as caught:
        write_report(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("words", "message"), [
    (["objective.limit=1"], "objective.groups: 2 groups of layers have 4 configurations"),
    (["objective.groups=[3]"], "there are 2 layers: extractor.block1.0, extractor.block2.0"),
    (["objective.mode='011'"], "objective.mode: '011' has 3 digits, but there are 2 groups of layers"),
    (["objective.learner={name: tf, rank: 3}"], "rank"),
    (["objective.search={name: sampled, part: 2}"], "objective.search.part: got 2.0, takes a number from 0.0 to 1.0"),
    (["network.norm=batch", "evaluation.statistics=running"], "takes recomputed or batch"),
    (["baselines=[everything]"], "got 'everything', takes learned, all, none"),
])  # fmt: skip
def test_bad_input_is_reported_before_anything_is_written(
    fedloom: Command, tmp_path: Path, words: list[str], message: str
) -> None:
    refused(fedloom("run", "layer_selection", *SMALL, f"run.root={tmp_path}", *words), message)
    assert not list(tmp_path.iterdir())


def test_a_configuration_may_be_given_on_the_command_line(fedloom: Command, tmp_path: Path) -> None:
    words = [*SMALL, f"run.root={tmp_path}", "objective.mode='01'", "training.steps=1", "rounds=1"]
    said = fedloom("run", "layer_selection", *words)
    assert said.code == 0, said.err
    [one] = selections(summary_of(tmp_path / "layer_selection"))
    assert one.method == "01" and {site.configuration for site in one.sites} == {"01"}
    assert "Layer selection" in said.out
    assert not (tmp_path / "layer_selection" / "plots" / "layers.png").exists()
