"""Tables, pictures and report.html, on real files."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedloom.conf.errors import UserError
from fedloom.sims.report.canvas import save
from fedloom.sims.report.curves import accuracy_figure
from fedloom.sims.report.forgetting import Forgotten, by_round, forgetting_table
from fedloom.sims.report.headline import headline
from fedloom.sims.report.page import Details, Picture, write_page
from fedloom.sims.report.plots import draw_all, forgetting_figure, sites_figure
from fedloom.sims.report.report import write_report
from fedloom.sims.report.results import accuracy_table
from fedloom.sims.report.sites import classes_figure, classes_table, spread_figure
from fedloom.sims.report.tables import Table
from tests.sims.pages import checked
from tests.sims.report_runs import results, write_run

HOSTILE = '<img src="http://evil.example/x.png"> $x^$ | & _a_'


@pytest.mark.parametrize(
    ("sites", "names"),
    [(1, ["digits"]), (2, ["digits", "mnist"]), (9, [f"domain {i}" for i in range(9)]), (45, ["a", "b", HOSTILE])],
)
def test_report_is_self_contained(tmp_path: Path, sites: int, names: list[str]) -> None:
    folder = write_run(tmp_path / "run", *results(sites, names))
    page = checked(write_report(folder))
    assert len(page.pictures()) + page.tags.count("svg") == 3 and page.tags.count("svg") == (1 < len(names) < 9)
    drawn = {path.name for path in (folder / "plots").iterdir()}
    assert drawn == {"accuracy.png", "accuracy.svg", "forgetting.png", "sites.png"}
    assert "ab" * 32 in page.text
    assert "note: <b>bold</b>" in page.text
    assert "leaves, bit for bit, the sum that never had it" in " ".join(page.text.split())
    assert "What subtraction does not guarantee" in page.text
    assert all(name in page.text for name in names)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_the_run_table_lists_start_up_and_memory_where_the_run_does(tmp_path: Path) -> None:
    metrics, summary = results(2, ["a", "b"])
    newer = {**summary, "resources": {"start_up": 2.25, "peak_memory": 1_234_000_000}}
    page, old = (write_report(write_run(tmp_path / name, metrics, one)).read_text()
                 for name, one in (("new", newer), ("old", summary)))  # fmt: skip
    assert "of these, start-up" in page and "2.2" in page and "1234" in page
    assert "start-up" not in old and "peak memory" not in old
    assert re.search(r"seconds of the rounds</t.>\s*<td[^>]*>6\.0<", page), (
        "three rounds of two seconds, as `fedloom compare` counts"
    )


def test_report_can_be_written_again(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", *results(2, ["a", "b"]))
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_report_without_forgetting(tmp_path: Path) -> None:
    metrics, summary = results(2, ["a", "b"])
    del summary["forgotten"], summary["checks"]
    summary["accuracy"] = {"fedavg": summary["accuracy"]["sum"]}
    page = checked(write_report(write_run(tmp_path / "run", metrics, summary)))
    assert len(page.pictures()) == page.tags.count("svg") == 1
    assert "bit-identical" not in page.text
    assert "80.0%" in page.text


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_report_of_an_interrupted_run(tmp_path: Path, rounds: int) -> None:
    metrics, summary = results(2, ["a", "b"])
    kept = {"experiment", "method", "seed", "rounds", "engine", "seconds", "sites"}
    summary = {key: summary[key] for key in kept} | {"status": "interrupted"}
    metrics[0].pop("accuracy")
    page = checked(write_report(write_run(tmp_path / "run", metrics[:rounds], summary)))
    assert f"interrupted after round {rounds} of 3: test accuracy was not measured" in page.text
    assert page.tags.count("svg") == (1 if rounds == 2 else 0)


def test_report_lists_dropped_replies_and_failed_checks(tmp_path: Path) -> None:
    metrics, summary = results(2, ["a", "b"])
    metrics[1]["dropped"] = {"site-0001": "not finite <here>"}
    summary["checks"]["subtraction_exact"] = False
    page = checked(write_report(write_run(tmp_path / "run", metrics, summary)))
    assert "not finite <here>" in page.text
    assert "Warning: a check FAILED: subtraction exact" in page.text
    assert "bit-identical" not in page.text
    assert "What subtraction does not guarantee" in page.text


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl", "summary.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    folder = write_run(tmp_path / "run", *results(2, ["a", "b"]))
    (folder / name).unlink()
    cure = "name the folder of a run" if name == "config.yaml" else f"`fedloom resume {re.escape(str(folder))}` continues"
    with pytest.raises(UserError, match=rf"{re.escape(name)}: missing; {cure}"):
        write_report(folder)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("summary.json", b"{", "summary.json: damaged JSON"),
        ("summary.json", b"[]", "summary.json: is not a JSON object"),
        ("summary.json", b"{}", "'experiment' is missing"),
        ("summary.json", b"\xff", "not UTF-8"),
        ("metrics.jsonl", b'{"round": 1}\n{"rou', "metrics.jsonl line 2: damaged JSON"),
        ("summary.json", b"[" * 100_000, "summary.json: damaged JSON"),
        ("metrics.jsonl", b'{"accuracy": {"a": 1}}\n', "results are damaged"),
        ("metrics.jsonl", b'{"round": 1, "accuracy": 3}\n', "results are damaged"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    folder = write_run(tmp_path / "run", *results(2, ["a", "b"]))
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        write_report(folder)
    assert "\n" not in str(caught.value) and "again" in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("sites", [1e308]), ("accuracy", {"sum": []})])
def test_results_that_are_none_are_reported(tmp_path: Path, key: str, value: Any) -> None:
    metrics, summary = results(2, ["a", "b"])
    folder = write_run(tmp_path / "run", metrics, {**summary, key: value})
    with pytest.raises(UserError, match="the run's results are damaged"):
        write_report(folder)


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such run folder; name the folder of a run"):
        write_report(tmp_path / "nowhere")


def test_pages_for_other_reports(tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    Image.new("RGB", (300, 300)).save(picture)
    parts = [HOSTILE, Table("t", ["a"], [[HOSTILE]]), Picture(picture, HOSTILE), Details(HOSTILE, HOSTILE + "\n\0x")]
    page = checked(write_page(tmp_path / "page.html", HOSTILE, [(HOSTILE, parts), ("", ["last"])]))
    assert page.text.count(HOSTILE) == 8
    with pytest.raises(UserError, match=r"gone\.png: the picture cannot be read"):
        write_page(tmp_path / "page.html", "t", [("", [Picture(tmp_path / "gone.png", "")])])
    with pytest.raises(UserError, match="cannot be written"):
        write_page(tmp_path / "no" / "page.html", "t", [])


def test_headline_means_over_sites_that_hold_a_domain_alone() -> None:
    metrics, summary = results(2, ["a", "b"])
    lines = headline(summary, metrics)
    assert "its own domain goes from 80.0% to 10.0%" in lines
    assert "retained domains goes from 80.0% to 75.0%" in lines
    assert "80.0% test accuracy on the union" in lines
    metrics, summary = results(4, ["a", "b"])
    assert "also held by another site" in headline(summary, metrics)


def test_plots_draw_only_what_there_is(tmp_path: Path) -> None:
    metrics, summary = results(3, ["a", "b", "c"])
    drawn = draw_all(tmp_path, metrics, summary)
    assert [path.name for path in drawn] == ["accuracy.png", "forgetting.png", "sites.png"]
    assert draw_all(tmp_path, [], {}) == []
    metrics[2]["accuracy"] = {"union": float("nan"), "new": 0.5}
    metrics[0]["accuracy"] |= {f"never {i}": float("nan") for i in range(9)}
    summary["accuracy"]["sum"].pop("b")
    assert len(draw_all(tmp_path, metrics, summary)) == 3
    assert len(draw_all(tmp_path, [{"round": 1, "accuracy": {"union": float("nan")}}], summary)) == 3
    assert sites_figure({"accuracy": {"fedavg": {"union": 0.5}}}) is None  # a heat map of one number shows nothing


def test_the_curve_is_marked_where_a_site_was_forgotten_before_further_rounds(tmp_path: Path) -> None:
    metrics, _ = results(3, ["a", "b", "c"])
    last = metrics[-1]["round"]
    found = by_round(
        [Forgotten("b", round=last - 1), Forgotten("$c_1$", round=last - 1), Forgotten("d", round=last), Forgotten("e")]
    )
    assert found == {last - 1: "b, $c_1$", last: "d"}
    figure = accuracy_figure(metrics, forgotten=found)
    assert figure is not None
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts if text.get_text().startswith("without")] == ["without b, $c_1$"]
    save(figure, tmp_path / "accuracy.png")


def test_plots_leave_the_global_state_alone(tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    draw_all(tmp_path, *results(8, ["a", "b"]))
    assert dict(mpl.rcParams) == before


def test_a_single_domain_is_shown_once(tmp_path: Path) -> None:
    metrics, summary = results(3, ["shapes"])
    assert accuracy_table(summary).columns == ["network", "shapes"] and "union" not in accuracy_table(summary).note
    table = forgetting_table(summary)
    assert list(table.columns) == ["site", "domain", "whole domain", "also held by"]
    assert list(table.rows[0]) == ["site-0000", "shapes", "80.0% → 80.0%", "2 other sites"]
    dots, grid, curves = forgetting_figure(summary), sites_figure(summary), accuracy_figure(metrics, {"fedavg": metrics})
    assert dots is not None and grid is not None and curves is not None
    assert ticks(dots.axes[0].yaxis) == ticks(grid.axes[0].xaxis) == ["shapes"]
    assert [text.get_text() for text in dots.legends[0].get_texts()] == ["before", "after", "the forgotten site's domain"]
    assert len(curves.axes[0].lines) == 2 and "union" not in curves.axes[0].get_xlabel()
    page = write_report(write_run(tmp_path / "run", metrics, summary)).read_text()
    assert "union" not in page and "80.0% test accuracy on shapes" in page and "should fall" not in page
    assert "shapes, which other sites also hold, goes from 80.0% to 80.0%" in page


def ticks(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


@given(st.text(min_size=1))
def test_classes_have_their_names_in_tables_and_pictures_safely(name: str) -> None:
    counts = {"0": [3, 4], "1": [1, 4], "2": [2, 4]}
    one = {"sites": {site: {"accuracy": 0.5, "images": 6} for site in ("x", "y")}, "classes": counts}
    summary = {"aggregate": "sum", "sites": [{"name": "x", "domain": "d"}, {"name": "y", "domain": "d"}],
               "accuracy": {"sum": {"d": 0.5, "union": 0.5}}, "per_site": {"aggregate": one},
               "classes": {"x": {"0": 3, "1": 4}, "y": {"2": 5}},
               "class_names": {"0": "a long folder's name " * 9 + "end", "1": name}}  # fmt: skip
    [table] = classes_table(summary)
    assert list(table.columns) == ["class", "name", "sum"]
    assert [row[0] for row in table.rows] == ["0", "1", "2"] and table.rows[2][1] == "-"
    assert all(len(str(row[1])) <= 60 for row in table.rows) and str(table.rows[0][1]).endswith("end")
    unnamed = {**summary, "class_names": {}}
    assert list(classes_table(unnamed)[0].columns) == ["class", "sum"]
    for draw, place in ((classes_figure, 0), (spread_figure, 1)):
        figure, plain = draw(summary), draw(unnamed)
        assert figure is not None and plain is not None
        named = ticks(figure.axes[place].xaxis)
        assert named[0].startswith("a long f") and len(named[0]) <= 18 and named[2] == "2" and len(named) == 3
        assert "a long" not in "".join(ticks(plain.axes[place].xaxis))


@pytest.mark.parametrize("number, labels", [(12, "site-0011"), (13, "")])
def test_a_picture_of_few_sites_names_each(number: int, labels: str) -> None:
    sites = {f"site-{place:04d}": {"accuracy": place / number, "images": 6} for place in range(number)}
    summary = {"aggregate": "sum", "sites": [{"name": name, "domain": "d"} for name in sites],
               "accuracy": {"sum": {"d": 0.5}}, "per_site": {"aggregate": {"sites": sites, "classes": {}}}}  # fmt: skip
    figure = spread_figure(summary)
    assert figure is not None
    left = figure.axes[0]
    assert (labels in ticks(left.xaxis)) == bool(labels) and left.get_xlabel() == ("" if labels else "share of sites")
    assert left.get_title(loc="left") == ("accuracy by site" if labels else "sites, in ascending order")


def test_names_of_classes_that_look_like_formulas_are_drawn(tmp_path: Path) -> None:
    summary = {"sites": [1, 2], "classes": {"x": {"0": 3}, "y": {"1": 5}}, "class_names": {"0": HOSTILE, "1": "$x^$"}}
    figure = classes_figure(summary)
    assert figure is not None
    figure.savefig(tmp_path / "classes.png")
