"""Early stopping and the best network: what validation examples decide, and what a stop or a kill does not change."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fedloom import Result, resume
from fedloom import run as run_it
from fedloom.clients.storage.states import read_metadata, read_state
from fedloom.conf import Config, UserError
from fedloom.server.ledger.audit import check
from fedloom.server.run.checks import check as refuse
from fedloom.server.run_folder.folder import SUMMARY
from fedloom.sims.operations.run_list import rows_of, table
from tests.server import kills
from tests.server.parts import Recorder, folder
from tests.server.resumes import configured, metrics, results, resumed, run, stopped

TREE = {
    "sites": [{"domain": "digits", "samples": 40, "name": "clinic"}, {"domain": "digits", "samples": 40, "invert": True}],
    "rounds": 5,
    "data": {"size": 8, "test_limit": 60},
    "network": {"name": "mlp", "widths": [16]},
    "training": {"schedule": "constant"},
    "objective": {"name": "sum_aggregation"},
    "strategy": {"name": "sum_aggregation"},
    "engine": {"name": "inline"},
}
BOTH = ["evaluation.every=1", "evaluation.keep=best", "stopping={patience: 2, min_change: 0.02}", "rounds=6"]
WITHOUT_END = ["stopping={patience: 2, min_change: 1}", "evaluation.every=1"]  # no value is so much better


def summary(config: Config) -> dict[str, Any]:
    return json.loads((folder(config) / SUMMARY).read_text())


def test_a_run_stops_after_rounds_without_a_better_value(tmp_path: Path):
    listener = Recorder()
    run(config := configured(tmp_path, *WITHOUT_END, "baselines=[fedavg]"), listener)
    found, [first, *_] = summary(config), metrics(folder(config))
    assert [len(metrics(folder(config) / part)) for part in ("", "baselines/fedavg")] == [3, 3]
    assert (found["status"], found["rounds"], found["stopped"]["round"]) == ("finished", 4, 3)
    share = f"{100 * first['accuracy']['union']:.1f}%"
    message = f"the best validation accuracy is that of round 1 ({share}), 2 rounds ago (stopping.patience)"
    assert found["stopped"]["reason"] == message
    assert f"stopped after round 3: {message}" in listener.messages
    assert check(folder(config)) == []


def test_more_rounds_after_a_stop_are_trained_before_patience_counts_again(tmp_path: Path):
    run(config := configured(tmp_path, *WITHOUT_END))
    assert summary(config)["stopped"]["round"] == 3
    resume(folder(config), "rounds=9")
    found = summary(config)
    assert (len(metrics(folder(config))), found["stopped"]["round"]) == (5, 5)
    assert "4 rounds ago, and the run had more rounds from round 3 on" in found["stopped"]["reason"]


def test_a_smaller_value_is_better_where_the_metric_says_so_and_unmeasured_rounds_do_not_count(tmp_path: Path):
    words = ["evaluation.metrics=[accuracy,calibration_error]", "evaluation.every=2", "rounds=8", "training.rate=0.1"]
    metric = "stopping={metric: calibration_error, patience: 2, min_change: 0.01}"
    run(config := configured(tmp_path, *words, metric, "evaluation.keep=best"))
    values = {
        line["round"]: line["scores"]["calibration_error"]["union"] for line in metrics(folder(config)) if "scores" in line
    }
    best, at, end = 9.0, 0, 8
    for number, value in values.items():
        if value < best - 0.01:
            best, at = value, number
        elif number - at >= 2:
            end = number
            break
    assert len(metrics(folder(config))) == end
    chosen = min(values, key=lambda number: values[number])
    assert summary(config)["best"] == {"round": chosen, "metric": "calibration_error", "value": values[chosen]}


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_run_that_stopped_chooses_as_one_that_did_not(tmp_path: Path, undisturbed, after: int):
    config = stopped(configured(tmp_path, *BOTH), after)
    resumed(config)
    assert results(folder(config)) == undisturbed(*BOTH)
    assert "best.safetensors" in undisturbed(*BOTH)["states"]


@pytest.mark.parametrize("trap", [("states", 1), ("states", 2), ("after commit", 4), ("metrics", 2)])
def test_a_run_that_was_killed_chooses_as_one_that_was_not(tmp_path: Path, trap: tuple[str, int]):
    words = ["evaluation.keep=best", "stopping={patience: 2, min_change: 1}"]
    whole, killed = (kills.configured(tmp_path / name, *words) for name in ("whole", "killed"))
    run(whole)
    kills.die(killed, trap)
    resumed(killed)
    assert kills.results(folder(killed)) == kills.results(folder(whole))


def test_the_best_network_is_the_aggregate_of_its_round(tmp_path: Path):
    words = ["training.schedule=constant", "evaluation.every=1", "training.rate=0.2"]
    run(config := configured(tmp_path / "whole", *words, "evaluation.keep=best"))
    values = {line["round"]: line["accuracy"]["union"] for line in metrics(folder(config))}
    best = summary(config)["best"]
    assert best == {
        "round": max(values, key=lambda number: values[number]),
        "metric": "accuracy",
        "value": max(values.values()),
    }
    run(short := configured(tmp_path / "short", *words, f"rounds={best['round']}"))
    file = folder(config) / "states/best.safetensors"
    found, expected = read_state(file), read_state(folder(short) / "states/aggregate.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert read_metadata(file)["round"] == str(best["round"])
    assert summary(config)["accuracy"]["best"] == summary(short)["accuracy"]["sum"]


def test_what_is_meant_is_said_and_forgetting_deletes_the_best(tmp_path: Path):
    result = run_it(TREE, f"run.root={tmp_path}", "evaluation.keep=best")
    number = result.summary["best"]["round"]
    assert f"(best, round {number})" in table(rows_of(result.folder), result.folder).plain()
    assert f"network of round {number}, the best on validation examples" in result.report.read_text()
    assert "best" in result.networks
    result.unlearn("clinic")
    assert "best" not in result.networks and "best" not in result.summary and "best" not in result.accuracy
    assert check(result.folder) == []


def test_a_callback_stops_a_run_which_is_finished_then(tmp_path: Path):
    calls: list[int] = []

    def stop(record: dict[str, Any]) -> str:
        calls.append(record["round"])
        return "stop" if record["round"] == 2 else ""

    root = f"run.root={tmp_path}"
    result = run_it(TREE, root, "run.name=stopped", on_round=stop)
    assert (result.summary["status"], len(result.metrics), calls) == ("finished", 2, [1, 2])
    assert result.summary["stopped"] == {"round": 2, "reason": "on_round returned 'stop'"}
    assert resume(result.folder, on_round=stop).summary == result.summary and calls == [1, 2]
    two, five = (run_it(TREE, root, f"run.name=whole-{rounds}", f"rounds={rounds}") for rounds in (2, 6))
    assert result.summary["digest"] == two.summary["digest"] and result.accuracy == two.accuracy
    assert resume(result.folder, "rounds=6").summary["digest"] == five.summary["digest"]
    assert "stopped" not in Result(result.folder).summary and check(result.folder) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["stopping.patience=1", "data.validation=0"], "stopping.patience: needs validation examples"),
        (["evaluation.keep=best", "data.validation=0"], "evaluation.keep=best: needs validation examples"),
        (["stopping.min_change=1"], "stopping: has no effect without stopping.patience"),
        (["stopping={metric: auroc, patience: 1}"], "unknown metric in stopping.metric 'auroc'"),
        (["stopping.patience=1", "objective={name: local, mode: sequential_ab}", "strategy.name=arithmetic"],
         "stopping.patience: sites of this method train one after the other"),
        (["stopping.patience=1", "objective=layer_selection", "strategy={name: layer_selection, every: 0}"],
         "stopping.patience: with this strategy.every, the last round does what"),
        (["stopping.patience=1", "objective=heterogeneous", "strategy={name: cla_ot, every: 2}"],
         "stopping.patience: with this strategy.every, the last round does what"),
    ],
)  # fmt: skip
def test_what_cannot_choose_is_refused_in_one_line(tmp_path: Path, words: list[str], message: str):
    with pytest.raises(UserError) as error:
        refuse(configured(tmp_path, *words))
    assert str(error.value).startswith(message)


def test_a_method_without_an_aggregate_has_no_best_network(tmp_path: Path):
    with pytest.raises(UserError, match=r"evaluation\.keep: best needs one network for all sites"):
        run(configured(tmp_path, "objective.mode=independent", "strategy.name=head_transfer", "objective.name=components",
                       "evaluation.keep=best"))  # fmt: skip
