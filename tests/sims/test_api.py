"""Experiments from Python: what a notebook does."""

import _thread
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fedloom import FedAvg, FedAvgSession, Result, Task, option, resume, run, sweep
from fedloom.conf.errors import UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.loop import RoundLoop
from fedloom.server.run import training_run
from fedloom.server.unlearning.requests import receive
from fedloom.sims.operations.run_list import rows_of, table
from tests.server.runs import method_of
from tests.sims.commands import ONE, SMALL

pytestmark = pytest.mark.usefixtures("blank_pictures")

TREE = {
    "sites": [{"domain": "digits", "samples": 40, "name": "clinic"}, {"domain": "digits", "samples": 40, "invert": True}],
    "rounds": 1,
    "data": {"size": 8, "test_limit": 60},
    "network": {"name": "mlp", "widths": [16]},
    "objective": {"name": "sum_aggregation"},
    "strategy": {"name": "sum_aggregation"},
    "engine": {"name": "inline"},
}


@pytest.fixture
def root(tmp_path: Path) -> str:
    return f"run.root={tmp_path / 'user'}"


def cleared(record: dict[str, Any]) -> None:
    """A callback that spoils what it is given."""
    for inner in [one for one in record.values() if isinstance(one, dict)]:
        inner.clear()
    record.clear()


def test_a_shipped_experiment_says_nothing_and_comes_back_as_a_result(root: str, capfd: pytest.CaptureFixture[str]):
    threads = torch.get_num_threads()
    capfd.readouterr()
    result = run("digits", *SMALL, "rounds=2", "baselines=[fedavg]", "tracking=[csv]", root, on_round=cleared)
    assert capfd.readouterr() == ("", "")
    assert torch.get_num_threads() == threads
    assert result.folder.is_absolute() and result.report.is_file()
    assert [record["round"] for record in result.metrics] == [1, 2]
    assert all(record["accuracy"] and record["bytes"] for record in result.metrics), "a callback has its own copy"
    assert "validation/union" in (result.folder / "csv/main/rounds.csv").read_text()
    table = result.table()
    assert list(table.index) == [1, 2] and {"train_loss", "accuracy.union", "dropped"} <= set(table.columns)
    assert list(result.accuracy) == list(result.networks) == ["sum", "site-0000", ONE, "site-0002", "fedavg"]
    for name, network in result.networks.items():
        assert not network.training
        assert result.measure(network) == result.accuracy[name]
    good = f"{100 * result.accuracy['sum']['union']:.1f}%"
    assert str(result) == f"finished: {result.summary['method']}, test accuracy {good} (sum): {result.folder}"
    assert "sum" in result._repr_html_() and str(result.folder) in result._repr_html_()
    with result.open_ledger() as ledger:
        assert [event.kind for event in ledger.events()][-1] == "finished"
    assert Result(str(result.folder)) == result


def test_metrics_of_single_sites(root: str):
    result = run(TREE, "rounds=2", "evaluation.where=sites", "tracking=[csv]", root)
    table, records = result.table(sites=True), result.metrics
    names = [site.name for site in result.config.roster]
    assert list(table.index) == [(round, name) for round in (1, 2) for name in sorted(names)]
    assert [sum(record["loss"].values()) / 2 for record in records] == [record["train_loss"] for record in records]
    assert table.loc[(2, "clinic"), "loss"] == records[1]["loss"]["clinic"]
    assert table.loc[(2, "clinic"), "validation/accuracy"] == records[1]["validation"]["clinic"]["accuracy"]
    assert "2,clinic,validation/accuracy" in (result.folder / "csv/main/sites.csv").read_text()
    assert "loss/clinic" not in (result.folder / "csv/main/rounds.csv").read_text()
    result.unlearn("clinic", without_data=True)
    assert not any({"loss", "validation"} & record.keys() for record in result.metrics), "the clinic's follow from the means"
    assert list(result.table(sites=True).columns) == ["dropped", "sent", "received"]


@dataclass(frozen=True)
class Shrunk(FedAvg):
    """FedAvg with a term that draws the weights to 0."""

    weight: float = option(100.0, "weight of the term")

    def session(self, task: Task) -> FedAvgSession:
        assert len(task.held_out("validation")) > 0
        return ShrunkSession(self, task)


class ShrunkSession(FedAvgSession):
    def extra_loss(self, weights: Any, constants: Any, /) -> torch.Tensor:
        return self.objective.weight * torch.stack([weight.square().sum() for weight in weights.values()]).sum()


