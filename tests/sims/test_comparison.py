"""Runs beside each other: the statistics, what is a row, what is told, and the page."""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as some
from scipy.stats import ttest_rel

import sims
from conf.errors import UserError
from sims.comparison.statistics import paired, spread
from tests.sims.commands import SMALL, Command, last_line, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")

SHARES = some.floats(0, 1, allow_subnormal=False)
BY_SEED = some.dictionaries(some.integers(0, 9), SHARES, min_size=2)
PAIRS = some.dictionaries(some.integers(0, 30), some.tuples(SHARES, SHARES), min_size=2, max_size=15)
PNG = 'src="data:image/png;base64,'


@given(some.lists(SHARES, min_size=2, max_size=20))
def test_spread_is_numpys_mean_and_deviation_of_a_sample(values: list[float]):
    found = spread(values)
    assert found.n == len(values)
    assert found.mean == pytest.approx(numpy.mean(values), abs=1e-12)
    assert found.deviation == pytest.approx(numpy.std(values, ddof=1), abs=1e-12)


def test_one_value_has_no_deviation_and_one_pair_no_interval():
    assert math.isnan(spread([0.5]).deviation)
    found = paired({3: 0.5}, {3: 0.25})
    assert found is not None and found.mean == 0.25 and math.isnan(found.low) and math.isnan(found.high)
    assert paired({0: 0.5}, {1: 0.5}) is None


@given(PAIRS, some.floats(0.5, 0.999))
def test_the_interval_is_that_of_the_paired_t_test(pairs: dict[int, tuple[float, float]], confidence: float):
    one, other = ({seed: both[place] for seed, both in pairs.items()} for place in (0, 1))
    differences = [both[0] - both[1] for both in pairs.values()]
    found = paired(one, other, confidence)
    assert found is not None and found.n == len(pairs)
    assert found.mean == pytest.approx(numpy.mean(differences), abs=1e-12)
    if numpy.std(differences) > 1e-6:
        theirs = ttest_rel(list(one.values()), list(other.values())).confidence_interval(confidence)
        assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high), rel=1e-6, abs=1e-9)


