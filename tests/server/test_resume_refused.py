"""What is not resumed: other configurations, no runs, runs at work; and what resuming a finished run does."""

import json
import shutil
from pathlib import Path

import pytest

from fedloom.conf import UserError
from fedloom.server.ledger import Ledger, LedgerError
from fedloom.server.ledger.audit import check
from fedloom.server.run_folder.folder import METRICS
from tests.server.parts import WatchedApp, files, folder
from tests.server.resumes import configured, metrics, results, resumed, run


@pytest.mark.parametrize("other", ["seed=1", "training.rate=0.5", "objective.mode=fedavg"])
def test_another_configuration_is_not_resumed(tmp_path: Path, halted, other):
    config = halted(tmp_path, 2)
    before = files(folder(config))
    with pytest.raises(
        UserError, match=r"digits: was run with another configuration \(config\.yaml\); it can only be resumed with that one"
    ):
        resumed(configured(tmp_path, other))
    assert files(folder(config)) == before


@pytest.mark.parametrize("content", ["nothing", "config.yaml"])
def test_what_is_not_a_run_is_not_resumed(tmp_path: Path, content):
    config = configured(tmp_path)
    folder(config).mkdir(parents=True)
    if content != "nothing":
        (folder(config) / content).write_text("model: precious\n")
    before = files(tmp_path)
    with pytest.raises(UserError, match="is not a run of fedloom"):
        resumed(config)
    assert files(tmp_path) == before


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path):
    config = configured(tmp_path, "baselines=[fedavg]")
    summary = run(config)
    before, client = files(folder(config)), WatchedApp()
    assert resumed(config, client=client) == json.loads(json.dumps(summary))
    assert files(folder(config)) == before
    assert client.orders == []


def test_what_a_finished_run_has_lost_is_made_again(tmp_path: Path, undisturbed):
    config = configured(tmp_path)
    run(config)
    shutil.rmtree(folder(config) / "states")
    (folder(config) / METRICS).write_text("")
    client = WatchedApp()
    resumed(config, client=client)
    assert client.orders == []
    assert {**results(folder(config)), "metrics": []} == {**undisturbed(), "metrics": []}
    assert metrics(folder(config))[-1] == undisturbed()["metrics"][-1]
    assert check(folder(config)) == []


def test_a_second_server_is_refused_in_one_line_and_changes_nothing(tmp_path: Path, halted):
    config = halted(tmp_path, 2)
    with Ledger.open(folder(config)):
        before = files(folder(config))
        with pytest.raises(
            LedgerError, match=r"digits: process \d+ is working on it; wait until it ends, or stop it"
        ) as raised:
            resumed(config)
        assert "\n" not in str(raised.value)
        assert files(folder(config)) == before
    assert resumed(config)["status"] == "finished"
