"""Runs beside each other: the statistics, rows, notes, and the page."""

import csv
import json
import math
import shutil
from pathlib import Path

import numpy
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as some
from scipy.stats import ttest_rel

from fedloom import compare, sweep
from fedloom.conf.errors import UserError
from fedloom.conf.metrics import facts_of
from fedloom.sims.comparison.statistics import paired
from fedloom.sims.comparison.tables import Pair, amount, difference_table
from fedloom.sims.report.spread import spread
from tests.sims.commands import SMALL, Command, last_line, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")

SHARES = some.floats(0, 1, allow_subnormal=False)
BY_SEED = some.dictionaries(some.integers(0, 9), SHARES, min_size=2)
PAIRS = some.dictionaries(some.integers(0, 30), some.tuples(SHARES, SHARES), min_size=2, max_size=15)


@given(some.lists(SHARES, min_size=2, max_size=20))
def test_spread_is_numpys_mean_and_deviation_of_a_sample(values: list[float]):
    found = spread(values)
    assert found.n == len(values)
    assert found.mean == pytest.approx(numpy.mean(values), abs=1e-12)
    assert found.deviation == pytest.approx(numpy.std(values, ddof=1), abs=1e-12)


def test_one_value_has_no_deviation_and_one_pair_no_interval():
    alone, two = spread([0.5]), spread([0.5, 0.7])
    assert math.isnan(alone.deviation) and alone.bar == 0.0 and two.bar == two.deviation
    assert (alone.text(2), two.text(1), two.text(3)) == ("0.50", "0.6 ± 0.1", "0.600 ± 0.141")
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
        assert (found.low, found.high) == pytest.approx((-back.high, -back.low), abs=1e-12, nan_ok=True)


