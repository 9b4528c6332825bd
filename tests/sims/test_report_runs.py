"""Reports of real runs: whose accuracy is the aggregate's, who was forgotten, and the baselines' curves."""

import csv
import json
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from fedloom import Result
from fedloom.conf import load
from fedloom.server.ledger import Ledger
from fedloom.server.rounds.view import Models, View
from fedloom.server.run_folder.layout import strange_in
from fedloom.server.strategies import STRATEGIES
from fedloom.server.strategies.sum_aggregation import SumAggregationStrategy
from fedloom.sims.operations.readmit import readmit
from fedloom.sims.operations.simulate import simulate
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.report.curves import accuracy_figure
from fedloom.sims.report.headline import headline
from fedloom.sims.report.report import write_report
from fedloom.sims.report.results import accuracies, aggregate
from fedloom.sims.report.tables import percent
from tests.sims.commands import Command, refused
from tests.sims.pages import checked

SMALL = ["sites=[{domain: digits, count: 3, samples: 40}]", "data.size=8", "data.test_limit=100", "rounds=2",
         "engine.name=inline", "network={name: mlp, widths: [16]}", "baselines=[fedavg,independent]"]  # fmt: skip


@STRATEGIES.register("novel")
@dataclass(frozen=True)
class NovelStrategy(SumAggregationStrategy):
    """A method whose aggregate has a name that no table knows."""

    def models(self, view: View) -> Models:
        found = super().models(view)
        return Models({"novel" if name == "sum" else name: partial(found.__getitem__, name) for name in found})


