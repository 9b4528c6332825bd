"""Commands on a run of a real federation, from a machine that cannot train its sites: refused before anything is touched."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedloom.conf import Config
from fedloom.conf.errors import UserError
from fedloom.server.ledger import Ledger
from fedloom.server.ledger.audit import check
from fedloom.server.rounds.listener import LogListener
from fedloom.server.run.experiment import run_experiment
from fedloom.server.run_folder.folder import RunFolder
from fedloom.server.unlearning.requests import KIND
from fedloom.sims.engines.adapter import store_folder
from fedloom.sims.engines.inline import InlineGrid
from fedloom.sims.operations.simulate import resume
from fedloom.sims.operations.unlearn import UnlearningRequest, unlearn
from fedloom.sims.progress.listeners import listener_for
from tests.server.parts import files, folder, small

pytestmark = pytest.mark.usefixtures("blank_pictures")


@pytest.fixture
def run(tmp_path: Path) -> Config:
    """A finished run whose configuration says that Flower carried it."""
    config = small(tmp_path, "engine.name=flower", "rounds=2", sites=3, samples=20)
    run_experiment(InlineGrid(3, store_folder(config)), config, LogListener())
    return config


def kept(config: Config) -> dict[str, Any]:
    """All that is in the run's folder but what a look at it may touch."""
    return {name: content for name, content in files(folder(config)).items() if not name.startswith("ledger.lock")}


@pytest.mark.parametrize("wish", [{"repair": 1}, {"retrain": True}, {"rollback": True}], ids=lambda wish: next(iter(wish)))
def test_what_would_have_to_be_trained_is_refused_and_nothing_is_touched(run: Config, wish: dict[str, Any]):
    """Once the site was subtracted and erased first, and then the engine failed."""
    with Ledger.open(folder(run), server=False) as ledger:
        before = [(event.kind, event.digest) for event in ledger.events()], ledger.all_latest()
    with pytest.raises(UserError, match=r"engine\.name: 'flower' is a real federation: name its folder in engine.address"):
        unlearn(folder(run), UnlearningRequest(["site-0001"], **wish))
    with Ledger.open(folder(run), server=False) as ledger:
        assert ([(event.kind, event.digest) for event in ledger.events()], ledger.all_latest()) == before
        assert not ledger.waiting(applied=True)


def test_what_needs_no_training_is_done(run: Config):
    _, certificate = unlearn(folder(run), UnlearningRequest(["site-0001"]))
    assert certificate["sites"] == ["site-0001"]


def test_a_request_that_waits_for_the_federation_is_left_to_it_while_others_are_fulfilled(run: Config):
    with Ledger.open(folder(run), server=False) as ledger:
        ledger.receive("later", KIND, ["site-0002"], "", {"repair": 1, "retrain": False, "rollback": False})
    _, certificate = unlearn(folder(run), UnlearningRequest(["site-0001"]))
    assert certificate["sites"] == ["site-0001"]
    with Ledger.open(folder(run), server=False) as ledger:
        assert [(request.id, request.state) for request in ledger.waiting(applied=True)] == [("later", "received")]
        assert ledger.sites() == {"site-0000": False, "site-0001": True, "site-0002": False}


def test_resuming_says_how_to_and_touches_nothing(run: Config):
    before = kept(run)
    with pytest.raises(UserError, match=r"start the run with `flwr run \. --run-config .*run\.resume=true"):
        resume(folder(run))
    assert kept(run) == before


def test_an_engine_that_cannot_start_is_reported_before_anything_is_subtracted(tmp_path: Path):
    config = small(tmp_path, "engine.name=ray", "engine.address=127.0.0.1:1", "rounds=1", sites=2, samples=20)
    run_experiment(InlineGrid(2, store_folder(config)), config, LogListener())
    with pytest.raises(UserError, match=r"there is no Ray cluster at 127\.0\.0\.1:1"):
        unlearn(folder(config), UnlearningRequest(["site-0001"], repair=1))
    with Ledger.open(folder(config), server=False) as ledger:
        assert ledger.sites() == {"site-0000": False, "site-0001": False}
        assert len(ledger.all_latest()) == 2


def test_resuming_what_is_finished_starts_no_engine_and_says_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    config = small(tmp_path, "engine.name=ray", "engine.address=127.0.0.1:1", "rounds=1", sites=2, samples=20)
    done = run_experiment(InlineGrid(2, store_folder(config)), config, LogListener())
    assert resume(folder(config), listener=listener_for(quiet=False)) == json.loads(json.dumps(done))
    page, said = folder(config) / "report.html", capfd.readouterr().out.splitlines()
    assert said == [f"{folder(config)}: the run is finished after 1 round; nothing remains to do", f"report: {page}"]
    page.write_text("as it was")
    before = kept(config)
    resume(folder(config))
    assert kept(config) == before
    (folder(config) / "metrics.jsonl").write_text("{{{")  # no longer what came out
    with pytest.raises(UserError, match=r"there is no Ray cluster at 127\.0\.0\.1:1"):
        resume(folder(config))


def test_a_rollback_that_cannot_be_is_refused_before_an_engine_starts_and_what_finished_stays_vouched_for(tmp_path: Path):
    """The run was noted as resumed before; its files' digests no longer counted."""
    config = small(tmp_path, "engine.name=ray", "engine.address=127.0.0.1:1", "rounds=2", sites=2, samples=20)
    run_experiment(InlineGrid(2, store_folder(config)), config, LogListener())
    with pytest.raises(UserError, match=r"refused: .*the state after round \d is not stored"):
        unlearn(folder(config), UnlearningRequest(["site-0001"], rollback=True))
    (folder(config) / "metrics.jsonl").write_text("{{{")
    assert [problem.file for problem in check(folder(config))] == ["metrics.jsonl"]


def test_a_summary_says_why_a_run_failed(tmp_path: Path):
    config = small(tmp_path, "rounds=1", sites=2, samples=20)
    with pytest.raises(ZeroDivisionError):
        run_experiment(InlineGrid(2, store_folder(config)), config, Broken())
    assert RunFolder(folder(config)).summary()["error"] == "ZeroDivisionError: integer division or modulo by zero"


class Broken(LogListener):
    """Fails when a round is done."""

    def round_done(self, record: dict[str, Any]) -> None:
        raise ZeroDivisionError("integer division or modulo by zero")
