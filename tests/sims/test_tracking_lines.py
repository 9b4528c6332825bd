"""What trackers keep of the rounds of one part: each once, whatever happened before."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import wandb
from mlflow import MlflowClient

from fedloom.conf.loading import from_mapping
from fedloom.conf.schema import Config
from fedloom.sims.tracking.base import Part
from fedloom.sims.tracking.mlflow import ID, MlflowLine, MlflowTracker
from fedloom.sims.tracking.numbers import round_numbers, safe, site_numbers
from fedloom.sims.tracking.tensorboard import TensorBoardTracker
from fedloom.sims.tracking.wandb_files import last_number
from tests.sims.trackers import ROUNDS, TREE, read_events


@pytest.fixture
def config(tmp_path: Path) -> Config:
    config = from_mapping({**TREE, "run": {"root": str(tmp_path), "name": "direct"}})
    (tmp_path / "direct").mkdir()
    return dataclasses.replace(config, experiment="direct")


def record(number: int, loss: float) -> dict[str, Any]:
    return {"round": number, "replies": 2, "dropped": {}, "train_loss": loss, "bytes": {"clinic": [10, 20]}}


def test_rounds_that_were_taken_back_leave_no_double_steps(config: Config):
    """After a rollback to round 1; TensorBoard takes them back, MLflow has a run for before and one for after."""
    first, second = [record(number, 1.0) for number in ROUNDS], [record(number, 2.0) for number in ROUNDS]
    for tracker in (TensorBoardTracker(), MlflowTracker()):
        writer = tracker.open(config)
        writer.part(Part("main", "x", 3), first)
        writer.part(Part("main", "x-1", 1), first[:1])
        for each in second[1:]:
            writer.round(each)
        writer.close("finished")
    folder = Path(config.run.root) / config.run.name
    events = read_events(folder / "tensorboard/main").Scalars("train_loss")
    assert [(event.step, event.value) for event in events] == [(1, 1.0), (2, 2.0), (3, 2.0)]
    client = MlflowClient(tracking_uri=(folder / "mlruns").as_uri())
    found = {one.data.tags[ID]: one.info.run_id for one in client.search_runs(_experiments(client))}
    curves = {id: [one.value for one in client.get_metric_history(run, "train_loss")] for id, run in found.items()}
    assert curves == {"x": [1.0, 1.0, 1.0], "x-1": [1.0, 2.0, 2.0]}


def _experiments(client: MlflowClient) -> list[str]:
    return [one.experiment_id for one in client.search_experiments()]


def test_a_round_in_the_middle_of_which_a_process_died_is_completed(config: Config):
    writer = MlflowTracker().open(config)
    writer.part(Part("main", "x", 1), [record(1, 1.0)])
    line = writer.lines["main"]
    assert isinstance(line, MlflowLine)
    line.log({"train_loss": 5.0}, 2, again=False)  # the rest of round 2 was never written
    later = MlflowTracker().open(config)
    later.part(Part("main", "x", 2), [record(1, 1.0), record(2, 5.0)])
    client = MlflowClient(tracking_uri=(Path(config.run.root) / "direct/mlruns").as_uri())
    for name in ("train_loss", "replies", "bytes/sent", "site clinic/sent"):
        assert [point.step for point in client.get_metric_history(line.id, name)] == [1, 2]


def test_a_file_of_wandb_is_read_up_to_where_it_was_torn(tmp_path: Path):
    silent = wandb.Settings(console="off", silent=True)
    with wandb.init(dir=str(tmp_path), id="x", project="p", mode="offline", reinit="create_new", settings=silent) as run:
        for number in range(1, 30):
            run.log({"round": number, "text": "a" * 3000}, step=number)  # several blocks
    deadline = time.monotonic() + 60.0  # its own process writes
    while last_number(tmp_path / "wandb", "x", "round") < 29 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert last_number(tmp_path / "wandb", "x", "round") == 29
    (path,) = tmp_path.glob("wandb/offline-run-*-x/run-x.wandb")
    path.write_bytes(path.read_bytes()[:40_000])
    assert 5 < last_number(tmp_path / "wandb", "x", "round") < 13
    path.write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a W&B file"):
        last_number(tmp_path / "wandb", "x", "round")
    assert last_number(tmp_path / "wandb", "y", "round") == 0


def test_numbers_of_a_record():
    row = {
        "round": 3, "replies": 2, "seconds": 0.5, "dropped": {"b": "too slow"}, "bytes": {"a": [1, 2], "b": [3, 0]},
        "accuracy": {"digits": 0.5, "a/b": 0.25, "union": 0.4}, "epsilon": {"a": 1.5, "b": 2.5}, "recalibrated": True,
        "clipped": {"a": {"body": 7.0}}, "odd": "text", "nothing": float("nan"), "at_home": {"a": 0.75},
        "loss": {"a": 0.5, "d": 1.5}, "validation": {"a": {"auroc": 0.9}},
    }  # fmt: skip
    assert round_numbers({**row, "at_home": {}}) == {
        "replies": 2, "seconds": 0.5, "recalibrated": 1.0, "validation/digits": 0.5, "validation/a_b": 0.25,
        "validation/union": 0.4, "dropped": 1.0, "clipped": 1.0, "bytes/sent": 4.0, "bytes/received": 2.0, "epsilon": 2.5,
    }  # fmt: skip
    assert site_numbers(row, {"a", "b", "c"}) == {
        "a": {
            "dropped": 0.0,
            "sent": 1.0,
            "received": 2.0,
            "epsilon": 1.5,
            "clipped/body": 7.0,
            "at_home": 0.75,
            "loss": 0.5,
            "validation/auroc": 0.9,
        },
        "b": {"dropped": 1.0, "sent": 3.0, "received": 0.0, "epsilon": 2.5},
    }
    assert [safe(name) for name in ("test/../é", "..", "a b/c", "/x")] == ["test/_/_", "_", "a b/c", "_/x"]