def run(root: Path, *words: str) -> Path:
    simulate(load("digits", [*SMALL, f"run.root={root}", *words]))
    return root / "digits"


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, which no test changes."""
    return run(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def folder(done: Path, tmp_path: Path) -> Path:
    return shutil.copytree(done, tmp_path / "runs" / "digits")


def test_pictures_and_tables_in_files(folder: Path, fedloom: Command) -> None:
    said = fedloom("report", folder, "--pictures", "svg,pdf", "--tables", "csv,md,tex")
    assert said.code == 0, said.err
    drawn = {path.name for path in (folder / "plots").iterdir()}
    assert drawn >= {f"{name}.{kind}" for name in ("accuracy", "sites", "forgetting") for kind in ("png", "svg", "pdf")}
    assert b"/FontFile2" in (folder / "plots" / "accuracy.pdf").read_bytes(), "TrueType, not outlines of Type 3"
    with (folder / "tables" / "test-accuracy.csv").open(newline="") as file:
        rows = {row["network"]: row["digits"] for row in csv.DictReader(file)}
    summary = json.loads((folder / "summary.json").read_text())
    assert rows["sum"] == percent(summary["accuracy"]["sum"]["digits"])
    assert (folder / "tables" / "sites.md").read_text().count("| digits |") == 3
    assert r"site-0000 & digits & 40 \\" in (folder / "tables" / "sites.tex").read_text()
    assert not strange_in(folder, {}), "fedloom knows its files"
    refused(fedloom("report", folder, "--pictures", "jpg"), "--pictures: got 'jpg', takes png, svg, pdf")


def test_curves_are_a_pandas_table(done: Path) -> None:
    curves = Result(done).curves()
    assert set(curves["network"]) == {"sum", "fedavg", "independent"}
    own = curves[(curves["network"] == "sum") & (curves["domain"] == "union")].set_index("round")["value"]
    assert own.to_dict() == {record["round"]: record["accuracy"]["union"] for record in Result(done).metrics}


def test_a_new_methods_accuracy_is_its_own_and_no_baselines(tmp_path: Path) -> None:
    folder = run(tmp_path, "strategy={name: novel}", "rounds=1")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["aggregate"] == aggregate(summary) == "novel"
    assert list(accuracies(summary))[:3] == ["novel", "fedavg", "independent"]
    summary["accuracy"]["fedavg"]["union"] = 0.999
    assert f"reaches {percent(summary['accuracy']['novel']['union'])} test accuracy" in headline(summary, [])
    del summary["aggregate"]  # as it was written before
    assert aggregate(summary) == "novel"


def test_the_report_says_who_was_forgotten_by_which_request_and_when(folder: Path) -> None:
    assert "forgotten on request" not in (folder / "report.html").read_text()
    unlearn(folder, UnlearningRequest(["site-0001"], "first", "asked"))
    with Ledger.open(folder, server=False) as ledger:
        (event,) = ledger.events("forgotten")
    page = checked(folder / "report.html")
    assert "site-0001 was forgotten on request" in page.text
    assert all(word in page.text for word in ("first", event.time[:10], event.time[11:19]))
    assert page.links == ["certificates/first.html"]
    assert (folder / page.links[0]).is_file()
    unlearn(folder, UnlearningRequest(["site-0002"], "second"))
    page = checked(folder / "report.html")
    assert "site-0001, site-0002 were forgotten on request" in page.text
    assert page.links == ["certificates/first.html", "certificates/second.html"]


def test_pictures_and_tables_with_a_forgotten_site_are_deleted_and_files_of_others_stay(folder: Path) -> None:
    write_report(folder, ["svg", "pdf"], ["csv"])
    before = {path: path.read_bytes() for name in ("plots", "tables") for path in (folder / name).iterdir()}
    assert any(b"site-0001" in content for content in before.values())
    own = ("plots/notes.txt", "plots/figure.png", "tables/mine.csv", "baselines/thesis.txt", "baselines/fedavg/mine.txt")
    mine = [folder / name for name in own]
    for path in mine:
        path.write_text("mine")
    unlearn(folder, UnlearningRequest(["site-0001", "site-0002"], "first"))
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)
    assert {path for path in (folder / "baselines").rglob("*") if path.is_file()} == set(mine[3:])
    assert not (folder / "plots" / "classes.png").exists(), "one site is left, so there is nothing to compare"
    for path, content in before.items():
        assert not path.exists() or path.read_bytes() != content, f"{path} is as before"
    erased = json.loads((folder / "certificates" / "first.json").read_text())["erased"]
    assert {"plots", "tables", "report.html"} <= set(erased)


def test_the_report_follows_the_ledger_and_does_without_it(folder: Path) -> None:
    unlearn(folder, UnlearningRequest(["site-0001"], "first"))
    (folder / "certificates" / "first.html").unlink()
    page = checked(write_report(folder))
    assert page.links == [] and "first" in page.text
    ledger = (folder / "ledger.sqlite").read_bytes()
    for content in (b"", b"rubbish" * 1000):
        (folder / "ledger.sqlite").write_bytes(content)
        assert "site-0001 was forgotten on request" in checked(write_report(folder)).text
    (folder / "ledger.sqlite").write_bytes(ledger)
    readmit(folder, ["site-0001"])
    assert "forgotten on request" not in checked(write_report(folder)).text


def test_the_accuracy_picture_has_the_baselines_curves(folder: Path) -> None:
    page = checked(write_report(folder))
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [json.loads(line) for line in lines]
    other = [{**record, "accuracy": {"digits": 0.1, "union": 0.3}} for record in metrics]
    figure = accuracy_figure(metrics, {"fedavg": other, "torn": []})
    assert figure is not None
    *own, baseline = figure.axes[0].get_lines()
    assert len(own) == 1 and {line.get_linestyle() for line in own} == {"-"}
    assert baseline.get_linestyle() == "--"
    assert list(baseline.get_xdata()) == [1, 2] and list(baseline.get_ydata()) == [0.3, 0.3]  # type: ignore[arg-type]
    assert "fedavg 30.0%" in [text.get_text() for text in figure.axes[0].texts]
    assert "ashed lines" in page.text
    with_baselines = (folder / "plots" / "accuracy.png").read_bytes()
    with (folder / "baselines" / "fedavg" / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "accu')  # a crash
    write_report(folder)
    assert (folder / "plots" / "accuracy.png").read_bytes() == with_baselines
    shutil.rmtree(folder / "baselines")
    assert "ashed lines" not in checked(write_report(folder)).text
    assert (folder / "plots" / "accuracy.png").read_bytes() != with_baselines