def test_an_objective_derived_from_fedavgs(root: str):
    tree = {**TREE, "strategy": "fedavg", "training": {"rate": 0.001, "momentum": 0.0}}
    sizes = []
    for name in ("fedavg", f"{__name__}:Shrunk"):
        result = run({**tree, "objective": name}, root, overwrite=True)
        sizes.append(sum(float(weight.detach().square().sum()) for weight in result.network.parameters()))
        assert len(result.predict(result.examples("clinic", "test").x)) == len(result.examples("clinic", "test"))
    assert sizes[1] < 0.8 * sizes[0]


def test_numbers_of_numpy_paths_and_other_defaults_of_torch(tmp_path: Path):
    numpy: Any = np  # whose types the hints do not name
    tree = {
        **TREE,
        "rounds": numpy.int64(1),
        "training": {"rate": numpy.float32(0.05)},
        "run": {"root": tmp_path, "name": "n"},
    }
    torch.set_default_dtype(torch.float64)
    try:
        result = run(tree)
        assert result.predict(result.examples("clinic").x, scores=True).dtype == torch.float32
        assert result.measure(result.network) == result.accuracy["sum"]
        assert result.unlearn(numpy.array(["clinic"]), repair=numpy.int64(1))["options"]["repair"] == 1
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    (again,) = sweep(tree, seeds=numpy.arange(1), over={"training.rate": numpy.array([0.1])}, parallel=numpy.int64(1))
    assert again.config.training.rate == 0.1


def test_a_site_is_forgotten(run_folder: Path):
    result = Result(run_folder)
    digest = result.summary["digest"]
    certificate = result.unlearn(ONE, request_id="r1", reason="consent withdrawn")
    assert certificate["sites"] == [ONE] and (result.folder / "certificates/r1.json").is_file()
    assert result.summary["digest"] != digest
    assert ONE not in result.networks and ONE not in result.accuracy
    with pytest.raises(KeyError, match="unknown network"):
        result.networks[ONE]
    with pytest.raises(UserError, match="unknown site"):
        result.unlearn(["site-0009"])


@pytest.fixture
def run_folder(request: pytest.FixtureRequest) -> Path:
    """The fixture `run`, whose name is taken here."""
    return request.getfixturevalue("run")


def test_what_is_not_an_experiment_is_reported():
    for odd in (None, 3, ["digits"]):
        with pytest.raises(UserError, match="takes a name such as 'digits', the path of a YAML file or a dictionary"):
            run(odd)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="takes words such as"):
        run("digits", {"rounds": 5})  # type: ignore[arg-type]


@pytest.mark.parametrize(("tree", "where"), [
    ({"sites": [{"domain": "digits", "label": "a\ud800"}]}, r"sites\[0\]\.label"),
    ({"data\udcff": 1}, "a key"),
])  # fmt: skip
def test_half_a_surrogate_pair_in_a_dictionary_is_refused_where_it_is(tree: dict[str, Any], where: str):
    with pytest.raises(
        UserError, match=rf"^{where}: got '.*', which has half a surrogate pair, not a character; remove it$"
    ):
        run(tree)


def test_a_dictionary_is_a_configuration(root: str):
    result = run(TREE, "training.rate=1e-4", "run.name=mine", root)
    assert result.folder.name == "mine"
    assert result.config.training.rate == 1e-4
    assert set(result.accuracy) == {"sum", "clinic", "site-0001"}
    with pytest.raises(UserError, match="exists"):
        run(TREE, "run.name=mine", root)
    assert run(TREE, "run.name=mine", root, overwrite=True).summary["status"] == "finished"


def test_a_network_of_any_origin_is_measured_and_stays_as_it_is(run_folder: Path):
    own = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10)).train()
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    assert 0 <= Result(run_folder).measure(own)["union"] <= 1
    assert own.training and all(torch.equal(tensor, before[name]) for name, tensor in own.state_dict().items())


def test_what_cannot_work_is_refused_before_anything_starts(root: str, tmp_path: Path):
    for bad, message in [("digts", "did you mean 'digits'"), ({**TREE, "round": 1}, "unknown key 'round'"),
                      ({**TREE, "rounds": Path()}, "rounds: got"), (tmp_path / "no.yaml", "not found")]:  # fmt: skip
        with pytest.raises(UserError, match=message):
            run(bad, root)
    within: dict = {"name": "mlp"}
    within["within"] = within
    for odd, message in [
        ({"baselines": {"fedavg"}}, "^baselines: got a value of the type set, takes texts"),
        ({"network": within}, r"^network\.within.*: is nested too deep, or contains itself"),
    ]:
        with pytest.raises(UserError, match=message):
            run({**TREE, **odd}, root)
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UserError, match=r"^sites.*nested"):
        run({**TREE, "sites": deep}, root)
    with pytest.raises(UserError, match="is not a run"):
        Result(tmp_path)
    assert not (tmp_path / "user").exists()


