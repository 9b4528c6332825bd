"""The best values of a sweep by validation examples, and how many runs fit this machine."""

import dataclasses
from pathlib import Path
from statistics import mean

import pytest

from fedloom import sweep
from fedloom.conf import Config, load, machine
from fedloom.conf.errors import UserError
from fedloom.server.run_folder.metrics_file import read_metrics
from fedloom.sims.sweeps.plan import Planned
from fedloom.sims.sweeps.work import runs_at_once
from tests.sims.commands import SMALL, Command, last_line, refused

pytestmark = pytest.mark.usefixtures("blank_pictures")

QUICK = [*SMALL, "evaluation.sites=0", "rounds=2", "evaluation.metrics=[accuracy,calibration_error]"]
GRID = ["--sweep", "training.rate=0.001,0.2", "--seeds", "0,1"]


def last(folder: Path, metric: str) -> float:
    return list(read_metrics(folder).values())[-1]["scores"][metric]["union"]


def test_the_command_shows_validation_and_names_the_best(fedloom: Command, tmp_path: Path):
    words = ["run", "digits", *QUICK, f"run.root={tmp_path}", *GRID]
    said = fedloom(*words, "--best", "calibration_error", "--json")
    found = last_line(said)
    means = {rate: mean(last(tmp_path / f"digits-rate={rate}-seed={seed}", "calibration_error") for seed in (0, 1))
             for rate in (0.001, 0.2)}  # fmt: skip
    rate = min(means, key=lambda each: means[each])
    assert found["best"]["values"] == {"training.rate": rate} and found["best"]["value"] == pytest.approx(means[rate])
    assert [one["validation"] for one in found["runs"]] == [last(Path(one["run"]), "accuracy") for one in found["runs"]]
    again = fedloom(*words, "--best", "accuracy")
    assert "| run | status | validation accuracy | test accuracy |" in again.out
    assert "best by validation accuracy: rate=" in again.out and "(mean of 2 runs)" in again.out


def test_python_names_the_best_too(tmp_path: Path):
    results = sweep("digits", *QUICK, f"run.root={tmp_path}", over={"training.rate": [0.001, 0.2]}, parallel="auto")
    best = results.best()
    values = {run.config.training.rate: last(run.folder, "accuracy") for run in results}
    assert best.metric.name == "accuracy" and best.value == max(values.values())
    assert best.values == {"training.rate": max(values, key=lambda rate: values[rate])} and len(best.folders) == 1
    with pytest.raises(UserError, match="best: no run has validation values of 'auroc'"):
        results.best("auroc")


def test_the_best_network_counts_with_its_own_round(tmp_path: Path):
    words = ["evaluation.keep=best", "training.rate=0.3", "rounds=4"]
    results = sweep("digits", *QUICK, *words, f"run.root={tmp_path}", seeds=[0])
    assert results.best().value == results[0].summary["best"]["value"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--best", "accuracy"], "--best: needs several runs"),
        ([*GRID, "--best", "auroc"], "unknown metric in --best 'auroc'"),
        ([*GRID, "--best", "accuracy", "data.validation=0"], "--best: needs validation examples"),
        ([*GRID, "--parallel", "many"], "parallel: got 'many', takes a whole number of at least 1, or auto"),
        ([*GRID, "--parallel", "0"], "parallel: got '0'"),
    ],
)
def test_what_chooses_nothing_is_refused_before_anything_starts(fedloom: Command, tmp_path: Path, words, message: str):
    refused(fedloom("run", "digits", *QUICK, f"run.root={tmp_path}", *words), message)
    assert not list(tmp_path.iterdir())


def test_as_many_runs_as_fit(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "cores", lambda: 8)
    monkeypatch.setattr(machine, "memory", lambda: 100 * 2**30)

    def at_once(*words: str, runs: int = 20) -> int:
        config: Config = load("digits", list(words))
        return runs_at_once("auto", [Planned(dataclasses.replace(config, seed=seed), {}) for seed in range(runs)])

    assert [at_once("engine.name=inline"), at_once("engine.name=inline", runs=3)] == [8, 3]
    assert [at_once("engine.workers=3"), at_once(), at_once("engine.name=inline", "engine.threads=4")] == [2, 4, 2]
    assert at_once("engine.name=flower", "engine.address=federation") == at_once("engine.address=host:6379") == 1
    monkeypatch.setattr(machine, "memory", lambda: 5 * 2**30)
    assert at_once("engine.name=inline") == 2
    monkeypatch.setattr(machine, "memory", lambda: 2**30)
    assert at_once("engine.name=inline") == 1