def test_pairs_that_all_differ_alike_have_no_interval():
    found = paired({0: 0.5, 1: 0.6, 2: 0.9}, {0: 0.4, 1: 0.5, 2: 0.8})
    assert found is not None and found.mean == pytest.approx(0.1) and math.isnan(found.low) and math.isnan(found.high)
    varied = paired({0: 0.1, 1: 0.3}, {0: 0.2, 1: 0.5})
    assert varied is not None
    equal, clear = (Pair("a", "b", each, facts_of("accuracy")) for each in (found, varied))
    assert difference_table([equal, clear]).note.endswith(
        "there is one seed, or the difference is the same with every seed."
    )
    assert "Without an interval" not in difference_table([clear]).note


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two rates with two seeds each, a baseline beside each run; no test changes them."""
    root = tmp_path_factory.mktemp("swept")
    words = [*SMALL, "rounds=2", "baselines=[fedavg]", "evaluation.sites=0", f"run.root={root}"]
    sweep("digits", *words, seeds=[0, 1], over={"training.rate": [0.01, 0.1]})
    return root


def test_rows_are_what_differs_apart_from_the_seed(swept: Path):
    found = compare(swept)
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
        peaks = [entry.summary["resources"]["peak_memory"] for entry in group.entries if not entry.baseline]
        assert row["peak_memory"] == pytest.approx(numpy.mean(peaks) if peaks else math.nan, nan_ok=True)
    one, other = (runs[runs["row"] == label].set_index("seed")["union"] for label in labels[:2])
    first = found.differences[0]
    assert (first.one, first.other, first.difference.n) == (labels[1], labels[0], 2)
    assert first.difference.mean == pytest.approx((other - one).mean())


def test_rows_by_a_key_are_means_over_what_else_differs(swept: Path):
    found = compare(swept, by="objective.mode")
    assert [(group.label, len(group.entries)) for group in found.groups] == [
        ("mode=exact", 4),
        ("mode=fedavg (baseline)", 4),
    ]
    assert found.notes == ("Rows are means over runs that also differ in training.rate",)
    runs = found.runs()
    exact = runs[runs["row"] == "mode=exact"]
    assert found.groups[0].scores() == pytest.approx({seed: exact[exact["seed"] == seed]["union"].mean() for seed in (0, 1)})
    with pytest.raises(UserError, match=r"unknown key 'objective.mod'; did you mean 'objective.mode'"):
        compare(swept, by="objective.mod")
    with pytest.raises(UserError, match=r"unknown key 'strategy.nam'; did you mean 'strategy.name'"):
        compare(swept, by="strategy.nam")


def test_the_command_writes_a_page_a_table_and_json(fedloom: Command, swept: Path, tmp_path: Path):
    said = fedloom("compare", swept, "--html", tmp_path / "page.html", "--csv", tmp_path / "runs.csv", "--json")
    assert said.code == 0, said.err
    found = last_line(said)
    assert [row["row"] for row in found["rows"]] == [group.label for group in compare(swept).groups]
    assert len(found["runs"]) == 8 and len(found["differences"]) == 6 and not found["notes"]
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 1 and "://" not in page and "Student" in page
    assert all(f">{row['row']}<" in page for row in found["rows"])
    with (tmp_path / "runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["union"]) for row in rows] == [run["union"] for run in found["runs"]]
    assert {row["training.rate"] for row in rows} == {"0.01", "0.1"}
    assert list(tmp_path.iterdir()) != [] and {path.name for path in tmp_path.iterdir()} == {
        "page.html",
        "runs.csv",
        "compared.json",
    }
    assert "| mode=exact, rate=0.01 |" in fedloom("compare", swept).out


def test_tables_and_curves_in_files(fedloom: Command, swept: Path, tmp_path: Path):
    files = {"--markdown": tmp_path / "tables.md", "--latex": tmp_path / "tables.tex", "--pictures": tmp_path / "pictures"}
    said = fedloom("compare", swept, *(word for pair in files.items() for word in pair))
    assert said.code == 0, said.err
    tables = compare(swept).tables()
    assert files["--markdown"].read_text() == "\n".join(table.markdown() for table in tables)
    latex = files["--latex"].read_text()
    assert latex.count(r"\begin{tabular}") == len(tables) and r"$\pm$" in latex and "±" not in latex and "95\\%" in latex
    assert all(f"written: {files['--pictures'] / 'rounds'}.{kind}" in said.out for kind in ("png", "svg", "pdf"))
    assert {path.name for path in files["--pictures"].iterdir()} == {"rounds.png", "rounds.svg", "rounds.pdf"}
    refused(fedloom("compare", swept, "--latex", tmp_path / "nowhere" / "a.tex"), "cannot be written")


def test_of_one_seed_nothing_is_judged(fedloom: Command, swept: Path, tmp_path: Path):
    said = fedloom("compare", *swept.glob("*-seed=0"), "--html", tmp_path / "page.html")
    message = "One seed cannot show whether a difference is more than chance"
    assert said.code == 0 and message in said.out and message in (tmp_path / "page.html").read_text()
    assert message not in fedloom("compare", swept).out


def test_rows_with_different_seeds_are_not_compared_by_their_means(fedloom: Command, swept: Path):
    first, second = sorted(swept.glob("*rate=0.01-*")), sorted(swept.glob("*rate=0.1-*"))
    note = "The rows have different seeds: compare them by paired differences, over common seeds."
    assert note in fedloom("compare", *first, second[0]).out
    apart = fedloom("compare", first[0], second[1]).out
    assert note in apart and "rate=0.1 minus mode=exact, rate=0.01" not in apart
    assert note not in fedloom("compare", swept).out


def test_the_page_says_that_a_process_with_several_runs_has_one_memory(fedloom: Command, swept: Path):
    assert "and what earlier runs of its process left." in fedloom("compare", swept).out


def test_what_cannot_be_compared_is_reported(fedloom: Command, swept: Path, run: Path):
    other = run.with_name("other")
    shutil.copytree(run, other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("test_limit: 60", "test_limit: 50"))
    half = run.with_name("half")
    shutil.copytree(run, half)
    (half / "summary.json").unlink()
    said = fedloom("compare", swept, run, other, half)
    assert said.code == 0
    assert f"note: {other}: left out, because its test examples differ (data.test_limit)" in said.out
    assert f"note: {half}: left out, because it is stopped" in said.out
    failed = json.loads((run / "summary.json").read_text()) | {"status": "failed"}
    (half / "summary.json").write_text(json.dumps(failed))
    assert f"note: {half}: left out, because it failed; finish it with" in fedloom("compare", swept, half).out
    (half / "summary.json").unlink()
    refused(fedloom("compare", half), "no finished run", "is stopped")
    refused(fedloom("compare", swept, other, "--by", "mode"), "--by: unknown key 'mode'", f"note: {other}: left out")
    refused(fedloom("compare", run / "plots"), "contains no run")
    refused(fedloom("compare", swept, "--html", run / "nowhere" / "page.html"), "cannot be written")
    refused(fedloom("compare", swept, "--csv", run / "nowhere" / "runs.csv"), "cannot be written")


def test_the_same_run_twice_counts_once(fedloom: Command, run: Path):
    again = run.with_name("again")
    shutil.copytree(run, again)
    found = last_line(fedloom("compare", run, again, run, "--json"))
    assert [row["runs"] for row in found["rows"]] == [1]
    assert found["rows"][0]["row"] == "sum_aggregation/exact" and found["rows"][0]["union std"] is None
    assert found["notes"] == [f"{again}: left out, because {run} has the same configuration and seed"]


def test_runs_that_share_no_measured_round_have_no_curve(fedloom: Command, swept: Path, run: Path, tmp_path: Path):
    other, page = run.with_name("other"), tmp_path / "page.html"
    shutil.copytree(run, other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("rate: ", "rate: 1"))
    for place, left in ((run, 1), (other, 2)):
        lines = (place / "metrics.jsonl").read_text().splitlines()
        records = [{**json.loads(line), "accuracy": None} for line in lines]
        records[left - 1] = json.loads(lines[left - 1])
        (place / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    said = fedloom("compare", run, other, "--by", "strategy.name", "--html", page)
    note = "strategy=sum_aggregation: has no curve, because no round was measured in all its runs"
    assert said.code == 0 and f"note: {note}" in said.out
    assert note in page.read_text() and "<svg" not in page.read_text()
    assert note in (found := compare([run, other], by="strategy.name")).table().attrs["notes"]
    assert note in found._repr_html_()
    refused(fedloom("compare", run, "--html", "/"), "/: is a folder")
    refused(fedloom("compare", run, "--html", tmp_path), "is a folder")


ODD = [
    ("summary.json", '"accuracy": 5', "accuracy must be a table of accuracies by network and domain"),
    ("summary.json", '"accuracy": "x"', "accuracy must be a table"),
    ("summary.json", '"accuracy": {"a": [1]}', "accuracy must be a table"),
    ("summary.json", '"unlearned": 5', "unlearned must be a list of names"),
    ("metrics.jsonl", '"bytes": 5', "round 9: bytes must be a table of pairs"),
    ("metrics.jsonl", '"bytes": {"a": 1}', "round 9: bytes must be a table of pairs"),
    ("metrics.jsonl", '"seconds": "z"', "round 9: seconds must be a number"),
    ("metrics.jsonl", '"accuracy": [1]', "round 9: accuracy must be a table"),
    ("metrics.jsonl", '"accuracy": {"union": "x"}', "round 9: accuracy must be a table"),
]


@pytest.mark.parametrize(("name", "text", "message"), ODD)
def test_an_odd_file_leaves_out_its_run_alone(
    fedloom: Command, swept: Path, tmp_path: Path, name: str, text: str, message: str
):
    odd = tmp_path / "odd"
    odd.mkdir()
    shutil.copy(next(swept.iterdir()) / "config.yaml", odd)
    (odd / "summary.json").write_text('{"status": "finished"}')
    (odd / "metrics.jsonl").write_text('{"round": 9}')
    (odd / name).write_text(f"{(odd / name).read_text()[:-1]}, {text}}}")
    where = f"{odd}: {name}: {message}"
    said = fedloom("compare", swept, odd)
    assert said.code == 0 and f"note: {where}" in said.out and said.out.count("; left out") == 1
    refused(fedloom("compare", odd), where)
    listed = fedloom("runs", odd)
    assert listed.code == 0 and f"note: {where}" in listed.out and f"| {odd} | finished |" in listed.out


@pytest.mark.parametrize(
    ("text", "message"), [("novelty: 3\n", "unknown key 'novelty'"), ("version: 99\n", "version: got 99")]
)
def test_a_configuration_of_elsewhere_leaves_out_its_run_alone(fedloom: Command, run: Path, text: str, message: str):
    odd = run.with_name("odd")
    shutil.copytree(run, odd)
    kept = [line for line in (odd / "config.yaml").read_text().splitlines(keepends=True) if not line.startswith("version")]
    (odd / "config.yaml").write_text("".join([text, *kept]))
    found = last_line(fedloom("compare", run, odd, "--json"))
    assert len(found["runs"]) == 1 and len(found["notes"]) == 1
    assert found["notes"][0].startswith(f"{odd / 'config.yaml'}: {message}") and found["notes"][0].endswith("; left out")
    refused(fedloom("compare", odd), message)


def test_a_configuration_with_a_name_alone_is_listed(fedloom: Command, run: Path):
    tree = yaml.safe_load((run / "config.yaml").read_text()) | {"objective": "foo", "strategy": "bar"}
    (run / "config.yaml").write_text(yaml.safe_dump(tree))
    (run / "summary.json").unlink()
    assert [one["method"] for one in last_line(fedloom("runs", run, "--json"))["runs"]] == ["bar"]


def test_rounds_that_metrics_lack_are_reported(fedloom: Command, run: Path):
    assert not last_line(fedloom("compare", run, "--json"))["notes"]
    metrics = run / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    message = "{}: metrics.jsonl has {} of 2 rounds; cost and curve cover only these"
    assert last_line(fedloom("compare", run, "--json"))["notes"] == [message.format(run, 1)]
    metrics.unlink()
    assert last_line(fedloom("compare", run, "--json"))["notes"] == [message.format(run, 0)]


def test_other_training_data_are_reported(fedloom: Command, run: Path):
    other = run.with_name("other")
    shutil.copytree(run, other)
    text = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(text.replace("samples: 40", "samples: 30"))
    found = last_line(fedloom("compare", run, other, "--json"))
    assert len(found["rows"]) == 2
    assert found["notes"] == ["The rows have different training data: sites"]


@pytest.mark.parametrize(
    ("values", "shown"),
    [([509.4, 1285.2], "897 ± 550"), ([0.0867, 0.0267], "0.057 ± 0.042"), ([897.34], "897.3"), ([123456.7], "123457")],
)
def test_an_amount_is_as_exact_as_its_deviation_and_has_no_exponent(values: list[float], shown: str):
    assert amount(spread(values), 1.0) == shown


def test_an_option_at_its_default_is_the_same_whether_set_or_not(fedloom: Command, run: Path):
    other = run.with_name("other")
    shutil.copytree(run, other)
    tree = yaml.safe_load((other / "config.yaml").read_text())
    tree["objective"], tree["seed"] = {"name": tree["objective"]["name"]}, 7
    (other / "config.yaml").write_text(yaml.safe_dump(tree))
    found = last_line(fedloom("compare", run, other, "--json"))
    assert [(row["row"], row["runs"]) for row in found["rows"]] == [("sum_aggregation/exact", 2)]


def test_rows_are_named_by_their_strategy_first(fedloom: Command, run: Path):
    other = run.with_name("other")
    shutil.copytree(run, other)
    tree = yaml.safe_load((other / "config.yaml").read_text()) | {
        "objective": {"name": "fedavg"},
        "strategy": {"name": "fedavg"},
    }
    (other / "config.yaml").write_text(yaml.safe_dump(tree))
    found = last_line(fedloom("compare", run, other, "--json"))
    assert [row["row"] for row in found["rows"]] == ["strategy=sum_aggregation", "strategy=fedavg"]


def test_a_notebook_shows_tables_and_curves(swept: Path):
    page = compare(swept)
    assert "rate=0.01" in page._repr_html_() and 'src="data:image/png;base64,' in page._repr_html_()
    assert page.html.startswith("<!DOCTYPE html>")