def test_an_interrupted_run_keeps_its_rounds_and_is_resumed(root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = training_run.one_round

    def interrupted(loop: RoundLoop, round: int, *rest: Any) -> dict:
        if round == 3:
            _thread.interrupt_main()  # as Ctrl-C does
            time.sleep(0.1)  # it is heard here, and in no callback, where Python ignores it
        return whole(loop, round, *rest)

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(training_run, "one_round", interrupted)
        run(TREE, "run.name=stopped", "rounds=5", root)
    stopped = Result(tmp_path / "user/stopped")
    assert stopped.summary["status"] == "interrupted" and len(stopped.metrics) == 2
    assert resume(stopped.folder).summary["status"] == "finished" and len(stopped.metrics) == 5


@pytest.mark.parametrize("stops", [RuntimeError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_what_is_committed_is_on_record_whatever_a_callback_raises(root: str, stops: BaseException):
    def stop(record: dict) -> None:
        if record["round"] == 2:
            raise stops

    with pytest.raises(type(stops)):
        run(TREE, "run.name=stopped", "rounds=4", "tracking=[csv]", root, overwrite=True, on_round=stop)
    stopped = Result(Path(root.partition("=")[2]) / "stopped")
    with Ledger.open(stopped.folder) as ledger:
        assert [row.round for row in ledger.rounds() if row.round] == [1, 2]
    assert [record["round"] for record in stopped.metrics] == [1, 2] and "accuracy" in stopped.metrics[1]
    network = stopped.network.state_dict()
    with method_of(stopped.config) as method:
        state = method.state.aggregate().state
    assert all(torch.equal(network[name], tensor) for name, tensor in state.items())
    [table] = (stopped.folder / "csv").rglob("rounds.csv")
    assert len(table.read_text().splitlines()) == 3
    whole = run(TREE, "run.name=whole-2", "rounds=4", root, overwrite=True)
    assert resume(stopped.folder).summary["digest"] == whole.summary["digest"]
    assert [record["round"] for record in stopped.metrics] == [1, 2, 3, 4]


def test_a_finished_run_gets_more_rounds_and_nothing_else(root: str):
    done, constant = run(TREE, "run.name=more", "training.schedule=constant", root), "training.schedule=constant"
    for word, message in {
        "seed=1": "can only get more rounds",
        "rounds=ten": "takes a whole number",
        "rounds=true": "whole",
    }.items():
        with pytest.raises(UserError, match=message):
            resume(done.folder, word)
    whole = run(TREE, "run.name=whole-3", constant, "rounds=3", root)
    assert resume(done.folder, "rounds=3").summary["digest"] == whole.summary["digest"]
    assert (done.config.rounds, rows_of(done.folder)[0]["rounds"]) == (3, 3)


def test_a_request_that_waits_when_a_run_is_stopped_is_named(root: str, capsys: pytest.CaptureFixture[str]):
    path = Path(root.partition("=")[2]) / "asked"

    def ask(record: dict) -> None:
        with Ledger.open(path, server=False) as ledger:
            receive(ledger, "2026-17", ["clinic"], "", {})
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(TREE, "run.name=asked", "rounds=3", root, progress=True, on_round=ask)
    message = "Request '2026-17' (clinic) waits. Run `fedloom resume"
    assert message in " ".join("".join(capsys.readouterr()).split())
    [row] = rows_of(path)
    assert row["waiting"] == ["2026-17"] and "interrupted, request 2026-17 waits" in table([row], path).plain()
    resume(path)
    assert rows_of(path)[0]["waiting"] == [] and Result(path).summary["unlearned"] == ["clinic"]


def test_a_run_whose_folder_is_moved_writes_into_no_other(root: str, tmp_path: Path):
    place, moved = tmp_path / "user/moving", tmp_path / "moved/moving"
    moved.parent.mkdir()

    def move(record: dict) -> None:
        if record["round"] == 2:
            place.rename(moved)
            run(TREE, "run.name=moving", "seed=3", root)

    whole = run(TREE, "run.name=whole", "rounds=4", root)
    with pytest.raises(UserError, match=r"moving: this folder has moved while its server worked"):
        run(TREE, "run.name=moving", "rounds=4", root, on_round=move)
    other = Result(place)
    assert other.summary["status"] == "finished" and other.summary["seed"] == 3 and check(place) == []
    assert resume(moved).summary["digest"] == whole.summary["digest"]


def test_the_package_is_imported_at_once():
    code = "import sys, fedloom; print([name for name in ('torch', 'flwr', 'numpy') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
