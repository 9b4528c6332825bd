"""The list of runs, and removing them."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedloom.clients.storage.states import write_bytes
from fedloom.conf.machine import size_of
from fedloom.server.run_folder.layout import CONFIG, METRICS, SUMMARY, TRACKERS, WRITTEN
from fedloom.server.run_folder.listing import busy, status
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.tracking import csv_files, mlflow, tensorboard, wandb
from fedloom.sims.tracking.base import TRACKERS as KINDS
from tests.sims.commands import ONE, SMALL, Command, last_line, refused

SERVER = "import sys, time; from pathlib import Path; from fedloom.server.ledger.database import acquire; " \
    "acquire(Path(sys.argv[1])); print(flush=True); time.sleep(60)"  # fmt: skip


@pytest.fixture
def served(run: Path):
    """A run that a server works on."""
    with subprocess.Popen([sys.executable, "-c", SERVER, str(run)], stdout=subprocess.PIPE) as server:
        assert server.stdout
        server.stdout.readline()
        yield run
        server.kill()


def test_tables_have_boxes_in_a_terminal_alone(fedloom: Command, run: Path, monkeypatch: pytest.MonkeyPatch):
    words = ["runs", run.parent], ["compare", run], ["requests", run]
    assert "| run | status | method |" in fedloom(*words[0]).out and "| :--- |" in fedloom(*words[1]).out
    unlearn(run, UnlearningRequest([ONE], "r1", without_data=True))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    for command in words:
        shown = fedloom(*command)
        assert shown.code == 0 and "┏" in shown.out and "| :--- |" not in shown.out


def test_runs_are_listed_as_they_stand(fedloom: Command, run: Path):
    root = run.parent
    for name, summary in {
        "stopped": None,
        "failed": '{"status": "failed"}',
        "interrupted": '{"status": "interrupted"}',
    }.items():
        shutil.copytree(run, root / "deeper" / name)
        (root / "deeper" / name / SUMMARY).unlink()
        if summary:
            (root / "deeper" / name / SUMMARY).write_text(summary)
    (root / "no-run").mkdir()
    found = {Path(one["run"]).name: one for one in last_line(fedloom("runs", root, "--json"))["runs"]}
    assert {name: one["status"] for name, one in found.items()} == {
        "digits": "finished", "stopped": "stopped", "failed": "failed", "interrupted": "interrupted"}  # fmt: skip
    one = found["digits"]
    assert (one["method"], one["seed"], one["round"], one["rounds"]) == ("sum_aggregation/exact", 0, 2, 2)
    assert 0 < one["test"] <= 1 and found["stopped"]["test"] is None and 0 < found["stopped"]["validation"] <= 1
    assert found["stopped"]["method"] == "sum_aggregation/exact"
    assert one["bytes"] == sum(path.lstat().st_size for path in run.rglob("*") if path.is_file())
    said = fedloom("runs", root)
    assert said.code == 0 and len([line for line in said.out.splitlines() if str(root) in line]) == 5
    refused(fedloom("runs", root / "nowhere"), "the folder does not exist")
    assert "no runs yet" in fedloom("runs", root / "no-run").out


def test_listing_and_its_help_need_no_torch(run: Path):
    code = f"import sys; sys.argv = ['fedloom', 'runs', {str(run)!r}]; from fedloom.sims.cli.main import _guarded; " \
        "assert _guarded() == 0; assert 'torch' not in sys.modules"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_run_that_is_worked_on_is_running_and_stays(fedloom: Command, served: Path):
    assert busy(served) and status(served) == "running"
    refused(fedloom("rm", served, "--yes"), "is working on it")
    assert (served / CONFIG).is_file()


def test_looking_changes_nothing(run: Path):
    (run / "ledger.lock").chmod(0o444)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert not busy(run) and status(run) == "finished" and not busy(run / "plots")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


def test_runs_are_removed_and_nothing_else(fedloom: Command, run: Path, tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    (run / "plots" / "link").symlink_to(outside)
    other = Path(shutil.copytree(run, tmp_path / "other", symlinks=True))
    size = size_of(run)
    said = fedloom("rm", run, other, "--yes")
    assert said.code == 0 and f"{2 * size / 1e6:.1f} MB" in said.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["outside"]
    assert (outside / "kept").read_text() == "kept"


def test_what_is_not_to_be_removed_is_refused_and_all_stays(fedloom: Command, run: Path, tmp_path: Path):
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / CONFIG).write_text("seed: 1")
    nested, baseline = run / "more" / "run", run / "baselines" / "fedavg"
    for odd, message in (
        (tmp_path / "link", "is a link"),
        (tmp_path / "other", "is not a run"),
        (tmp_path / "nowhere", f"does not exist; 'fedloom runs {tmp_path}' lists the runs there"),
    ):
        refused(fedloom("rm", run, odd, "--yes"), str(odd), message)
    baseline.mkdir(parents=True)
    shutil.copy(run / CONFIG, baseline)
    refused(fedloom("rm", baseline, "--yes"), "is part of the run")
    nested.mkdir(parents=True)
    shutil.copy(run / CONFIG, nested)
    refused(fedloom("rm", run, "--yes"), "contains another run", str(nested))
    assert (run / CONFIG).is_file() and (tmp_path / "link").is_symlink() and (tmp_path / "other" / CONFIG).is_file()


def test_a_list_of_runs_lists_forgotten_sites(fedloom: Command, run: Path):
    assert fedloom("unlearn", run, ONE, "--quiet").code == 0
    (row,) = last_line(fedloom("runs", run, "--json"))["runs"]
    assert row["forgotten"] == [ONE] and row["validation"] is None and row["test"] is not None
    assert "| finished, 1 site forgotten |" in fedloom("runs", run).out


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"thesis.txt": "precious"}, "has files that fedloom did not write (thesis.txt)"),
        ({"thesis.txt": "precious", METRICS: ""}, "has files that fedloom did not write (thesis.txt)"),
        ({".git": "precious", METRICS: ""}, "has files that fedloom did not write (.git)"),
        ({"states": "precious"}, "(without ledger.sqlite, metrics.jsonl, summary.json)"),
    ],
)
def test_a_configuration_makes_no_folder_a_run(fedloom: Command, run: Path, files: dict[str, str], message: str):
    place = run.with_name("proj")
    place.mkdir()
    for name, text in files.items():
        (place / name).write_text(text)
    shutil.copy(run / CONFIG, place)
    for words in (["rm", place, "--yes"],
                  ["run", "digits", *SMALL, f"run.root={run.parent}", "run.name=proj", "--overwrite"]):  # fmt: skip
        refused(fedloom(*words), "proj", message)
    assert {path.name for path in place.iterdir()} == {CONFIG, *files}


@pytest.mark.parametrize(
    "mine",
    [
        "states/mine.pt",
        "plots/thesis/figure.tex",
        "plots/mine.png",
        "tables/mine.csv",
        "certificates/letter.pdf",
        "baselines/notes.txt",
        "retrained/x/notes.txt",
    ],
)
def test_what_somebody_keeps_among_a_runs_files_keeps_the_run(fedloom: Command, run: Path, mine: str):
    (run / mine).parent.mkdir(parents=True, exist_ok=True)
    (run / mine).write_text("precious")
    message = "plots/thesis" if "thesis" in mine else mine
    refused(fedloom("rm", run, "--yes"), f"has files that fedloom did not write ({message})")
    refused(fedloom("run", "digits", *SMALL, f"run.root={run.parent}", f"run.name={run.name}", "--overwrite"), message)
    assert (run / mine).read_text() == "precious"


def test_a_run_that_was_only_begun_is_replaced_but_not_removed(fedloom: Command, run: Path):
    place = run.with_name("begun")
    write_bytes(place / CONFIG, (run / CONFIG).read_bytes())
    (place / f".{METRICS}-{'0' * 32}").write_text("torn")
    refused(fedloom("rm", place, "--yes"), "without ledger.sqlite")
    words = [*SMALL, "rounds=1", f"run.root={run.parent}", "run.name=begun", "--overwrite", "--quiet"]
    assert fedloom("run", "digits", *words).code == 0
    assert fedloom("rm", place, "--yes").code == 0 and not place.exists()


def test_all_that_a_run_writes_goes_with_it(fedloom: Command, run: Path):
    assert fedloom("unlearn", run, ONE, "--retrain", "--quiet").code == 0
    assert {path.name for path in run.iterdir()} < WRITTEN
    (run / ".report.html.new").write_text("torn")
    (part,) = (run / "retrained").iterdir()
    refused(fedloom("rm", part, "--yes"), "is part of the run")
    assert fedloom("rm", run, "--yes").code == 0 and not run.exists()


def test_folders_of_trackers_are_known():
    assert {one.FOLDER for one in (csv_files, mlflow, tensorboard, wandb)} == set(TRACKERS)
    assert sum(map(KINDS.shipped, KINDS.names())) == len(TRACKERS)


@pytest.mark.parametrize(("answer", "left"), [("y\n", False), ("n\n", True), ("\x04", True)])
def test_it_asks_first(fedloom: Command, run: Path, monkeypatch: pytest.MonkeyPatch, answer: str, left: bool):
    person, terminal = os.openpty()
    os.write(person, answer.encode())
    with os.fdopen(terminal) as given:
        monkeypatch.setattr("sys.stdin", given)
        said = fedloom("rm", run)
    os.close(person)
    assert said.code == (2 if answer == "\x04" else 0), said
    assert "Remove" in said.out and run.exists() == left


def test_where_no_one_can_be_asked_one_line_says_so(fedloom: Command, run: Path, monkeypatch: pytest.MonkeyPatch):
    with open(os.devnull) as given:
        monkeypatch.setattr("sys.stdin", given)
        said = fedloom("rm", run)
    refused(said, "stdin is not a terminal", "--yes")
    assert not said.out and run.exists()
