"""Trackers: what they wrote is read again by their own readers, and a run is what it would be without them."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedloom import Result, resume, run
from fedloom.conf.errors import UserError
from fedloom.sims.operations.ledger import audit
from fedloom.sims.tracking import follow
from fedloom.sims.tracking.wandb_files import messages
from tests.sims.commands import Command, refused
from tests.sims.trackers import ROUNDS, TREE, read_events

pytestmark = pytest.mark.usefixtures("blank_pictures")

ALL = ["tensorboard", {"name": "mlflow", "sites": 1}, "wandb", "csv"]


def stop_after_two(record: dict[str, Any]) -> None:
    if record["round"] == 2 and not record["part"]:
        raise RuntimeError("seen enough")


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all trackers that a callback stopped after its second round, and that then went on."""
    root = tmp_path_factory.mktemp("user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, "SECONDS_AT_END", 500.0)  # the machine may be busy
        with pytest.raises(RuntimeError, match="seen enough"):
            run(
                {**TREE, "tracking": ALL, "baselines": ["fedavg"]},
                f"run.root={root}",
                "run.name=all",
                on_round=stop_after_two,
            )
        stopped = Result(root / "all")
        assert stopped.summary["status"] == "failed" and len(stopped.metrics) <= 2
        return resume(stopped.folder).folder


@pytest.fixture(scope="module")
def untracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without, never stopped."""
    return run({**TREE, "baselines": ["fedavg"]}, f"run.root={tmp_path_factory.mktemp('other')}", "run.name=all").folder


def steps(events: EventAccumulator, name: str) -> list[int]:
    return [event.step for event in events.Scalars(name)]


def test_a_run_is_the_same_with_trackers_and_without(tracked: Path, untracked: Path):
    one, other = Result(tracked), Result(untracked)
    assert one.summary["digest"] == other.summary["digest"] and one.accuracy == other.accuracy

    def rows(result: Result) -> list[dict[str, Any]]:
        return [{key: row[key] for key in row if key != "seconds"} for row in result.metrics]

    assert rows(one) == rows(other)
    assert audit(tracked)["ok"] and audit(tracked)["notes"] == audit(untracked)["notes"]
    assert audit(tracked)["digest"] == audit(untracked)["digest"]


def test_tensorboard_reads_every_round_once(tracked: Path):
    metrics = Result(tracked).metrics
    for part in ("main", "baselines/fedavg"):
        events = read_events(tracked / "tensorboard" / part)
        for name in ("train_loss", "validation/union", "bytes/sent", "replies", "dropped", "site clinic/received"):
            assert steps(events, name) == ROUNDS
    events = read_events(tracked / "tensorboard/main")
    assert [event.value for event in events.Scalars("train_loss")] == pytest.approx([row["train_loss"] for row in metrics])
    (text,) = events.Tensors("configuration/text_summary")
    assert b"mlp" in text.tensor_proto.string_val[0]


def test_tensorboard_reads_what_came_out(tracked: Path):
    summary, events = Result(tracked).summary, read_events(tracked / "tensorboard/results")
    for name, shares in summary["accuracy"].items():
        (event,) = events.Scalars(f"test/{name}/union")
        assert event.value == pytest.approx(shares["union"])
    assert len(events.Images("plots/accuracy")) == 1
    (digest,) = events.Tensors("digest/sum/text_summary")
    assert digest.tensor_proto.string_val[0].decode() == summary["digest"]["sum"]
    assert any(name.startswith("tables/Test accuracy") for name in events.Tags()["tensors"])


def test_mlflow_reads_every_round_once_and_what_came_out(tracked: Path):
    client, result = MlflowClient(tracking_uri=(tracked / "mlruns").as_uri()), Result(tracked)
    experiment = client.get_experiment_by_name(result.config.experiment)
    assert experiment is not None
    runs = {one.info.run_name: one for one in client.search_runs([experiment.experiment_id])}
    assert set(runs) == {"all", "all/baselines/fedavg"}
    main, baseline = runs["all"], runs["all/baselines/fedavg"]
    assert baseline.data.tags["mlflow.parentRunId"] == main.info.run_id
    assert main.info.status == baseline.info.status == "FINISHED"
    for one in runs.values():
        for name in ("train_loss", "validation/union", "site clinic/sent"):
            assert [point.step for point in client.get_metric_history(one.info.run_id, name)] == ROUNDS
    assert not any("site-0001/" in name and name.startswith("site ") for name in main.data.metrics)  # sites: 1
    assert main.data.metrics["test/sum/union"] == result.accuracy["sum"]["union"]
    assert main.data.params["training.rate"] == "0.03" and '"clinic"' in main.data.params["sites"]
    assert main.data.tags["digest.sum"] == result.summary["digest"]["sum"]
    files = {file.path for place in (None, "plots", "tables") for file in client.list_artifacts(main.info.run_id, place)}
    assert {"config.yaml", "report.html", "plots/accuracy.png", "tables/Test accuracy.md"} <= files


def test_wandb_wrote_every_round_once_and_what_came_out(tracked: Path):
    rounds: dict[str, list[int]] = {}
    summaries: set[str] = set()
    for path in sorted(tracked.glob("wandb/offline-run-*/*.wandb")):
        records = list(messages(path))
        begun = next((record.run for record in records if record.WhichOneof("record_type") == "run"), None)
        if begun is None:  # a session that ended before wandb wrote anything, on a busy machine
            assert not any(record.history.item for record in records)
            continue
        for record in records:
            items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
            if "train_loss" in items:
                rounds.setdefault(begun.display_name, []).append(int(items["round"]))
            summaries |= {item.key or item.nested_key[0] for item in record.summary.update}
    assert rounds == {"all": ROUNDS, "all/baselines/fedavg": ROUNDS}
    assert {"test/sum/union", "digest/sum"} <= summaries
    assert list(tracked.glob("wandb/offline-run-*/files/media/images/plots/*.png"))


def test_csv_files_hold_every_round_once(tracked: Path):
    def rows(name: str) -> list[dict[str, str]]:
        with (tracked / "csv" / name).open(newline="") as file:
            return list(csv.DictReader(file))

    for part in ("main", "baselines/fedavg"):
        assert [int(row["round"]) for row in rows(f"{part}/rounds.csv")] == ROUNDS
    result = Result(tracked)
    assert [float(row["train_loss"]) for row in rows("main/rounds.csv")] == [row["train_loss"] for row in result.metrics]
    sent = [row for row in rows("main/sites.csv") if (row["site"], row["name"]) == ("clinic", "sent")]
    assert [float(row["value"]) for row in sent] == [row["bytes"]["clinic"][0] for row in result.metrics]
    found = {row["name"]: row["value"] for row in rows("results.csv")}
    assert float(found["test/sum/union"]) == result.accuracy["sum"]["union"]
    assert found["digest/sum"] == result.summary["digest"]["sum"]


def test_a_tracker_that_comes_later_gets_all_rounds_and_goes_with_the_run(untracked: Path):
    result = resume(untracked, tracking=["csv"])
    for part in ("main", "baselines/fedavg"):
        assert len((untracked / "csv" / part / "rounds.csv").read_text().splitlines()) == 1 + len(ROUNDS)
    assert audit(untracked)["ok"] and result.config.tracking == []
    tree = {**TREE, "rounds": 1, "baselines": []}
    words = [f"run.root={untracked.parent}", "run.name=all"]
    assert not (run(tree, *words, overwrite=True).folder / "csv").exists()
    statuses: list[str] = []
    words += ["tracking=[csv]", "run.resume=true"]
    assert run(tree, *words, on_finished=lambda result: statuses.append(result.summary["status"])).folder == untracked
    assert (untracked / "csv/main/rounds.csv").is_file() and statuses == ["finished"]


@pytest.mark.parametrize(
    ("tracker", "message"),
    [
        ("tests.sims.trackers:Full", "OSError: [Errno 28] No space left on device: '/full'"),
        ("tests.sims.trackers:Hanging", "did not end within 0.2 s"),
        ("tests.sims.trackers:Muted", "Mute"),
        ({"name": "mlflow", "uri": "http://127.0.0.1:1"}, "MlflowException: "),
    ],
)
def test_a_tracker_that_fails_says_so_once_and_the_run_continues(
    tracker: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    name = tracker if isinstance(tracker, str) else tracker["name"]
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    if "Hanging" in name:
        monkeypatch.setattr(follow, "SECONDS_AT_END", 0.2)
    result = run({**TREE, "tracking": [tracker]}, f"run.root={tmp_path}", "run.name=odd")
    assert result.summary["status"] == "finished" and len(result.metrics) == len(ROUNDS)
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("tracking: ")]
    assert len(lines) == 1 and lines[0].startswith(f"tracking: {name} has stopped ({message}"), lines
    assert lines[0].endswith("The run continues without it.")


def test_what_one_tracker_does_to_what_it_receives_is_nothing_to_another(tmp_path: Path):
    trackers = ["tests.sims.trackers:Greedy", "csv", {"name": "mlflow", "experiment": "it's mine"}]
    result = run({**TREE, "tracking": trackers}, f"run.root={tmp_path}", "run.name=greedy")
    assert len((result.folder / "csv/main/rounds.csv").read_text().splitlines()) == 1 + len(ROUNDS)
    assert [one.name for one in (result.folder / "mlruns").iterdir() if one.name.isdigit() and one.name != "0"]


def test_what_no_tracker_can_be_made_of_is_refused_before_anything_starts(
    fedloom: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)  # as if it were not installed
    root = f"run.root={tmp_path / 'user'}"
    for given, words in [
        ("[csv,wandb]", ["tracking[1]: 'wandb' needs the package 'wandb'", "pip install 'fedloom[wandb]'"]),
        ("[tensorbord]", ["did you mean 'tensorboard'?"]),
        ("[csv,csv]", ["tracking[1]: 'csv' appears twice"]),
        ("['tests.sims.trackers:Nowhere']", ["needs the package 'there_is_none.of_it'", "pip install there_is_none.of_it"]),
        ("[3]", ["tracking[0]: got 3, takes a name"]),
        ("[{name: mlflow, url: x}]", ["unknown key 'tracking[0].url'; did you mean 'tracking[0].uri'?"]),
        ("[{name: mlflow, uri: 'http://bob:S3CR3T@localhost:1'}]", ["tracking[0].uri: has a password or a user's name"]),
        ("[{name: mlflow, uri: 'https://S3CR3T@localhost:1'}]", ["tracking[0].uri", "MLFLOW_TRACKING_PASSWORD"]),
        ("csv", ["tracking: got 'csv', takes a list"]),
    ]:
        said = fedloom("run", "digits", "engine.name=inline", root, f"tracking={given}")
        refused(said, *words)
        assert "S3CR3T" not in said.err
    assert not (tmp_path / "user").exists()
    with pytest.raises(UserError, match="takes a list"):
        run({**TREE, "tracking": "csv"}, root)


def test_what_a_callback_raises_in_the_middle_of_a_round_ends_the_run_which_continues_from_there(
    tracked: Path, tmp_path: Path
):
    answers: list[tuple[str, bool, str]] = []

    def third(*answer: Any) -> None:
        answers.append(answer)
        if len(answers) == 3:
            raise LookupError("of mine")

    with pytest.raises(LookupError, match="of mine"):
        run(TREE, f"run.root={tmp_path}", "run.name=raised", on_reply=third)
    assert answers[0] == ("clinic", True, "")
    stopped = Result(tmp_path / "raised")
    assert stopped.summary["status"] == "failed" and len(stopped.metrics) == 1
    rounds: list[tuple[int, str]] = []
    resume(stopped.folder, on_round=lambda record: rounds.append((record["round"], record["part"])))
    assert rounds == [(2, ""), (3, "")] and len(stopped.metrics) == len(ROUNDS)
    assert stopped.summary["digest"] == Result(tracked).summary["digest"]


def test_packages_are_imported_only_when_asked_for():
    heavy = ["tensorboard", "mlflow", "wandb"]
    code = f"import sys, fedloom.sims.operations.simulate; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_trackers_hear_of_a_round_of_repair_and_of_what_came_out_without_a_site(
    tracked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    result = Result(shutil.copytree(tracked, tmp_path / "all", symlinks=True))
    monkeypatch.setattr(follow, "SECONDS_AT_END", 500.0)
    result.unlearn("site-0001", repair=1)
    assert steps(read_events(result.folder / "tensorboard/main"), "train_loss") == [*ROUNDS, len(ROUNDS) + 1]
    results = (result.folder / "csv/results.csv").read_text()
    assert result.summary["digest"]["sum"] in results and "site-0001" not in results
    assert audit(result.folder)["ok"]


def test_a_package_that_is_gone_does_not_keep_a_site_from_being_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    with monkeypatch.context() as gone:
        result = run({**TREE, "tracking": ["tests.sims.trackers:Absent", "csv"]}, f"run.root={tmp_path}", "run.name=gone")
        gone.setattr("tests.sims.trackers.Absent.package", "no_such_package")
        capfd.readouterr()
        assert result.unlearn("clinic")["sites"] == ["clinic"]
    output = capfd.readouterr().out
    assert "needs the package 'no_such_package', which is not installed" in output and "; nothing is tracked" in output