@given(BY_SEED, BY_SEED)
def test_pairs_are_of_the_seeds_that_both_have(one: dict[int, float], other: dict[int, float]):
    both = one.keys() & other.keys()
    found, back = paired(one, other), paired(other, one)
    if not both:
        assert found is None and back is None
        return
    assert found is not None and back is not None and found.n == len(both)
    assert found == paired({seed: one[seed] for seed in one if seed in both}, {**other, 77: 0.0})
    assert found.mean == pytest.approx(-back.mean, abs=1e-12)
    if found.n > 1:
        assert (found.low, found.high) == pytest.approx((-back.high, -back.low), abs=1e-12)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rates with two seeds each, a baseline beside each run; no test changes them."""
    root = tmp_path_factory.mktemp("swept")
    words = [*SMALL, "rounds=2", "baselines=[fedavg]", "evaluation.sites=0", f"run.root={root}"]
    sims.sweep("digits", *words, seeds=[0, 1], over={"training.rate": [0.01, 0.1]})
    return root


def test_rows_are_what_differs_apart_from_the_seed(swept: Path):
    found = sims.compare(swept)
    labels = [group.label for group in found.groups]
    assert labels == ["mode=exact, rate=0.01", "mode=fedavg, rate=0.01 (baseline)", "mode=exact, rate=0.1",
                      "mode=fedavg, rate=0.1 (baseline)"]  # fmt: skip
    assert list(found.table().index) == labels and found.notes == ()
    runs = found.runs()
    for group in found.groups:
        scores = [json.loads((entry.folder / "summary.json").read_text())["accuracy"] for entry in group.entries]
        unions = [next(iter(one.values()))["union"] for one in scores]
        row = found.table().loc[group.label]
        assert row["union mean"] == pytest.approx(numpy.mean(unions))
        assert row["union std"] == pytest.approx(numpy.std(unions, ddof=1))
        assert sorted(runs[runs["row"] == group.label]["union"]) == sorted(unions)
        assert row["bytes_to_sites"] > 0 and row["seconds"] > 0
    one, other = (runs[runs["row"] == label].set_index("seed")["union"] for label in labels[:2])
    first = found.differences[0]
    assert (first.one, first.other, first.difference.n) == (labels[1], labels[0], 2)
    assert first.difference.mean == pytest.approx((other - one).mean())


def test_rows_by_a_key_are_means_over_what_else_differs(swept: Path):
    found = sims.compare(swept, by="objective.mode")
    assert [(group.label, len(group.entries)) for group in found.groups] == [
        ("mode=exact", 4),
        ("mode=fedavg (baseline)", 4),
    ]
    assert found.notes == ("Rows are means over runs that differ in training.rate, too",)
    runs = found.runs()
    exact = runs[runs["row"] == "mode=exact"]
    assert found.groups[0].scores() == pytest.approx({seed: exact[exact["seed"] == seed]["union"].mean() for seed in (0, 1)})
    with pytest.raises(UserError, match=r"unknown key 'objective.mod'; did you mean 'objective.mode'"):
        sims.compare(swept, by="objective.mod")


def test_the_command_writes_a_page_a_table_and_json(fedloom: Command, swept: Path, tmp_path: Path):
    said = fedloom("compare", swept, "--html", tmp_path / "page.html", "--csv", tmp_path / "runs.csv", "--json")
    assert said.code == 0, said.err
    found = last_line(said)
    assert [row["row"] for row in found["rows"]] == [group.label for group in sims.compare(swept).groups]
    assert len(found["runs"]) == 8 and len(found["differences"]) == 6 and not found["notes"]
    page = (tmp_path / "page.html").read_text()
    assert page.count(PNG) == 1 and "http" not in page and "Student" in page
    assert all(f">{row['row']}<" in page for row in found["rows"])
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["union"]) for row in rows] == [run["union"] for run in found["runs"]]
    assert {row["training.rate"] for row in rows} == {"0.01", "0.1"}
    assert list(tmp_path.iterdir()) != [] and {path.name for path in tmp_path.iterdir()} == {"page.html", "runs.csv"}
    assert "| mode=exact, rate=0.01 |" in fedloom("compare", swept).out


def test_what_cannot_be_compared_is_told(fedloom: Command, swept: Path, run: Path):
    other = run.with_name("other")
    shutil.copytree(run, other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("test_limit: 60", "test_limit: 50"))
    half = run.with_name("half")
    shutil.copytree(run, half)
    (half / "summary.json").unlink()
    said = fedloom("compare", swept, run, other, half)
    assert said.code == 0
    assert f"note: {other}: was measured on other test images (data.test_limit), and is not compared" in said.out
    assert f"note: {half}: is stopped, and not compared" in said.out
    refused(fedloom("compare", half), "no finished run", "is stopped")
    refused(fedloom("compare", run / "plots"), "there is no run of fedloom in it")
    refused(fedloom("compare", swept, "--html", run / "nowhere" / "page.html"), "cannot be written")
    refused(fedloom("compare", swept, "--csv", run / "nowhere" / "runs.csv"), "cannot be written")


def test_the_same_run_twice_counts_once(fedloom: Command, run: Path):
    again = run.with_name("again")
    shutil.copytree(run, again)
    found = last_line(fedloom("compare", run, again, run, "--json"))
    assert [row["runs"] for row in found["rows"]] == [1]
    assert found["rows"][0]["row"] == "sum_aggregation/exact" and found["rows"][0]["union std"] is None
    assert found["notes"] == [f"{again}: has configuration and seed of {run}, which stands for both"]


def test_other_training_data_are_told(fedloom: Command, run: Path):
    other = run.with_name("other")
    shutil.copytree(run, other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("samples: 40", "samples: 30"))
    found = last_line(fedloom("compare", run, other, "--json"))
    assert len(found["rows"]) == 2
    assert found["notes"] == ["The rows were trained on different data: sites"]


def test_a_notebook_shows_tables_and_curves(swept: Path):
    page = sims.compare(swept)
    assert "rate=0.01" in page._repr_html_() and PNG in page._repr_html_()
    assert page.html.startswith("<!DOCTYPE html>")
